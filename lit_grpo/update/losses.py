"""Policy-gradient objectives, and the one denominator that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Normalization = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class StepTotals:
    """What one optimizer step is normalised by, counted over all micro-batches and ranks beforehand.

    Because it is fixed before the first backward, the gradient does not depend on how the step is split.
    """

    num_tokens: int
    num_sequences: int
    max_tokens: int


def clipped_objective(
    logprobs_N: torch.Tensor,
    sampled_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the clipped surrogate loss of each token, and what it did.

    ``-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`` with ``r = exp(logprob - sampled logprob)``
    (PPO, arXiv 1707.06347, eq. 7; the asymmetric upper bound is DAPO's clip-higher, arXiv 2503.14476).

    Args:
        logprobs_N: Of the policy being trained, with gradient.
        sampled_logprobs_N: Of the policy that sampled the tokens.
        advantages_N: Advantage of the rollout that each token belongs to.
        epsilon: How far the ratio may fall below 1.
        epsilon_high: How far it may rise above 1.

    Returns:
        Losses of shape N, and metrics of shape N: the mean over tokens is what they mean.
    """
    ratio_N = torch.exp(logprobs_N - sampled_logprobs_N)
    clipped_N = ratio_N.clamp(1 - epsilon, 1 + epsilon_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        metrics = {
            "ratio/mean": ratio_N.detach(),
            "clip_ratio/low": ((ratio_N < 1 - epsilon) & (advantages_N < 0)).float(),
            "clip_ratio/high": ((ratio_N > 1 + epsilon_high) & (advantages_N > 0)).float(),
        }
    return loss_N, metrics


def token_weights(lengths_C: torch.Tensor, totals: StepTotals, normalization: Normalization) -> torch.Tensor:
    """Return what each token of a completion counts in the step's loss, shape C.

    ``token``: every token of the step alike (DAPO; TRL's ``dapo``). ``sequence``: every completion alike,
    whatever its length (the first GRPO; TRL's ``grpo``). ``constant``: by the limit on completion length, so
    that length is not rewarded either way (Dr. GRPO; TRL's ``dr_grpo``).
    """
    if normalization == "token":
        return torch.full_like(lengths_C, 1 / max(totals.num_tokens, 1), dtype=torch.float32)
    if normalization == "sequence":
        return 1 / (lengths_C.clamp(min=1) * max(totals.num_sequences, 1))
    return torch.full_like(lengths_C, 1 / max(totals.num_sequences * totals.max_tokens, 1), dtype=torch.float32)
