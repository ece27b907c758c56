"""What a probability ratio is taken over: a token, or a whole completion."""

from __future__ import annotations

from typing import Literal

import torch

from lit_grpo.update.tokens import Tokens, completion_means, spread

RatioLevel = Literal["token", "sequence"]


def log_ratios(tokens: Tokens, level: RatioLevel) -> torch.Tensor:
    """Return the log of the ratio that each token's surrogate sees, shape N, with gradient.

    ``token``: ``log r_t = log pi(o_t) - log pi_old(o_t)`` (PPO). ``sequence``: its mean over the completion, the
    log of ``s = (pi(o) / pi_old(o)) ** (1 / |o|)``, the same for all of its tokens (GSPO, arXiv 2507.18071, eq. 7).
    GSPO-token (eq. 13) has the same value and gradient where, as here, a completion has one advantage.
    """
    log_ratio_N = tokens.logprobs_N - tokens.old_logprobs_N
    if level == "token":
        return log_ratio_N
    return spread(completion_means(log_ratio_N, tokens.lengths_C), tokens.lengths_C)
