"""The KL divergence from the reference: estimators per sampled token, and the term made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3"]


def k1(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return ``log(policy / reference)``: unbiased, of either sign; its expected gradient is 0."""
    return logprobs_N - reference_logprobs_N


def k2(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return ``log(policy / reference) ** 2 / 2``: biased, but its expected gradient is that of the divergence."""
    return 0.5 * (logprobs_N - reference_logprobs_N).square()


def k3(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return ``exp(d) - d - 1`` with ``d = log(reference / policy)``: unbiased and never negative.

    Source of all three: J. Schulman, "Approximating KL divergence" (2020); this is the term of GRPO (arXiv 2402.03300,
    eq. 4).
    """
    difference_N = reference_logprobs_N - logprobs_N
    return difference_N.exp() - difference_N - 1


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
KL_PLACES: dict[str, frozenset[str]] = {"loss": frozenset(), "reward": frozenset({"sampled_log_probs"})}
"""What a KL term in each place needs, by words of :data:`lit_grpo.compatibility.REQUIREMENTS`."""


@dataclass(frozen=True)
class KLTerm:
    """How far the policy may leave the reference.

    Args:
        beta: Weight of the KL term to the first policy; 0 loads no reference model.
        estimator: ``k1``, ``k2`` or ``k3`` (Schulman).
        place: ``loss`` adds it to every token's loss. ``reward`` takes its sum over a completion from the reward,
            before advantages, with the log-probs that the completion was sampled with.
        importance_weighted: Multiply it by the probability ratio, so that the gradient stays that of the divergence
            on stale tokens (DeepSeek-V3.2, arXiv 2512.02556; TRL's ``use_bias_correction_kl``). In the loss only.
        target: Adapt beta after every batch so that the mean KL of a token comes near this (arXiv 1909.08593).
        horizon: Completions over which an adaptive beta moves by at most a fifth.
    """

    beta: float = 0.0
    estimator: KLEstimator = "k3"
    place: Literal["loss", "reward"] = "loss"
    importance_weighted: bool = False
    target: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        if not (self.beta >= 0 and math.isfinite(self.beta)):
            raise ValueError(f"kl.beta must be a number >= 0, not {self.beta}.")
        if self.estimator not in KL_ESTIMATORS:
            raise ValueError(f"kl.estimator must be one of {', '.join(KL_ESTIMATORS)}, not {self.estimator!r}.")
        if self.place not in KL_PLACES:
            raise ValueError(f"kl.place must be loss or reward, not {self.place!r}.")
        if self.beta == 0:
            self._check_idle()
        elif self.estimator == "k1" and self.place == "loss" and not self.importance_weighted:
            raise ValueError(
                "kl.estimator k1 in the loss holds nothing back: its expected gradient is 0. Take k3 or k2, set "
                "kl.importance_weighted, or kl.place to reward."
            )
        if self.place == "reward" and self.importance_weighted:
            raise ValueError("kl.importance_weighted belongs to kl.place loss; a reward has no gradient to correct.")
        if self.target is not None and not self.target > 0:
            raise ValueError(f"kl.target must be a number above 0, not {self.target}; leave it out for a fixed beta.")
        if self.horizon < 1:
            raise ValueError(f"kl.horizon must be at least 1, not {self.horizon}.")

    def _check_idle(self) -> None:
        if self.target is not None:
            raise ValueError(f"kl.target is {self.target}, but kl.beta is 0, which no factor changes; set kl.beta.")
        if self.importance_weighted or self.place == "reward":
            raise ValueError("kl.place and kl.importance_weighted need a KL term; set kl.beta above 0.")
