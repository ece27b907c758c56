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
        self._scaled: dict[float, np.ndarray] = {}  # sums, by scale

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
        kinds, kind = np.unique(scale, return_inverse=True)
        sums = np.stack([self._sums(float(one)) for one in kinds])
        mu, first = self._survivors(mu, scale, lasted)
        last = np.maximum(np.searchsorted(self._sorted, (np.log(limit) - mu) / scale), first)
        below = np.exp(mu) * (sums[kind, last] - sums[kind, first])
        return (below + (len(self) - last) * limit) / (len(self) - first)

    def quantile(
        self, mu: np.ndarray, scale: np.ndarray, lasted: np.ndarray, limit: np.ndarray, q: float
    ) -> np.ndarray:
        """Return the ``q``-quantile of ``min(length, limit)`` over lengths > ``lasted``."""
        mu, first = self._survivors(mu, scale, lasted)
        left = len(self) - first
        position = first + np.clip(q * left - 0.5, 0, left - 1)
        residuals = np.interp(position, np.arange(len(self)), self._sorted)
        return np.minimum(np.exp(mu + scale * residuals), limit)

    def _sums(self, scale: float) -> np.ndarray:
        """The sums of the exponentials of the first 0, 1, 2, ... residuals, times ``scale``."""
        if scale not in self._scaled:
            self._scaled[scale] = np.concatenate([[0.0], np.cumsum(np.exp(scale * self._sorted))])
        return self._scaled[scale]

    def _survivors(self, mu: np.ndarray, scale: np.ndarray, lasted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ``mu``, raised where the tail has to be, and the index of the first residual that is left."""
        tail = len(self) - min(TAIL, len(self))
        with np.errstate(divide="ignore"):
            least = (np.log(lasted) - mu) / scale
        beyond = np.maximum(least - self._sorted[tail], 0.0)
        return mu + scale * beyond, np.minimum(np.searchsorted(self._sorted, least - beyond, side="right"), tail)
