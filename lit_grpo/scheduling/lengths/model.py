"""What is learnt of lengths across rollouts: one small regression a stage, and how good it has been."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

FORGETTING = 0.95  # the weight of all that has been learnt, at each new rollout
TRUSTED = 0.01  # the penalty of the first column in all fits but the first
PENALTIES = (1e9, 1e3, 10.0, 1.0, 0.1, 0.01)
HANDICAP = np.array([1.0, *[1.1] * 5])  # completions of a prompt are alike, so that small differences mean nothing


class OnlineRidge:
    """Weighted ridge regression with forgetting, on standardised columns of which the first foretells ``y`` by itself.

    The slope of the first column is drawn towards 1, those of all others towards 0. There are several fits: with the
    first penalty, which is on all columns, the first column is taken at its word but for a constant; the others hardly
    penalise it. Before a batch is learnt, each fit foretells it, and the one with the smallest (forgetting) squared
    error is the one that predicts (Dawid 1984, "prequential"). The first batch is taken in two halves for that. A
    prediction is never further from the mean than four standard deviations of ``y``.

    Sums of products are all that is kept, so a fit is that of weighted least squares on everything ever learnt, a
    batch of ``n`` batches ago with weight ``forgetting ** n``.
    """

    def __init__(self, forgetting: float = FORGETTING) -> None:
        self.forgetting = forgetting
        self._moments = np.empty((0, 0))  # of the columns (1, x, y), weighted
        self._errors = np.zeros(len(PENALTIES))

    @property
    def ready(self) -> bool:
        """Whether anything has been learnt."""
        return len(self._moments) > 0

    @property
    def helps(self) -> bool:
        """Whether anything has foretold ``y`` better than the first column by itself."""
        return self._best > 0

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return predictions, shape (n,), for ``x``, shape (n, columns)."""
        return self._predict(x)[:, self._best]

    def learn(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Take one batch, ``x`` of shape (n, columns) and ``y`` of shape (n,).

        Returns:
            What ``y`` was above the predictions made before it was learnt; only of the second half of the first batch.
        """
        unforeseen = 0 if self.ready else (len(y) + 1) // 2
        if unforeseen:
            self._moments = np.zeros((x.shape[1] + 2,) * 2)
            self._absorb(x[:unforeseen], y[:unforeseen])
        x, y = x[unforeseen:], y[unforeseen:]
        errors = y[:, None] - self._predict(x)
        residuals = errors[:, self._best]
        self._errors = self.forgetting * self._errors + np.square(errors).sum(0)
        if len(y):
            self._absorb(x, y)
        return residuals

    def state_dict(self) -> dict[str, Any]:
        """Return the state as lists of floats."""
        return {"moments": self._moments.tolist(), "errors": self._errors.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._moments = np.array(state["moments"]).reshape((len(state["moments"]),) * 2)
        self._errors = np.array(state["errors"])
        if self.ready:
            self._fit()

    @property
    def _best(self) -> int:
        return int(np.argmin(self._errors * HANDICAP))

    def _predict(self, x: np.ndarray) -> np.ndarray:
        """Return the predictions of every fit, shape (n, fits)."""
        steps = (x - self._means[:-1]) / self._scale @ self._coefficients
        return self._means[-1] + np.clip(steps, -4 * self._spread, 4 * self._spread)

    def _absorb(self, x: np.ndarray, y: np.ndarray) -> None:
        rows = np.column_stack([np.ones(len(y)), x, y])
        self._moments = self.forgetting * self._moments + rows.T @ rows
        self._fit()

    def _fit(self) -> None:
        """Solve for the coefficients of every fit, shape (columns, fits)."""
        weight = self._moments[0, 0]
        self._means = self._moments[0, 1:] / weight
        covariance = self._moments[1:, 1:] / weight - np.outer(self._means, self._means)
        self._spread = float(np.sqrt(max(covariance[-1, -1], 0.0)))
        self._scale = np.sqrt(np.maximum(covariance.diagonal()[:-1], 1e-6 * (1e-6 + np.square(self._means[:-1]))))
        correlation = covariance[:-1, :-1] / np.outer(self._scale, self._scale)
        penalties = np.tile(np.array(PENALTIES)[:, None], len(correlation))
        penalties[1:, 0] = TRUSTED
        wanted = np.tile(covariance[:-1, -1] / self._scale, (len(PENALTIES), 1))
        wanted[:, 0] += penalties[:, 0] * self._scale[0]
        systems = correlation + penalties[:, :, None] * np.eye(len(correlation))
        self._coefficients = np.linalg.solve(systems, wanted[:, :, None])[:, :, 0].T


TAIL = 8  # beyond so many of the largest residuals, the tail is taken to go on in their shape


class Residuals:
    """The last ``capacity`` errors of predicted logarithms, in units of the scale that each was expected to have.

    A predicted log ``mu`` of scale ``s`` stands for the lengths ``exp(mu + s e)``, ``e`` any of the residuals with the
    same chance (Duan 1983, "Smearing estimate"). Of one that has come to ``lasted`` without ending, only those longer
    than that remain. Where fewer than eight residuals are that large, the eight largest are scaled up to it, as a
    Pareto tail would be: the conditional distribution of length over ``lasted`` stays as it is.
    """

    def __init__(self, values: Sequence[float] = (), capacity: int = 2048) -> None:
        self.capacity = capacity
        self.values = np.empty(0)
        self.add(np.array(values, dtype=np.float64))

    def add(self, residuals: np.ndarray) -> None:
        """Take new residuals, shape (n,); the oldest go."""
        self.values = np.concatenate([self.values, residuals])[-self.capacity :]
        self._sorted = np.sort(self.values)
        self._sums: dict[float, np.ndarray] = {}  # by scale

    def mean(self, mu: np.ndarray, scale: np.ndarray, lasted: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """Return the mean of ``min(length, limit)`` over lengths > ``lasted``.

        All have the shape (n,); there should not be more than some ten different scales.
        """
        kinds, kind = np.unique(scale, return_inverse=True)
        sums = np.stack([self._sums_of(float(one)) for one in kinds])
        count = len(self.values)
        tail = count - min(TAIL, count)
        with np.errstate(divide="ignore"):
            least = (np.log(lasted) - mu) / scale
        beyond = np.maximum(least - self._sorted[tail], 0.0)
        mu, first = mu + scale * beyond, np.minimum(np.searchsorted(self._sorted, least - beyond, side="right"), tail)
        last = np.maximum(np.searchsorted(self._sorted, (np.log(limit) - mu) / scale), first)
        below = np.exp(mu) * (sums[kind, last] - sums[kind, first])
        return (below + (count - last) * limit) / (count - first)

    def _sums_of(self, scale: float) -> np.ndarray:
        """The sums of the exponentials of the first 0, 1, 2, ... residuals, times ``scale``."""
        if scale not in self._sums:
            self._sums[scale] = np.concatenate([[0.0], np.cumsum(np.exp(scale * self._sorted))])
        return self._sums[scale]


class LengthModel:
    """Predicts the log of the tokens to come from what is expected anyway and from features; knows its errors.

    Without features it says what is expected anyway.
    """

    def __init__(self) -> None:
        self.ridge, self.residuals = OnlineRidge(), Residuals()

    @property
    def useful(self) -> bool:
        """Whether its predictions are known to be better than what is expected anyway, or there are no features."""
        return len(self.residuals.values) > 0 and (self.ridge.helps or not self.ridge.ready)

    def predict(self, columns: np.ndarray) -> np.ndarray:
        """Return predicted logs, shape (n,), from the expectation and features: shape (n, 1 + features)."""
        return self.ridge.predict(columns) if columns.shape[1] > 1 else columns[:, 0]

    def learn(self, columns: np.ndarray, logs: np.ndarray, scale: np.ndarray, kept: np.ndarray) -> None:
        """Take one rollout, row by row.

        Args:
            columns: As for ``predict``; where nothing was expected, the first is NaN.
            logs: The logs of the tokens that came, shape (n,).
            scale: The error expected of them, shape (n,).
            kept: Of which rows the residuals are kept, bool, shape (n,).
        """
        columns = columns.astype(np.float64)
        columns[np.isnan(columns[:, 0]), 0] = logs.mean()
        residuals = self.ridge.learn(columns, logs) if columns.shape[1] > 1 else logs - columns[:, 0]
        foretold = slice(len(logs) - len(residuals), None)
        self.residuals.add((residuals / scale[foretold])[kept[foretold]])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain lists."""
        return {"ridge": self.ridge.state_dict(), "residuals": self.residuals.values.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self.ridge.load_state_dict(state["ridge"])
        self.residuals = Residuals(state["residuals"])


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


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return the rank correlation of two arrays of shape (n,), equal values sharing a rank; 0 where one is constant."""
    ranks_a, ranks_b = average_ranks(a) - (len(a) + 1) / 2, average_ranks(b) - (len(b) + 1) / 2
    norm = float(np.sqrt(np.square(ranks_a).sum() * np.square(ranks_b).sum()))
    return float(ranks_a @ ranks_b) / norm if norm else 0.0


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1, shape (n,); equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


class Quality:
    """Predictions made before a length was known, beside that length, for the last ``window`` completions.

    Completions of one prompt are not independent trials of a prediction, so that it is counted of how many
    groups they are.
    """

    def __init__(self, window: int = 1024) -> None:
        self.window = window
        self.rows = np.empty((0, 3))  # predicted, actual, number of the group

    def add(self, predicted: np.ndarray, actual: np.ndarray, groups: np.ndarray) -> None:
        """Take predicted and actual tokens and the groups they are of, all of shape (n,)."""
        self.rows = np.concatenate([self.rows, np.column_stack([predicted, actual, groups])])[-self.window :]

    @property
    def num_groups(self) -> int:
        """How many groups the completions in the window are of."""
        return len(np.unique(self.rows[:, 2]))

    def correlation(self) -> float:
        """Return the rank correlation of predicted and actual lengths."""
        return spearman(self.rows[:, 0], self.rows[:, 1])

    def metrics(self, suffix: str = "") -> dict[str, float]:
        """Return rank correlation, mean absolute log ratio and mean absolute error; nothing without predictions."""
        if not len(self.rows):
            return {}
        predicted, actual = self.rows[:, 0], self.rows[:, 1]
        return {
            f"lengths/spearman{suffix}": self.correlation(),
            f"lengths/log_error{suffix}": float(np.abs(np.log(predicted / actual)).mean()),
            f"lengths/mae_tokens{suffix}": float(np.abs(predicted - actual).mean()),
        }
