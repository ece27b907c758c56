"""DARS (arXiv 2508.13755): a second round for prompts that less than half of the completions have passed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lit_grpo.budgets.allocation import Allocation
from lit_grpo.limits import Count
from lit_grpo.plugins import RunFacts

PASSED_BY_NOBODY = 0.5
"""Passes as which none of a first round counts."""


@dataclass(frozen=True)
class HardMore(Allocation):
    """A second round for prompts that less than half have passed (DARS, arXiv 2508.13755).

    Of N completions in the first round a share p has passed, ``0.5 / N`` where none has; what the group teaches is
    ``S = 2 p (1 - p)`` a completion. A prompt gets as many more as lift ``(N + more) S`` to that of a prompt that half
    have passed, N / 2, (``equal``) or to ``2 (1 - p)`` times as much (``hardness``).

    Args:
        schedule: See above.
        most: The most completions of a prompt, both rounds together.
    """

    schedule: Literal["equal", "hardness"] = "equal"
    most: Count = 32

    @property
    def has_rounds(self) -> bool:
        """There are two."""
        return True

    def check(self, run: RunFacts) -> None:
        """Refuse a first round that leaves none for a second."""
        if self.most <= run.num_generations:
            raise ValueError(
                f"most is {self.most}, and the first round has num_generations, {run.num_generations}, so there would "
                "be no second; give more."
            )

    def more(self, num_rewarded: int, num_passed: int, num_rounds: int, num_first: int) -> int:
        """See above."""
        rate = num_passed / num_rewarded
        if num_rounds > 1 or rate >= 0.5:
            return 0
        rate = rate or PASSED_BY_NOBODY / num_rewarded
        taught, peak = 2 * rate * (1 - rate), num_rewarded / 2
        wanted = peak if self.schedule == "equal" else 2 * (1 - rate) * peak
        return min(math.ceil((wanted - num_rewarded * taught) / taught - 1e-9), self.most - num_first)


PLUGINS = {"dars_equal": HardMore("equal", most=32), "dars_hardness": HardMore("hardness", most=64)}
