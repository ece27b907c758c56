"""The proximal policy: what probability ratios are taken to, and so what the clip holds on to."""

from __future__ import annotations

from typing import Literal

import torch

Proximal = Literal["sampled", "recomputed", "interpolated", "snapshots"]


@torch.no_grad()
def interpolated_logprobs(
    logprobs_N: torch.Tensor, sampled_logprobs_N: torch.Tensor, versions_N: torch.Tensor, policy_version: int
) -> torch.Tensor:
    """Return log-probs between those of the sampler and of the policy now, by how old each token is; no gradient.

    ``log prox = log sampled + a (log policy - log sampled)`` with ``a = 1 - 1 / d`` for a token that was sampled ``d``
    optimizer steps ago, and 0 for ``d = 0``: on a straight line from sampler to policy the place one step before the
    policy (A-3PO, arXiv 2512.06547; AReaL's ``prox_logp_method: loglinear``, whose code takes 0 for ``d = 0`` too).

    Args:
        logprobs_N: Of the policy now.
        sampled_logprobs_N: Of the policies that sampled.
        versions_N: Which ones these were.
        policy_version: Which one the policy is now.
    """
    age_N = (policy_version - versions_N).clamp(min=1)
    return sampled_logprobs_N + (1 - 1 / age_N.to(logprobs_N.dtype)) * (logprobs_N - sampled_logprobs_N)
