"""DARS (arXiv 2508.13755): a second round for prompts that less than half of the completions have passed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lit_grpo.limits import Count
from lit_grpo.plugins import Plugin, RunFacts

PASSED_BY_NOBODY = 0.5
"""Passes as which none of a first round counts."""


@dataclass
class HardMore(Plugin):
    """A second round for prompts that less than half have passed (DARS, arXiv 2508.13755).

    Of N completions in the first round a fraction p has passed, ``0.5 / N`` if none has. A completion then contributes
    ``S``, its expected absolute advantage: ``2 sqrt(p (1 - p))`` if advantages are divided by the group's deviation,
    else ``2 p (1 - p)``. A prompt gets as many more as lift ``(N + more) S`` to that of a prompt that half have passed,
    N or N / 2, (``equal``) or to ``2 (1 - p)`` times as much (``hardness``). These are ``schedule_ET`` and
    ``schedule_HW`` of the paper's code (yangzhch6/DARS at 9b21b71), whose runs do not divide.
    """

    schedule: Literal["equal", "hardness"] = "equal"
    """Number of further completions: ``equal`` or ``hardness``, as described above."""
    most: Count = 32
    """Max completions of a prompt in both rounds together."""
    divided: bool | None = None
    """Take the expected advantage of advantages that are divided by a deviation of the group. By default as
    ``model.advantages`` divides them.
    """

    def check(self, run: RunFacts) -> None:
        if self.most <= run.num_generations:
            raise ValueError(
                f"most is {self.most}, and the first round has num_generations, {run.num_generations}, so there would "
                "be no second; give more."
            )
        if self.divided is None:
            self.divided = run.divided_advantages

    def next_round(self, num_rewarded: int, num_passed: int, num_rounds: int, num_first: int) -> int:
        rate = num_passed / num_rewarded
        if num_rounds > 1 or rate >= 0.5:
            return 0
        rate = rate or PASSED_BY_NOBODY / num_rewarded
        each, peak = 2 * rate * (1 - rate), num_rewarded / 2
        if self.divided:
            each, peak = 2 * math.sqrt(rate * (1 - rate)), num_rewarded
        wanted = peak if self.schedule == "equal" else 2 * (1 - rate) * peak
        return min(math.ceil((wanted - num_rewarded * each) / each - 1e-9), self.most - num_first)


PLUGINS = {"dars_equal": HardMore("equal", most=32), "dars_hardness": HardMore("hardness", most=64)}
