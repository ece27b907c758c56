"""Figures of many simulations, and their means."""

from __future__ import annotations

import statistics
from collections import defaultdict

Key = tuple[str, str, str, str]
"""Workload, family, plan, predictions."""


class Figures:
    """Steps over the lower bound of everything that was simulated."""

    def __init__(self) -> None:
        self._values: defaultdict[Key, list[float]] = defaultdict(list)

    def add(self, key: Key, value: float) -> None:
        """Note one schedule."""
        self._values[key].append(value)

    def mean(self, plan: str, predictions: str, workload: str | None = None, family: str | None = None) -> float:
        """Return the mean over workloads and families, each of equal weight, of the means over seeds."""
        wanted = (workload, family, plan, predictions)
        cells = [
            statistics.fmean(values)
            for key, values in self._values.items()
            if all(want in (None, have) for want, have in zip(wanted, key, strict=True))
        ]
        return statistics.fmean(cells)
