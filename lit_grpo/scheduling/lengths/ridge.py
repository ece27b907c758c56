"""A ridge regression that is learnt online from hidden states, and the projection that makes these few."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

FORGETTING = 0.95  # the weight of all that has been learnt, at each new rollout
PENALTY = 0.1  # of every slope, where the variance of a column is 1
LEAST_WORTH = 0.05  # of slopes: they always order a little what is alike otherwise


class Ridge:
    """Predicts a number from columns by ridge regression that forgets, learnt from batches of rows in groups.

    What differs within groups counts in full, and what differs between groups as ``between`` rows a group at most:
    generalised least squares with a random effect of groups (Fuller and Battese 1973). A prediction is the mean plus
    the slopes' part times ``worth``: the factor, at most 1, that would have been best on batches before they were
    learnt (without it, the rank correlation after 8 tokens is 0.02 less).

    Args:
        between: See above.
    """

    def __init__(self, between: float) -> None:
        self.between = between
        self.moments = np.empty((0, 0))  # of the columns (1, x, y), weighted
        self.sums = np.zeros(3)  # of rows, of slopes' parts times what they should have been, and of their squares

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return predictions, shape (n,), for ``x``, shape (n, columns); 0 where nothing has been learnt."""
        if not len(self.moments):
            return np.zeros(len(x))
        worth = np.clip(self.sums[1] / self.sums[2], LEAST_WORTH, 1) if self.sums[2] else 1.0
        return self._means[-1] + worth * self._deviations(x)

    def learn(self, x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> None:
        """Learn that rows ``x`` came to ``y``, shape (n,), n > 0; ``groups`` are numbers, shape (n,)."""
        if len(self.moments):
            deviations = self._deviations(x)
            products = deviations @ (y - self._means[-1]), deviations @ deviations
            self.sums[1:] = FORGETTING * self.sums[1:] + products
        rows = np.column_stack([np.ones(len(y)), x, y])[np.argsort(groups, kind="stable")]
        sizes = np.unique(groups, return_counts=True)[1]
        totals = np.add.reduceat(rows, np.cumsum(sizes) - sizes)
        moments = rows.T @ rows - totals.T @ (totals / (sizes + self.between)[:, None])
        self.moments = moments + (FORGETTING * self.moments if len(self.moments) else 0.0)
        self.sums[0] = FORGETTING * self.sums[0] + len(y)
        self._fit()

    def state_dict(self) -> dict[str, list]:
        """Return the state as lists of floats."""
        return {"moments": self.moments.tolist(), "sums": self.sums.tolist()}

    def load_state_dict(self, state: dict[str, list]) -> None:
        """Take over what ``state_dict`` returned."""
        self.moments = np.array(state["moments"]).reshape((len(state["moments"]),) * 2)
        self.sums = np.array(state["sums"])
        if len(self.moments):
            self._fit()

    def _deviations(self, x: np.ndarray) -> np.ndarray:
        return np.clip((x - self._means[:-1]) @ self._slopes, -4 * self._spread, 4 * self._spread)

    def _fit(self) -> None:
        self._means = self.moments[0, 1:] / self.moments[0, 0]
        covariance = (self.moments[1:, 1:] - self.moments[0, 0] * np.outer(self._means, self._means)) / self.sums[0]
        self._spread = float(np.sqrt(max(covariance[-1, -1], 0.0)))
        scale = np.sqrt(np.maximum(covariance.diagonal()[:-1], 1e-6 * (1e-6 + np.square(self._means[:-1]))))
        system = covariance[:-1, :-1] / np.outer(scale, scale) + PENALTY * np.eye(len(scale))
        self._slopes = np.linalg.solve(system, covariance[:-1, -1] / scale) / scale


class Projection:
    """A fixed random projection (Johnson-Lindenstrauss, with the signs of Achlioptas 2003) of all but the last columns.

    The first rows seen set the scale of each column once and for all: its root mean square, or the median of those of
    all columns where that is larger. So a few outlying dimensions do not drown the others.

    Args:
        num_columns: How many columns are left at most, the scalars among them. What has no more is not projected.
        num_scalars: The last so many columns are passed on as they are.
    """

    def __init__(self, num_columns: int, num_scalars: int) -> None:
        self.num_columns, self.num_scalars = num_columns, num_scalars
        self.scale = np.empty(0)

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Project finite ``features``, shape (n, D); return float32, shape (n, at most ``num_columns``)."""
        if not len(self.scale):
            sizes = np.sqrt(np.square(features, dtype=np.float64).mean(0))
            self.scale = np.maximum(np.maximum(sizes, np.median(sizes)), 1e-30)
        if features.shape[1] != len(self.scale):
            raise ValueError(
                f"features has {features.shape[1]} columns, but those before had {len(self.scale)}; "
                "one predictor takes the features of one policy."
            )
        if features.shape[1] <= self.num_columns:
            return features.astype(np.float32)
        hidden = features.shape[1] - self.num_scalars
        matrix = _signs(hidden, self.num_columns - self.num_scalars) / np.float32(np.sqrt(hidden))
        projected = (features[:, :hidden] / self.scale[:hidden]).astype(np.float32) @ matrix
        return np.concatenate([projected, features[:, hidden:]], axis=1, dtype=np.float32)


@lru_cache(maxsize=1)
def _signs(*shape: int) -> np.ndarray:
    """-1 and 1 at random, float32; the stream is the same in every numpy."""
    return (2 * np.random.RandomState(0).randint(0, 2, shape) - 1).astype(np.float32)
