"""What is to be expected of something that has already lasted for a while."""

from __future__ import annotations

import numpy as np

TAIL = 8  # beyond so many of the largest residuals, the tail is taken to go on in their shape


class Residuals:
    """The last ``capacity`` errors of predicted logarithms, in units of the scale that each was expected to have.

    A predicted log ``mu`` of scale ``s`` stands for the lengths ``exp(mu + s e)``, ``e`` any of the residuals with the
    same chance (Duan 1983, "Smearing estimate"). Of one that has come to ``lasted`` without ending, only those longer
    than that remain. Where fewer than eight residuals are that large, the eight largest are scaled up to it, as a
    Pareto tail would be: the conditional distribution of length over ``lasted`` stays as it is.

    The arguments of all methods have the shape (n,); there should not be more than some ten different scales.
    """

    def __init__(self, capacity: int = 2048) -> None:
        self.capacity = capacity
        self.values = np.empty(0)
        self._sorted = np.empty(0)
        self._scaled: dict[float, tuple[np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        """Return the number of residuals."""
        return len(self.values)

    def add(self, residuals: np.ndarray) -> None:
        """Take new residuals, shape (n,); the oldest go."""
        self.values = np.concatenate([self.values, residuals])[-self.capacity :]
        self._sorted = np.sort(self.values)
        self._scaled.clear()

    def mean(self, mu: np.ndarray, scale: np.ndarray, lasted: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """Return the mean of ``min(length, limit)`` over lengths > ``lasted``."""
        means = np.empty(len(mu))
        for one in np.unique(scale):
            rows, (logs, sums) = scale == one, self._of_scale(float(one))
            its_mu, first = _survivors(logs, mu[rows], lasted[rows])
            last = np.maximum(np.searchsorted(logs, np.log(limit[rows]) - its_mu), first)
            below = np.exp(its_mu) * (sums[last] - sums[first])
            means[rows] = (below + (len(logs) - last) * limit[rows]) / (len(logs) - first)
        return means

    def quantile(
        self, mu: np.ndarray, scale: np.ndarray, lasted: np.ndarray, limit: np.ndarray, q: float
    ) -> np.ndarray:
        """Return the ``q``-quantile of ``min(length, limit)`` over lengths > ``lasted``."""
        quantiles = np.empty(len(mu))
        for one in np.unique(scale):
            rows, (logs, _) = scale == one, self._of_scale(float(one))
            its_mu, first = _survivors(logs, mu[rows], lasted[rows])
            left = len(logs) - first
            position = first + np.clip(q * left - 0.5, 0, left - 1)
            quantiles[rows] = np.exp(its_mu + np.interp(position, np.arange(len(logs)), logs))
        return np.minimum(quantiles, limit)

    def _of_scale(self, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """The residuals times ``scale``, ascending, and the sums of the exponentials of the first 0, 1, 2, ... ."""
        if scale not in self._scaled:
            logs = scale * self._sorted
            self._scaled[scale] = logs, np.concatenate([[0.0], np.cumsum(np.exp(logs))])
        return self._scaled[scale]


def _survivors(logs: np.ndarray, mu: np.ndarray, lasted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``mu``, raised where the tail has to be, and the index of the first of ``logs`` that is left."""
    tail = len(logs) - min(TAIL, len(logs))
    with np.errstate(divide="ignore"):
        least = np.log(lasted) - mu
    beyond = np.maximum(least - logs[tail], 0.0)
    return mu + beyond, np.minimum(np.searchsorted(logs, least - beyond, side="right"), tail)
