"""Budgets of completions or tokens, divided evenly or by the variance of a prompt's rewards.

Evidence: docs/measurements.md has the curves of both beside ``knapsack`` on the demo's task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lit_grpo.budgets.allocation import Divided, proportional
from lit_grpo.budgets.history import Record
from lit_grpo.plugins import RunFacts


@dataclass(frozen=True)
class Uniform(Divided):
    """As many of each prompt: ``num_generations``, or as many as a budget allows."""

    @property
    def needs(self) -> frozenset[str]:
        """Nothing of earlier visits."""
        return super().needs - {"revisits"}

    def check(self, run: RunFacts) -> None:
        """Refuse a budget that does not suffice."""
        if self.budget or self.tokens:
            super().check(run)

    def first(self, records: Sequence[Record], num_generations: int, num_prompts: int | None = None) -> list[int]:
        """See above."""
        if self.budget or self.tokens:
            return super().first(records, num_generations, num_prompts)
        return [num_generations] * len(records)

    def divided(self, rates: np.ndarray, costs: np.ndarray, budget: float, most: int) -> list[int]:
        """See above."""
        return proportional(np.ones(len(rates)), costs, budget, self.least, most)


@dataclass(frozen=True)
class Proportional(Divided):
    """In proportion to the variance of a prompt's rewards, ``p (1 - p)``, within ``least`` and ``most``."""

    def divided(self, rates: np.ndarray, costs: np.ndarray, budget: float, most: int) -> list[int]:
        """See above."""
        return proportional(rates * (1 - rates), costs, budget, self.least, most)


PLUGINS = {"uniform": Uniform(), "variance": Proportional()}
