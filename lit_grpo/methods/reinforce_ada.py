"""Reinforce-Ada (arXiv 2510.04996): rounds of completions until a prompt has passes and failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from lit_grpo.limits import Limit, Number
from lit_grpo.plugins import Plugin


@dataclass
class Balanced(Plugin):
    """Rounds of ``num_generations`` until so many have passed and so many have not (Reinforce-Ada, arXiv 2510.04996).

    With plug-in ``pods`` and ``statistics: group`` a balanced few of them are trained on, and their baseline is over
    all. Stopping at what one waits for biases the group's mean: docs/budgets.md says how far.
    """

    rounds: Annotated[int, Limit(ge=2, remedy="with one there is nothing to wait for")] = 4
    """Max rounds per prompt."""
    passed: Number = 2
    """Number of correct completions per prompt to wait for; Reinforce-Ada's *positive* form is 1, with 0 failed."""
    failed: Number = 2
    """Number of wrong completions per prompt to wait for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.passed + self.failed:
            raise ValueError(
                f"passed is {self.passed} and failed is {self.failed}; give numbers that are to be reached."
            )

    def next_round(self, num_rewarded: int, num_passed: int, num_rounds: int, num_first: int) -> int:
        decided = num_passed >= self.passed and num_rewarded - num_passed >= self.failed
        return 0 if decided or num_rounds >= self.rounds else num_first


PLUGINS = {"balanced": Balanced()}
