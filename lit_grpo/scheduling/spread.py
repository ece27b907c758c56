"""How much completions of one prompt have in common."""

from __future__ import annotations

import numpy as np


class Spread:
    """How much of the variance of a quantity lies between groups and how much within, as it was lately.

    Args:
        forgetting: The weight of all that is known, at each new batch.
    """

    def __init__(self, forgetting: float) -> None:
        self.forgetting = forgetting
        self.sums = np.zeros(4)  # squares within and their degrees of freedom, squared effects and their number

    def add(self, values: np.ndarray, groups: np.ndarray) -> None:
        """Take deviations from what was expected, shape (n,), and the number of the group of each (0, 1, ...)."""
        self.sums *= self.forgetting
        counts = np.bincount(groups)
        groups, counts = np.unique(groups, return_inverse=True)[1], counts[counts > 0]
        means = np.bincount(groups, values) / counts
        self.sums[:2] += np.square(values - means[groups]).sum(), len(values) - len(counts)
        self.sums[2:] += (np.square(means) - self.within / counts).sum(), len(counts)

    @property
    def within(self) -> float:
        """The variance within a group."""
        return float(self.sums[0] / self.sums[1]) if self.sums[1] else 1.0

    @property
    def between(self) -> float:
        """The variance of what the members of a group have in common."""
        return max(float(self.sums[2] / self.sums[3]), 0.0) if self.sums[3] else 1.0

    @property
    def pseudo_count(self) -> float:
        """How many members of a group weigh as much as what is known without them: within / between."""
        return float(np.clip(self.within / max(self.between, 1e-6), 1e-3, 1e6))
