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


EXPECTATION, OUTRIGHT, CORRECTING = range(3)
HANDICAP = np.array([[1.0], [1.1], [1.1]])  # completions of a prompt are alike, so that small differences mean nothing


class LengthModel:
    """Predicts the log of the tokens to come, from the history and the features, as a correction or outright.

    The first column is what is expected without these features, NaN where that is nothing. One regression corrects
    it, another does without. These two and the expectation as it is are judged by what they have foretold lately, apart
    for prompts that have a history and those that have none to speak of. A regression is used where it is the best, and
    clearly better than the expectation.
    """

    def __init__(self, forgetting: float) -> None:
        self.forgetting = forgetting
        self.residuals = Residuals()
        self._outright, self._correcting = OnlineRidge(2, forgetting), OnlineRidge(3, forgetting)
        self._errors = np.zeros((3, 2))  # squared, forgetting; of prompts without a history, and with

    @property
    def ready(self) -> bool:
        """Whether anything has been learned."""
        return self._outright.ready

    def predict(self, columns: np.ndarray) -> np.ndarray:
        """Return predicted logs, shape (n,); NaN where there is nothing better than the expectation.

        Args:
            columns: The expectation, mean and weight of the prompt's history, and features: shape (n, 3 + features).
        """
        best = np.argmin(self._errors * HANDICAP, axis=0)[_familiar(columns)]
        best[np.isnan(columns[:, 0])] = OUTRIGHT
        predicted = np.full(len(columns), np.nan)
        for which, ridge, first in ((OUTRIGHT, self._outright, 1), (CORRECTING, self._correcting, 0)):
            rows = best == which
            if rows.any():
                predicted[rows] = ridge.predict(columns[rows, first:])
        return predicted

    def learn(self, columns: np.ndarray, tokens: np.ndarray, scale: np.ndarray, kept: np.ndarray) -> None:
        """Take one rollout, row by row.

        Args:
            columns: As for ``predict``.
            tokens: The tokens that came, shape (n,).
            scale: The error expected of the logs, shape (n,).
            kept: Of which rows the residuals are kept, bool, shape (n,).
        """
        familiar = _familiar(columns)
        corrects = (self._errors[CORRECTING] < self._errors[OUTRIGHT])[familiar]
        errors = self._learn(columns, np.log(tokens))
        comparable = ~np.isnan(errors).any(0)
        self._errors *= self.forgetting
        for kind in (0, 1):
            self._errors[:, kind] += np.square(errors[:, comparable & (familiar == kind)]).sum(1)
        residuals = np.where(corrects & ~np.isnan(errors[CORRECTING]), errors[CORRECTING], errors[OUTRIGHT])
        there = ~np.isnan(residuals)
        if (there & kept).any():
            there &= kept
        self.residuals.add((residuals / scale)[there])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain lists."""
        ridges = [self._outright.state_dict(), self._correcting.state_dict()]
        return {"ridges": ridges, "errors": self._errors.tolist(), "residuals": self.residuals.values.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        for ridge, its_state in zip((self._outright, self._correcting), state["ridges"], strict=True):
            ridge.load_state_dict(its_state)
        self._errors = np.array(state["errors"])
        self.residuals = Residuals()
        self.residuals.add(np.array(state["residuals"], dtype=np.float64))

    def _learn(self, columns: np.ndarray, logs: np.ndarray) -> np.ndarray:
        """Refit both; return by how much each of the three was wrong, shape (3, n), NaN where it said nothing."""
        errors = np.full((3, len(logs)), np.nan)
        errors[EXPECTATION] = logs - columns[:, 0]
        outright = self._outright.learn(columns[:, 1:], logs)
        errors[OUTRIGHT, len(logs) - len(outright) :] = outright
        known = np.flatnonzero(~np.isnan(columns[:, 0]))
        if len(known):
            correcting = self._correcting.learn(columns[known], logs[known])
            errors[CORRECTING, known[len(known) - len(correcting) :]] = correcting
        return errors


def _familiar(columns: np.ndarray) -> np.ndarray:
    """Whether the past of each row's prompt weighs more than what is known without it: 0 or 1, shape (n,)."""
    return (columns[:, 2] > 0.5).astype(np.int64)
