"""Budgets of completions or tokens, divided evenly or by the variance of a prompt's rewards.

Evidence: docs/measurements.md has the curves of both beside ``knapsack`` on the demo's task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lit_grpo.budgets.allocation import proportional
from lit_grpo.budgets.history import Record
from lit_grpo.methods.shared.division import Divided
from lit_grpo.plugins import RunFacts


@dataclass
class Uniform(Divided):
    """As many of each prompt: ``num_generations``, or as many as a budget allows."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def check(self, run: RunFacts) -> None:
        if self.budget or self.tokens:
            super().check(run)

    def first_round(self, records: Sequence[Record], num_generations: int, num_prompts: int | None = None) -> list[int]:
        if self.budget or self.tokens:
            return super().first_round(records, num_generations, num_prompts)
        return [num_generations] * len(records)

    def divided(self, rates: np.ndarray, costs: np.ndarray, budget: float, most: int) -> list[int]:
        return proportional(np.ones(len(rates)), costs, budget, self.least, most)


@dataclass
class Proportional(Divided):
    """In proportion to the variance of a prompt's rewards, ``p (1 - p)``, within ``least`` and ``most``."""

    def divided(self, rates: np.ndarray, costs: np.ndarray, budget: float, most: int) -> list[int]:
        return proportional(rates * (1 - rates), costs, budget, self.least, most)


PLUGINS = {"uniform": Uniform(), "variance": Proportional()}
