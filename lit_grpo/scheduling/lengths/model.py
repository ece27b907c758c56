"""What is learnt of lengths across rollouts: a small regression, and how far it has been off."""

from __future__ import annotations

import numpy as np

FORGETTING = 0.95  # the weight of all that has been learnt, at each new rollout
PENALTY = 0.1  # of every slope, where the variance of a column is 1
LEAST_WORTH = 0.05  # what columns are always taken to be worth, so that they order what is alike otherwise
NUM_ERRORS, TAIL = 2048, 8  # past errors kept; beyond so many of the largest, the tail goes on in their shape


class LengthModel:
    """Predicts logs by ridge regression that forgets, on rows in groups which are alike; knows its errors.

    What lies within groups counts in full, and what lies between them as ``between`` rows a group at most: generalised
    least squares with a random effect of groups (Fuller and Battese 1973), its share of the variance given. Of what
    the columns say, a prediction takes as much, at most all, as was worth it before it was learnt; nothing where
    they are noise.

    Args:
        between: See above.
    """

    def __init__(self, between: float) -> None:
        self.between = between
        self.moments = np.empty((0, 0))  # of the columns (1, x, y), weighted
        self.sums = np.zeros(3)  # of rows, of what columns said times what they should have, and of its squares
        self.errors = np.empty(0)  # of past predictions, in units of the scale that each was expected to have

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return predictions, shape (n,), for ``x``, shape (n, columns); 0 without columns or moments."""
        if not x.shape[1] or not len(self.moments):
            return np.zeros(len(x))
        worth = np.clip(self.sums[1] / self.sums[2], LEAST_WORTH, 1) if self.sums[2] else 1.0
        return self._means[-1] + worth * self._deviations(x)

    def learn(self, x: np.ndarray, y: np.ndarray, groups: np.ndarray, scale: np.ndarray, new: np.ndarray) -> None:
        """Take a batch, all of the same length; only rows that are ``new`` say what columns are worth.

        Of the very first batch, the first half is learnt before the second is foretold.
        """
        if x.shape[1] and len(y) and not len(self.moments):
            half = (len(y) + 1) // 2
            self._absorb(x[:half], y[:half], groups[:half])
            x, y, groups, scale, new = (each[half:] for each in (x, y, groups, scale, new))
        if x.shape[1] and len(y):
            said = self._deviations(x) * new
            self.sums[1:] = FORGETTING * self.sums[1:] + (said @ (y - self._means[-1]), said @ said)
        self.errors = np.concatenate([self.errors, (y - self.predict(x)) / scale])[-NUM_ERRORS:]
        if x.shape[1] and len(y):
            self._absorb(x, y, groups)

    def mean(self, mu: np.ndarray, scale: np.ndarray, lasted: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """Return the mean of ``min(length, limit)`` over lengths > ``lasted``, given predicted logs ``mu``.

        All have the shape (n,), with few different scales. A length is ``exp(mu + scale e)``, ``e`` any past error
        with the same chance (Duan 1983, "Smearing estimate"); those count that have not been outlived. Where these
        are fewer than eight, it is the eight largest, scaled up to it as a Pareto tail would be.
        """
        errors, count = np.sort(self.errors), len(self.errors)
        kinds, kind = np.unique(scale, return_inverse=True)
        sums = np.cumsum(np.exp(kinds[:, None] * np.insert(errors, 0, -np.inf)), axis=1)
        tail = count - min(TAIL, count)
        with np.errstate(divide="ignore"):
            least = (np.log(lasted) - mu) / scale
        beyond = np.maximum(least - errors[tail], 0.0)
        mu, first = mu + scale * beyond, np.minimum(np.searchsorted(errors, least - beyond, side="right"), tail)
        last = np.maximum(np.searchsorted(errors, (np.log(limit) - mu) / scale), first)
        return (np.exp(mu) * (sums[kind, last] - sums[kind, first]) + (count - last) * limit) / (count - first)

    def state_dict(self) -> dict[str, list]:
        """Return the state as lists of floats."""
        return {name: getattr(self, name).tolist() for name in ("moments", "sums", "errors")}

    def load_state_dict(self, state: dict[str, list]) -> None:
        """Take over what ``state_dict`` returned."""
        self.sums, self.errors = np.array(state["sums"]), np.array(state["errors"], dtype=np.float64)
        self.moments = np.array(state["moments"]).reshape((len(state["moments"]),) * 2)
        if len(self.moments):
            self._fit()

    def _deviations(self, x: np.ndarray) -> np.ndarray:
        return np.clip((x - self._means[:-1]) @ self._slopes, -4 * self._spread, 4 * self._spread)

    def _absorb(self, x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> None:
        rows = np.column_stack([np.ones(len(y)), x, y])[np.argsort(groups, kind="stable")]
        sizes = np.unique(groups, return_counts=True)[1]
        totals = np.add.reduceat(rows, np.cumsum(sizes) - sizes)
        products = rows.T @ rows - totals.T @ (totals / (sizes + self.between)[:, None])
        self.moments = products + (FORGETTING * self.moments if len(self.moments) else 0.0)
        self.sums[0] = FORGETTING * self.sums[0] + len(y)
        self._fit()

    def _fit(self) -> None:
        self._means = self.moments[0, 1:] / self.moments[0, 0]
        covariance = (self.moments[1:, 1:] - self.moments[0, 0] * np.outer(self._means, self._means)) / self.sums[0]
        self._spread = float(np.sqrt(max(covariance[-1, -1], 0.0)))
        scale = np.sqrt(np.maximum(covariance.diagonal()[:-1], 1e-6 * (1e-6 + np.square(self._means[:-1]))))
        system = covariance[:-1, :-1] / np.outer(scale, scale) + PENALTY * np.eye(len(scale))
        self._slopes = np.linalg.solve(system, covariance[:-1, -1] / scale) / scale
