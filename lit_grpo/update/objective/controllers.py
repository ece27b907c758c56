"""What an objective and its advantages remember from step to step, and a checkpoint keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from lit_grpo.budgets.history import PromptHistory
from lit_grpo.limits import Limit, Positive, check_fields, check_order
from lit_grpo.update.objective.kl import KLTerm


@dataclass(frozen=True)
class EntropyBonus:
    """A reward for undecided distributions: ``-coefficient x`` the mean entropy of a token is added to the loss.

    Args:
        coefficient: Weight of the entropy bonus; its initial value if ``target`` is set. 0 without a target computes no
            gradient of the entropy.
        target: Mean entropy, in nats, to hold: the coefficient grows by ``delta`` after a step at or below it, falls by
            ``delta`` after one above, and counts only while the entropy was at or below (Skywork-OR1, arXiv 2505.22312;
            TRL's ``use_adaptive_entropy``).
        delta: Change of the coefficient per step, if ``target`` is set.
        min_coefficient: The smallest coefficient under a target.
        max_coefficient: The largest coefficient under a target.
    """

    coefficient: Annotated[float, Limit(finite=True)] = 0.0
    target: Positive | None = None
    delta: Positive = 0.005
    min_coefficient: float = 0.0
    max_coefficient: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "model.objective.entropy.")
        if self.target is not None:
            check_order(self, "min_coefficient", "coefficient", "model.objective.entropy.")
            check_order(self, "coefficient", "max_coefficient", "model.objective.entropy.")

    @property
    def active(self) -> bool:
        """Whether the loss has an entropy term."""
        return self.coefficient != 0 or self.target is not None


class EntropyController:
    """The coefficient of an :class:`EntropyBonus` from step to step."""

    def __init__(self, bonus: EntropyBonus) -> None:
        self.bonus = bonus
        self.coefficient = bonus.coefficient
        self.last_entropy = math.inf

    @property
    def applied(self) -> float:
        """The coefficient of the next step: 0 while the last entropy was above the target."""
        if self.bonus.target is not None and self.last_entropy > self.bonus.target:
            return 0.0
        return self.coefficient

    def update(self, entropy: float) -> None:
        """Follow the mean entropy that all ranks measured in one optimizer step."""
        bonus = self.bonus
        if bonus.target is None:
            return
        if entropy <= bonus.target:
            self.coefficient = min(self.coefficient + bonus.delta, bonus.max_coefficient)
        else:
            self.coefficient = max(self.coefficient - bonus.delta, bonus.min_coefficient)
        self.last_entropy = entropy


class KLController:
    """The beta of a :class:`KLTerm` from batch to batch."""

    def __init__(self, term: KLTerm) -> None:
        self.term = term
        self.beta = term.beta

    def update(self, kl: float, num_sequences: int) -> None:
        """Follow the mean KL of a token over a batch of ``num_sequences`` completions on all ranks.

        ``beta *= 1 + clip(kl / target - 1, -0.2, 0.2) num_sequences / horizon`` (Ziegler et al., arXiv 1909.08593,
        section 2.2; verl's ``AdaptiveKLController``), where more completions than ``horizon`` count as that many: beta
        would turn negative otherwise. A KL that is not a number (no tokens) changes nothing.
        """
        if self.term.target is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.term.target - 1, -0.2), 0.2)
        self.beta *= 1 + error * min(num_sequences / self.term.horizon, 1.0)


class ObjectiveState:
    """The coefficients that adapt, and what earlier visits of prompts have shown; the same on every rank.

    Args:
        kl: A term whose beta may adapt.
        entropy: A bonus whose coefficient may adapt.
    """

    def __init__(self, kl: KLTerm, entropy: EntropyBonus) -> None:
        self.kl = KLController(kl)
        self.entropy = EntropyController(entropy)
        self.history = PromptHistory()

    def coefficients(self) -> dict[str, float]:
        """Those that adapt, by the name they are logged under."""
        adaptive = {"kl_beta": (self.kl.term.target, self.kl.beta)}
        adaptive["entropy_coefficient"] = (self.entropy.bonus.target, self.entropy.coefficient)
        return {name: value for name, (target, value) in adaptive.items() if target is not None}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, in plain types."""
        return {
            "beta": self.kl.beta,
            "entropy": (self.entropy.coefficient, self.entropy.last_entropy),
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; a coefficient that does not adapt stays as it is configured."""
        if self.kl.term.target is not None:
            self.kl.beta = state["beta"]
        if self.entropy.bonus.target is not None:
            self.entropy.coefficient, self.entropy.last_entropy = state["entropy"]
        self.history.load_state_dict(state["history"])
