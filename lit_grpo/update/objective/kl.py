"""The KL divergence from the reference: estimators per sampled token, and the term made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from lit_grpo.compatibility import Clash, Requirement, check_clashes
from lit_grpo.limits import Count, Limit, check_fields
from lit_grpo.update.objective.tokens import LARGEST_LOG_RATIO

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
    eq. 4). ``d`` is cut at 20, as in verl.
    """
    difference_N = (reference_logprobs_N - logprobs_N).clamp(max=LARGEST_LOG_RATIO)
    return difference_N.exp() - difference_N - 1


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True)
class KLTerm:
    """The KL term of the loss, which keeps the policy near the reference."""

    beta: Annotated[float, Limit(ge=0, finite=True)] = 0.0
    """Weight of the KL term; 0 loads no reference model."""
    estimator: KLEstimator = "k3"
    """KL estimator: ``k1``, ``k2`` or ``k3`` (Schulman)."""
    place: Literal["loss", "reward"] = "loss"
    """Place of the KL term: ``loss`` adds it to every token's loss, ``reward`` subtracts its sum over a completion from
    the reward, before advantages, with the log-probs that the completion was sampled with.
    """
    importance_weighted: bool = False
    """Multiply the KL term by the probability ratio, so that the gradient stays that of the divergence on stale tokens
    (DeepSeek-V3.2, arXiv 2512.02556; TRL's ``use_bias_correction_kl``). In the loss only.
    """
    target: Annotated[float | None, Limit(gt=0, remedy="leave it out for a fixed beta")] = None
    """Target of the mean KL per token; ``beta`` is adapted after every batch to approach it (arXiv 1909.08593)."""
    horizon: Count = 10_000
    """Number of completions over which an adaptive beta changes by at most a fifth."""

    def __post_init__(self) -> None:
        check_fields(self, "model.objective.kl.")
        in_loss, place = self.place == "loss", f"model.objective.kl.place {self.place}"
        settings = {
            f"model.objective.kl.target {self.target}": self.target is not None,
            "model.objective.kl.importance_weighted true": self.importance_weighted,
            place: not in_loss,
        }
        check_clashes(
            [
                *(self.without_term(name, is_set) for name, is_set in settings.items()),
                Clash(
                    "model.objective.kl.importance_weighted true needs the KL term in the loss",
                    f"{place} takes it from the reward, which has no gradient",
                    found=self.importance_weighted and not in_loss,
                    remedy="set model.objective.kl.place to loss",
                ),
                Clash(
                    f"{place} needs a KL estimate whose expected gradient is not 0",
                    "model.objective.kl.estimator k1 has one of 0 there",
                    found=self.beta > 0 and in_loss and self.estimator == "k1" and not self.importance_weighted,
                    remedy="take k3 or k2, set model.objective.kl.importance_weighted or place to reward",
                ),
            ]
        )

    def without_term(self, name: str, is_set: bool) -> Clash:
        """Return the clash of a setting that needs a KL term with a beta of 0, where the setting is set."""
        return Clash(
            f"{name} needs a KL term",
            f"model.objective.kl.beta {self.beta} leaves it out",
            found=is_set and self.beta == 0,
            remedy="set model.objective.kl.beta above 0",
        )

    @property
    def parts(self) -> list[Requirement]:
        """Effects of the term on other parts."""
        return [
            Requirement(
                "model.objective.kl.place reward",
                changes={"plain_rewards": "takes a KL term from them"},
                remedy="set model.objective.kl.place to loss",
                chosen=self.place == "reward",
            ),
        ]

    def next_beta(self, beta: float, kl: float, num_sequences: int) -> float:
        """Return beta after a batch with a ``target``; without one it stays as it is.

        ``beta *= 1 + clip(kl / target - 1, -0.2, 0.2) num_sequences / horizon`` (Ziegler et al., arXiv 1909.08593,
        section 2.2; verl's ``AdaptiveKLController``), where more completions than ``horizon`` count as that many: beta
        would turn negative otherwise. A KL that is not a number (no tokens) changes nothing.

        Args:
            beta: Weight of the KL term in the batch.
            kl: Mean KL per token of the batch.
            num_sequences: Completions of the batch on all ranks.
        """
        if self.target is None or not math.isfinite(kl):
            return beta
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return beta * (1 + error * min(num_sequences / self.horizon, 1.0))
