"""Ridge regression that is refitted rollout by rollout and forgets slowly."""

from __future__ import annotations

from typing import Any

import numpy as np

TRUSTED = 0.01
PENALTIES = (1e9, 10.0, 1.0, 0.1, 0.01)  # the first, which leaves columns out, predicts where all are equally good


class OnlineRidge:
    """Weighted ridge regression with forgetting, on standardised columns of which the first foretells ``y`` by itself.

    The slope of the first column is drawn towards 1, those of all others towards 0. The penalty of those that are not
    trusted is one of five: before a batch is learned, each foretells it, and the one with the smallest
    (forgetting) squared error is the one that predicts (Dawid 1984, "prequential"). The first batch is taken in two
    halves for that. A prediction is never further from the mean than four standard deviations of ``y``.

    Sums of products are all that is kept, so a fit is that of weighted least squares on everything ever learned, a
    batch of ``n`` batches ago with weight ``forgetting ** n``.

    Args:
        num_trusted: The first so many columns are hardly penalised.
        forgetting: The weight of all that is known, at each new batch.
    """

    def __init__(self, num_trusted: int, forgetting: float) -> None:
        self.num_trusted, self.forgetting = num_trusted, forgetting
        self._moments = np.empty((0, 0))  # of the columns (1, x, y), weighted, about `_origin`
        self._origin = np.empty(0)
        self._errors = np.zeros(len(PENALTIES))

    @property
    def ready(self) -> bool:
        """Whether anything has been learned."""
        return len(self._moments) > 0

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return predictions, shape (n,), for ``x``, shape (n, columns)."""
        return self._predict(x)[:, self._best()]

    def learn(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Take one batch, ``x`` of shape (n, columns) and ``y`` of shape (n,).

        Returns:
            What ``y`` was above the predictions made before it was learned; only of the second half of the first batch.
        """
        x = np.asarray(x, dtype=np.float64)
        if not self.ready:
            half = (len(y) + 1) // 2
            self._origin = np.append(x[:half].mean(0), y[:half].mean())
            self._moments = np.zeros((x.shape[1] + 2,) * 2)
            self._absorb(x[:half], y[:half])
            if half == len(y):
                return np.zeros(half)
            x, y = x[half:], y[half:]
        errors = y[:, None] - self._predict(x)
        residuals = errors[:, self._best()]
        self._errors = self.forgetting * self._errors + np.square(errors).sum(0)
        self._absorb(x, y)
        return residuals

    def state_dict(self) -> dict[str, Any]:
        """Return the state as lists of floats."""
        return {name: getattr(self, name).tolist() for name in ("_moments", "_origin", "_errors")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._moments = np.array(state["_moments"]).reshape((len(state["_moments"]),) * 2)
        self._origin, self._errors = np.array(state["_origin"]), np.array(state["_errors"])
        if self.ready:
            self._fit()

    def _best(self) -> int:
        return int(np.argmin(self._errors))

    def _predict(self, x: np.ndarray) -> np.ndarray:
        """Return the predictions of every penalty, shape (n, penalties)."""
        steps = (x - self._centre) / self._scale @ self._coefficients
        return self._intercept + np.clip(steps, -4 * self._spread, 4 * self._spread)

    def _absorb(self, x: np.ndarray, y: np.ndarray) -> None:
        rows = np.column_stack([np.ones(len(y)), np.column_stack([x, y]) - self._origin])
        self._moments = self.forgetting * self._moments + rows.T @ rows
        self._fit()

    def _fit(self) -> None:
        """Solve for the coefficients of every penalty, shape (columns, penalties)."""
        weight = self._moments[0, 0]
        means = self._moments[0, 1:] / weight
        covariance = self._moments[1:, 1:] / weight - np.outer(means, means)
        variance = covariance.diagonal()[:-1]
        still = variance <= 1e-8 * (1e-8 + np.square(self._origin[:-1]))
        self._scale = np.sqrt(np.where(still, 1.0, variance))
        self._centre, self._intercept = self._origin[:-1] + means[:-1], self._origin[-1] + means[-1]
        self._spread = float(np.sqrt(max(covariance[-1, -1], 0.0)))
        covariance[:-1][still], covariance[:, :-1][:, still] = 0.0, 0.0
        correlation = covariance[:-1, :-1] / np.outer(self._scale, self._scale)
        target = covariance[:-1, -1] / self._scale
        self._coefficients = self._solve(correlation, target)

    def _solve(self, correlation: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the coefficients for all penalties at once, shape (columns, penalties)."""
        number = np.arange(len(target))
        penalties = np.tile(np.array(PENALTIES)[:, None], len(target))
        penalties[:, : self.num_trusted] = TRUSTED
        systems = np.tile(correlation, (len(PENALTIES), 1, 1))
        systems[:, number, number] += penalties
        wanted = np.tile(target, (len(PENALTIES), 1))
        wanted[:, 0] += penalties[:, 0] * self._scale[0]
        return np.linalg.solve(systems, wanted[:, :, None])[:, :, 0].T
