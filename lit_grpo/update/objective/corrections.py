"""Weights that correct for the gap between the policy that sampled and the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lit_grpo.limits import NotNegative, Positive, check_fields, check_order
from lit_grpo.update.objective.tokens import LARGEST_LOG_RATIO, completion_means, completion_sums, spread

CorrectionMode = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_mask",
]


@dataclass(frozen=True)
class Correction:
    """Importance-sampling correction for the difference between the rollout's and the trainer's log-probs."""

    mode: CorrectionMode = "none"
    """Kind of importance weight: ``none`` has none, and the denominator of the probability ratio is the log-probs that
    the generator sampled with. All other modes use a proximal policy there, by default the trainer's own before the
    first update on a batch, and weigh the loss by proximal / generator, of each token or of the whole sequence (the
    product), truncated to [low, high] (TIS) or set to 0 outside it (MIS; IcePop is ``token_mask`` with 0.5 and 2).
    ``geometric_mask`` sets the weight of a sequence to 0 if the geometric mean of its tokens' ratios is outside it,
    else to 1.
    """
    low: NotNegative | None = None
    """Lower bound of the correction weight; no bound by default."""
    high: Positive | None = 3.0
    """Upper bound of the correction weight."""

    def __post_init__(self) -> None:
        check_fields(self, "model.objective.correction.")
        check_order(self, "low", "high", "model.objective.correction.", strict=True)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"one_row", "whole_completions"} if self.of_sequence else ())

    @property
    def of_sequence(self) -> bool:
        """True if a weight is of all tokens of a completion."""
        return self.mode.startswith(("sequence", "geometric"))

    @property
    def truncates(self) -> bool:
        """True if a weight outside of the bounds is cut, and not set to 0."""
        return self.mode.endswith("truncate")


@torch.no_grad()
def correction_weights(
    old_logprobs_N: torch.Tensor, sampled_logprobs_N: torch.Tensor, lengths_C: torch.Tensor, correction: Correction
) -> torch.Tensor:
    """Return what each token's loss is multiplied by, shape N.

    ``pi_old / pi_generator`` of the token or of the completion (the product), with its log in [-20, 20] (as in verl),
    truncated or masked. The geometric mean of a completion's ratios masks and does not weigh: 1 within the bounds.
    Sources: TIS, F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025);
    IcePop, Ling team (2025); the token and sequence modes are TRL's ``vllm_importance_sampling_mode``; the geometric
    mean is that of verl's ``rollout_rs`` (rollout_corr_helper.py in mit-han-lab/vcpo at c7f030f).
    """
    log_ratio_N, level = old_logprobs_N - sampled_logprobs_N, correction.mode.partition("_")[0]
    if level != "token":
        gather = completion_sums if level == "sequence" else completion_means
        log_ratio_N = spread(gather(log_ratio_N, lengths_C), lengths_C, len(log_ratio_N))
    weights_N = log_ratio_N.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    low, high = correction.low, correction.high
    if correction.truncates:
        return weights_N if low is None and high is None else weights_N.clamp(low, high)
    outside_N = torch.zeros_like(weights_N, dtype=torch.bool)
    if low is not None:
        outside_N |= weights_N < low
    if high is not None:
        outside_N |= weights_N > high
    inside_N = torch.ones_like(weights_N) if level == "geometric" else weights_N
    return inside_N.masked_fill(outside_N, 0.0)


@torch.no_grad()
def correction_metrics(weights_N: torch.Tensor, correction: Correction) -> dict[str, torch.Tensor]:
    """Say what each token weighs, and whether a bound has cut its weight or left it out."""
    metrics = {"correction/weight": weights_N, "correction/masked": (weights_N == 0).float()}
    if not correction.truncates:
        return metrics
    cut_N = torch.zeros_like(weights_N, dtype=torch.bool)
    if correction.low is not None:
        cut_N |= weights_N <= correction.low
    if correction.high is not None:
        cut_N |= weights_N >= correction.high
    return metrics | {"correction/truncated": cut_N.float()}
