"""The gradient of an optimizer step, before it is applied."""

from __future__ import annotations

import torch


def clip_gradient(model: torch.nn.Module, max_norm: float, policy_version: int) -> float:
    """Scale the gradient down to ``max_norm``, where that is not 0; return the norm that it had.

    Raises:
        FloatingPointError: It is not finite; no weight has been touched.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf))
    if not norm < torch.inf:
        raise FloatingPointError(
            f"The gradient's norm is {norm} at policy version {policy_version}; the weights were not touched. "
            "Lower the learning rate, or look for NaN rewards and extreme log-probs."
        )
    return norm
