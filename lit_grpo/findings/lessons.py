"""Batches without a learning signal: those in which no group's rewards differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LESSON = ("frac_reward_zero_std", "advantages/max_abs")
"""Metrics from which a batch without a learning signal is detected."""
PATIENCE = 3
"""Number of batches in a row without a learning signal after which a warning is logged."""
LEAST_ADVANTAGE = 1e-6
"""A smaller advantage is rounding."""


def has_no_signal(frac_uniform: float, max_advantage: float) -> bool:
    """Whether no group of a batch has rewards that differ, so that the batch gives no gradient.

    Args:
        frac_uniform: Fraction of zero-variance groups, ``frac_reward_zero_std``.
        max_advantage: Max absolute advantage, ``advantages/max_abs``, because some estimators give advantages to such
            groups too; NaN if no completion has a reward, which is another fault.
    """
    return frac_uniform == 1 and max_advantage <= LEAST_ADVANTAGE


class NoSignalCount:
    """Counts the batches of a run without a learning signal.

    Attributes:
        num_batches: Number of batches.
        num_empty: Number of batches without a learning signal.
        is_worth_a_word: Whether :data:`PATIENCE` of them have come in a row.
    """

    def __init__(self) -> None:
        self.num_batches = self.num_empty = self._in_a_row = 0
        self.is_worth_a_word = False

    def add(self, frac_uniform: float, max_advantage: float) -> None:
        """Count a batch; see :func:`has_no_signal`."""
        empty = has_no_signal(frac_uniform, max_advantage)
        self.num_batches += 1
        self.num_empty += empty
        self._in_a_row = self._in_a_row + 1 if empty else 0
        self.is_worth_a_word |= self._in_a_row >= PATIENCE

    def __str__(self) -> str:
        return f"{self.num_empty} of {self.num_batches} batches, in which no group had rewards that differ"


class NoSignalWatch:
    """Detects, once, that a run's batches have no learning signal."""

    def __init__(self) -> None:
        self._in_a_row, self._told = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"in_a_row": self._in_a_row, "told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self._in_a_row, self._told = state["in_a_row"], state["told"]

    def sentence(self, frac_uniform: float, max_advantage: float, version: int) -> str | None:
        """Return a warning, once, after :data:`PATIENCE` batches in a row for which :func:`has_no_signal` is true."""
        self._in_a_row = self._in_a_row + 1 if has_no_signal(frac_uniform, max_advantage) else 0
        if self._told or self._in_a_row < PATIENCE:
            return None
        self._told = True
        return (
            f"The last {PATIENCE} batches, up to update {version}, had no learning signal: in every group all rewards "
            "are equal; use easier prompts if all completions are wrong and harder ones if all are correct, raise "
            "model.num_generations, or use a reward with values in between."
        )
