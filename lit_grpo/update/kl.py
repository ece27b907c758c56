"""Estimators of the KL divergence from the reference, per sampled token."""

from __future__ import annotations

import torch


def k3(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return ``exp(d) - d - 1`` with ``d = log(reference / policy)``: unbiased and never negative.

    Source: J. Schulman, "Approximating KL divergence" (2020); the term of GRPO (arXiv 2402.03300, eq. 4).
    """
    difference_N = reference_logprobs_N - logprobs_N
    return difference_N.exp() - difference_N - 1
