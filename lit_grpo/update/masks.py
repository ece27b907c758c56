"""Which tokens and completions an objective learns from."""

from __future__ import annotations

import math

import torch

from lit_grpo.update.tokens import Tokens, completion_means


@torch.no_grad()
def on_policy_completions(tokens: Tokens, threshold: float) -> torch.Tensor:
    """Say which completions to keep, shape C: those with A >= 0, and bad ones that the policy has not left.

    A bad completion is left out where ``mean_t(log pi_sampled - log pi)`` exceeds ``threshold`` (off-policy sequence
    mask, DeepSeek-V3.2, arXiv 2512.02556, eq. 9; TRL's ``off_policy_mask_threshold``).
    """
    gap_N = (tokens.sampled_logprobs_N - tokens.logprobs_N).nan_to_num(0.0)
    return (tokens.advantages_C >= 0) | (completion_means(gap_N, tokens.lengths_C) <= threshold)


def entropy_threshold(entropy_N: torch.Tensor, share: float) -> float:
    """Return the entropy that the ``share`` of tokens with the highest reach; infinite without tokens.

    Linear interpolation between neighbours, as ``torch.quantile``, which takes no more than 2**24 values. Tokens at
    the threshold are kept ("Beyond the 80/20 Rule", arXiv 2506.01939; TRL's ``top_entropy_quantile``).
    """
    if not entropy_N.numel():
        return math.inf
    ordered_N = entropy_N.sort().values
    position = (1 - share) * (len(ordered_N) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered_N) - 1)
    return float(torch.lerp(ordered_N[below], ordered_N[above], position - below))
