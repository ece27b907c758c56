"""How good predictions of lengths have been."""

from __future__ import annotations

from typing import Any

import numpy as np


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1, shape (n,); equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return the rank correlation of two arrays of shape (n,); 0 where either is constant."""
    ranks_a, ranks_b = average_ranks(a) - (len(a) + 1) / 2, average_ranks(b) - (len(b) + 1) / 2
    norm = float(np.sqrt(np.square(ranks_a).sum() * np.square(ranks_b).sum()))
    return float(ranks_a @ ranks_b) / norm if norm else 0.0


class Quality:
    """Predictions made before a length was known, beside that length, for the last ``window`` completions.

    Completions of one prompt are not independent trials of a prediction, so that it is counted of how many
    groups they are.
    """

    def __init__(self, window: int = 1024) -> None:
        self.window = window
        self._rows = np.empty((0, 3))  # predicted, actual, number of the group

    def __len__(self) -> int:
        """Return the number of predictions in the window."""
        return len(self._rows)

    def add(self, predicted: np.ndarray, actual: np.ndarray, groups: np.ndarray) -> None:
        """Take predicted and actual tokens and the groups they are of, all of shape (n,)."""
        self._rows = np.concatenate([self._rows, np.column_stack([predicted, actual, groups])])[-self.window :]

    @property
    def num_groups(self) -> int:
        """How many groups the completions in the window are of."""
        return len(np.unique(self._rows[:, 2]))

    def correlation(self) -> float:
        """Return the rank correlation of predicted and actual lengths."""
        return spearman(self._rows[:, 0], self._rows[:, 1])

    def metrics(self, suffix: str = "") -> dict[str, float]:
        """Return rank correlation, mean absolute log ratio and mean absolute error; nothing without predictions."""
        if not len(self):
            return {}
        predicted, actual = self._rows[:, 0], self._rows[:, 1]
        return {
            f"lengths/spearman{suffix}": self.correlation(),
            f"lengths/log_error{suffix}": float(np.abs(np.log(predicted / actual)).mean()),
            f"lengths/mae_tokens{suffix}": float(np.abs(predicted - actual).mean()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the window as lists."""
        return {"rows": self._rows.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._rows = np.array(state["rows"], dtype=np.float64).reshape(-1, 3)
