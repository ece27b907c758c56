"""What an objective and its advantages remember from step to step, and a checkpoint keeps."""

from __future__ import annotations

from typing import Any

from lit_grpo.update.advantages.smoothing import RewardHistory
from lit_grpo.update.objective.controllers import EntropyController, KLController
from lit_grpo.update.objective.objective import Objective


class ObjectiveState:
    """The coefficients that adapt, and the rewards of earlier visits; the same on every rank.

    Args:
        objective: Whose coefficients they are.
    """

    def __init__(self, objective: Objective) -> None:
        self.kl = KLController(objective.kl)
        self.entropy = EntropyController(objective.entropy)
        self.history = RewardHistory()

    def coefficients(self) -> dict[str, float]:
        """Those that adapt, by the name they are logged under."""
        adaptive = {"kl_beta": (self.kl.term.target, self.kl.beta)}
        adaptive["entropy_coefficient"] = (self.entropy.bonus.target, self.entropy.coefficient)
        return {name: value for name, (target, value) in adaptive.items() if target is not None}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, in plain types."""
        return {
            "kl": self.kl.state_dict(),
            "entropy": self.entropy.state_dict(),
            "history": self.history.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint; a coefficient that does not adapt stays as it is configured."""
        if self.kl.term.target is not None:
            self.kl.load_state_dict(state["kl"])
        if self.entropy.bonus.target is not None:
            self.entropy.load_state_dict(state["entropy"])
        self.history.load_state_dict(state["history"])
