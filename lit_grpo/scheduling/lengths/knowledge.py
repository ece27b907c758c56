"""What a run has learned of lengths: models, history, and how good they have been."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_grpo.scheduling.lengths.history import PromptHistory
from lit_grpo.scheduling.lengths.model import LengthModel
from lit_grpo.scheduling.lengths.projection import FeatureProjection
from lit_grpo.scheduling.lengths.quality import Quality
from lit_grpo.scheduling.lengths.siblings import Siblings
from lit_grpo.scheduling.lengths.table import BEFORE, JobTable

NUM_COLUMNS = 64
MOST_OF_A_GROUP = 16  # completions of a group that residuals and quality are taken from
ENOUGH = 64  # finished completions, before predictions are followed

Columns = tuple[np.ndarray, np.ndarray]
"""Rows of a job table, and the regressors of each."""


class LengthKnowledge:
    """Everything that outlives a rollout. The arguments are those of :class:`LengthPredictor`."""

    def __init__(self, points: Sequence[int], num_scalars: int, history: int, forgetting: float, seed: int) -> None:
        self.points = tuple(points)
        self.starts = sorted({0, *points})
        self.projection = FeatureProjection(NUM_COLUMNS, num_scalars, seed)
        self.history = PromptHistory(history, forgetting)
        self.siblings = Siblings(forgetting)
        self.models = {point: LengthModel(forgetting) for point in range(BEFORE, len(points))}
        self.quality = [Quality() for _ in self.starts]
        self._num_groups = 0
        self._settings = {"points": list(points), "num_scalars": num_scalars, "seed": seed}

    def columns(self, table: JobTable, point: int, rows: np.ndarray, features: np.ndarray | None = None) -> np.ndarray:
        """Return the regressors of rows at a point, float32, shape (rows, 3 + features).

        The first is the log of the median now expected of the tokens to come, NaN where nothing is; the next two are of
        the history. Before decoding, features speak of the prompt alone, and count as much as its history is lacking.
        """
        mean, weight = table.history[rows, :2].T
        if features is None:
            return np.column_stack([np.full(len(rows), np.nan), mean, weight]).astype(np.float32)
        start = self._start(point)
        if start == 0:
            features = np.multiply(features, 1 - weight[:, None])
        rest = np.maximum(self.expected(table, rows, 0.5) - start, 0.5)
        expected = np.where(np.isnan(table.mu[rows]), np.nan, np.log(rest))
        return np.column_stack([expected, mean, weight, features]).astype(np.float32)

    def predict(self, table: JobTable, point: int, rows: np.ndarray, columns: np.ndarray) -> None:
        """Predict rows at a point, and write down what is said of those that are not yet beyond it."""
        start, model = self._start(point), self.models[point]
        if model.ready and len(rows):
            mu = model.predict(columns)
            better = ~np.isnan(mu)
            table.predict(rows[better], point, start, mu[better])
            rows = rows[table.decoded[rows] == start]
            table.said[rows, self.starts.index(start)] = self.expected(table, rows)

    def expected(self, table: JobTable, rows: np.ndarray, q: float | None = None, siblings: bool = True) -> np.ndarray:
        """Return the mean total tokens of each row, or the ``q``-quantile, given what has been decoded of it."""
        start, limit, decoded = table.start[rows], table.limit[rows], table.decoded[rows]
        mu = table.mu[rows] + np.where(start == 0, table.shift[rows], 0.0)
        totals = limit.astype(np.float64)
        points = np.where(np.isnan(mu), BEFORE - 1, table.point[rows])
        for point, model in self.models.items():
            mine = points == point
            if mine.any():
                given = mu[mine], table.history[rows[mine], 2], (decoded - start)[mine], (limit - start)[mine]
                rest = model.residuals.mean(*given) if q is None else model.residuals.quantile(*given, q)
                totals[mine] = start[mine] + rest
        totals = np.clip(totals, np.minimum(decoded + 1, limit), limit)
        return np.where(table.total[rows] > 0, table.total[rows], totals)

    def learn(self, table: JobTable, observed: Mapping[int, Columns]) -> None:
        """Take a rollout that has ended; ``observed`` holds what was seen of it at each point."""
        started = np.flatnonzero(table.decoded > 0)
        if len(started):
            self._judge(table)
            totals = self._totals(table)
            for point, columns in observed.items():
                self._fit(table, totals, point, columns)
            foretold = started[~np.isnan(table.mu_before[started])]
            if len(foretold):
                residuals = np.log(totals[foretold]) - table.mu_before[foretold]
                self.siblings.learn(residuals, table.group[foretold])
            self.history.learn(table.prompt_ids, np.log(totals[started]), table.group[started])

    def informative(self, min_correlation: float) -> bool:
        """Whether what was said before decoding has ranked completions, and not by chance."""
        before = self.quality[0]
        needed = max(min_correlation, 2 / math.sqrt(max(before.num_groups, 1)))
        return len(before) >= ENOUGH and before.correlation() >= needed

    def metrics(self) -> dict[str, float]:
        """Return the quality at each point at which there were predictions."""
        figures: dict[str, float] = {}
        for start, quality in zip(self.starts, self.quality, strict=True):
            figures |= quality.metrics(f"_at_{start}" if start else "")
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain Python values."""
        parts = [part.state_dict() for part in self._parts()]
        return {"settings": self._settings, "num_groups": self._num_groups, "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned.

        Raises:
            ValueError: It is the state of a predictor with other points, scalars or another seed.
        """
        if state["settings"] != self._settings:
            raise ValueError(
                f"The checkpoint's length predictor has {state['settings']}, but this one {self._settings}; "
                "give it the same arguments."
            )
        self._num_groups = state["num_groups"]
        for part, its_state in zip(self._parts(), state["parts"], strict=True):
            part.load_state_dict(its_state)

    def _parts(self) -> list[Any]:
        return [self.projection, self.history, self.siblings, *self.models.values(), *self.quality]

    def _start(self, point: int) -> int:
        return 0 if point == BEFORE else self.points[point]

    def _judge(self, table: JobTable) -> None:
        """Compare what was said with what came."""
        for said, quality in zip(table.said.T, self.quality, strict=True):
            rows = np.flatnonzero((table.total > 0) & (table.rank < MOST_OF_A_GROUP) & ~np.isnan(said))
            quality.add(said[rows], table.total[rows], table.group[rows] + self._num_groups)
        self._num_groups += table.num_groups

    def _totals(self, table: JobTable) -> np.ndarray:
        """Return the total tokens of each row; of those that have not finished, what is expected."""
        expected = self.expected(table, np.arange(len(table)))
        unknown = (table.total == 0) & np.isnan(table.mu)
        return np.where(unknown, table.decoded + 1.0, expected)

    def _fit(self, table: JobTable, totals: np.ndarray, point: int, columns: Columns) -> None:
        """Refit the model of one point, in the order of the table."""
        start, (rows, regressors) = self._start(point), columns
        order = np.argsort(rows)
        rows, regressors = rows[order], regressors[order]
        usable = (totals[rows] > start) & (table.decoded[rows] > 0)
        if usable.any():
            rows, regressors = rows[usable], regressors[usable]
            tokens, scale, kept = totals[rows] - start, table.history[rows, 2], table.rank[rows] < MOST_OF_A_GROUP
            self.models[point].learn(regressors, tokens, scale, kept)
