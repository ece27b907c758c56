"""RMS norms as one operation each, while nothing needs gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import rms_norm


class FusedNorms:
    """The RMS norms of a model that ``torch.nn.functional.rms_norm`` computes just as well.

    Hugging Face spells a norm out in eight operations, a good part of the time of a small model's decode step. Each is
    tried on a few numbers first; one that comes out otherwise (another formula, another rounding) is left alone.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        candidates = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
        self._norms = [(norm, eps) for norm in candidates if (eps := _same_as_fused(norm)) is not None]

    def install(self) -> None:
        """Let the norms run as one operation."""
        for norm, eps in self._norms:
            norm.forward = _fused(norm, eps)

    def remove(self) -> None:
        """Give the norms their own forward back."""
        for norm, _ in self._norms:
            vars(norm).pop("forward", None)


def _fused(norm: Any, eps: float) -> Any:
    weight, shape, spelled_out = norm.weight, norm.weight.shape, norm.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.dtype != weight.dtype:  # under autocast
            return spelled_out(hidden)
        return rms_norm(hidden, shape, weight, eps)

    return forward


@torch.no_grad()
def _same_as_fused(norm: Any) -> float | None:
    """Return the norm's epsilon where the fused operation gives what it gives."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    size = weight.numel()
    numbers = torch.linspace(-3, 3, 3 * size, dtype=weight.dtype, device=weight.device).reshape(3, size)
    expected, actual = norm(numbers), rms_norm(numbers, weight.shape, weight, eps)
    close = expected.dtype == actual.dtype and torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)
    return eps if close else None
