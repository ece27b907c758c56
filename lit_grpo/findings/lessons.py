"""Batches without a learning signal: those in which no group's rewards differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LESSON = ("frac_reward_zero_std", "advantages/max_abs")
"""The metrics that tell what a batch teaches."""
PATIENCE = 3
"""Number of batches in a row without a learning signal after which a warning is logged."""
LEAST_ADVANTAGE = 1e-6
"""A smaller advantage is rounding."""


def teaches_nothing(frac_uniform: float, max_advantage: float) -> bool:
    """Whether a batch's rewards say of no completion that it is better than another.

    Args:
        frac_uniform: The share of groups whose rewards are all alike, ``frac_reward_zero_std``.
        max_advantage: ``advantages/max_abs``, for some estimators learn from such groups too; NaN where no completion
            has a reward, which is another fault.
    """
    return frac_uniform == 1 and max_advantage <= LEAST_ADVANTAGE


class LessonCount:
    """Counts the batches of a run without a learning signal.

    Attributes:
        num_batches: Number of batches.
        num_empty: Number of batches without a learning signal.
        is_worth_a_word: Whether so many of them have come in a row.
    """

    def __init__(self) -> None:
        self.num_batches = self.num_empty = self._in_a_row = 0
        self.is_worth_a_word = False

    def add(self, frac_uniform: float, max_advantage: float) -> None:
        """Count a batch; see :func:`teaches_nothing`."""
        empty = teaches_nothing(frac_uniform, max_advantage)
        self.num_batches += 1
        self.num_empty += empty
        self._in_a_row = self._in_a_row + 1 if empty else 0
        self.is_worth_a_word |= self._in_a_row >= PATIENCE

    def __str__(self) -> str:
        return f"{self.num_empty} of {self.num_batches} batches, where all rewards of every group were alike"


class LessonWatch:
    """Detects, once, that a run's batches have no learning signal."""

    def __init__(self) -> None:
        self._in_a_row, self._told = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"in_a_row": self._in_a_row, "told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from it."""
        self._in_a_row, self._told = state["in_a_row"], state["told"]

    def sentence(self, frac_uniform: float, max_advantage: float, version: int) -> str | None:
        """Return what to say of a batch, once so many in a row have taught nothing; see :func:`teaches_nothing`."""
        self._in_a_row = self._in_a_row + 1 if teaches_nothing(frac_uniform, max_advantage) else 0
        if self._told or self._in_a_row < PATIENCE:
            return None
        self._told = True
        return (
            f"The last {PATIENCE} batches, up to update {version}, taught nothing: in every group all rewards are "
            "alike; take easier prompts where nobody passes and harder ones where everybody does, raise "
            "model.num_generations, or take another reward, one with values in between."
        )
