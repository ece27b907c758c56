"""How long completions are going to be: learned online, from what the policy does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lit_grpo.scheduling.jobs import Job
from lit_grpo.scheduling.lengths.knowledge import NUM_COLUMNS, Columns, LengthKnowledge
from lit_grpo.scheduling.lengths.table import BEFORE, JobTable
from lit_grpo.types import Key

MOST_LEARNED = 16_384  # rows of a rollout that each model learns from
RECOUNTS = 32  # how often in a rollout the siblings are taken account of


class LengthPredictor:
    """Predicts the lengths of completions, across all rollouts of a run. It implements ``Lengths``.

    Before decoding, the log of the length is a ridge regression on the prompt's mean log length at earlier visits and,
    as far as that is lacking, on the policy's features. At each later point there is another, of the tokens still to
    come; where it has not been better than what was expected anyway, that is kept (:class:`LengthModel`). All are
    refitted when a rollout ends. In between, what has been decoded is taken account of: an estimate is a mean over the
    residuals of past predictions, of which only those are left that the completion has not yet outlived
    (:class:`Residuals`), and predictions from before decoding are corrected by what siblings have done
    (:class:`Siblings`). Where a rollout ends before all its jobs have, those begun count at what is expected of them
    (Buckley and James 1979), for otherwise only the short ones would.

    ``revision`` changes when estimates of jobs that wait have changed; those of jobs that are being decoded
    change with every token. ``informative`` is set at the end of a rollout: whether lengths foretold
    before decoding have ranked the last completions with a correlation of at least ``min_correlation``, and of at least
    twice the standard error that it has by chance with as many groups.

    Args:
        points: After how many tokens features are observed, ascending; 0 is the last position of the prompt.
        num_scalars: How many columns at the end of the features are no hidden state (mean log-prob, entropy);
            these are not projected.
        history: How many prompts the lengths of earlier visits are kept for; 0 does without.
        min_correlation: The rank correlation from which on predictions are worth following.
        forgetting: The weight of all that has been learned, at each new rollout.
        max_tokens: The limit of completions, where it is known, to check ``points`` against.
        seed: Decides the random projection of features of more than 64 columns.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        points: Sequence[int] = (0, 8, 32, 64),
        num_scalars: int = 0,
        history: int = 100_000,
        min_correlation: float = 0.2,
        forgetting: float = 0.95,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        _check_points(points, max_tokens)
        _check(num_scalars, history, min_correlation, forgetting)
        self.points = tuple(points)
        self.min_correlation = min_correlation
        self.revision = 0
        self.informative = False
        self.num_ignored = 0
        self._known = LengthKnowledge(points, num_scalars, history, forgetting, seed)
        self._clear()

    def begin(self, jobs: Sequence[Job], features: np.ndarray | None = None) -> None:
        """Take the jobs of a rollout, all at once or in portions, with their features at point 0 if they are known."""
        table = self._table
        rows = table.add(jobs)
        groups, which = np.unique(table.group[rows], return_inverse=True)
        table.history[rows] = self._known.history.columns([table.prompt_ids[group] for group in groups])[which]
        self._known.predict(table, BEFORE, rows, self._known.columns(table, BEFORE, rows))
        if features is not None:
            self.observe([job.key for job in jobs], 0, features)
        self.revision += 1

    def observe(self, keys: Sequence[Key], num_tokens: int, features: np.ndarray) -> None:
        """Take the features of completions that have come to ``num_tokens`` tokens.

        A row with a feature that is not finite is ignored and counted, and the job keeps the estimate that it had. The
        same holds, uncounted, for a job that has finished or has been observed at this or a later point.

        Args:
            keys: The jobs.
            num_tokens: One of ``points``.
            features: The policy's last hidden state and some scalars, shape (jobs, D), of any floating type.
        """
        if num_tokens not in self.points:
            raise ValueError(f"num_tokens is {num_tokens}, but features are observed at {self.points} tokens.")
        features = np.asarray(features)
        if features.ndim != 2 or len(features) != len(keys):
            raise ValueError(f"features must have one row for each of {len(keys)} jobs, not shape {features.shape}.")
        self._recount()
        table, point = self._table, self.points.index(num_tokens)
        rows = table.rows(keys)
        finite = np.isfinite(features).all(1)
        self.num_ignored += int((~finite).sum())
        fresh = finite & (table.total[rows] == 0) & (table.seen[rows] < point) & (table.limit[rows] > num_tokens)
        if not fresh.any():
            return
        rows, features = rows[fresh], self._known.projection(features[fresh])
        table.seen[rows] = point
        table.decoded[rows] = np.maximum(table.decoded[rows], num_tokens)
        columns = self._known.columns(table, point, rows, features)
        learned = self._learned(rows)
        self._observed[point].append((rows[learned], columns[learned]))
        self._known.predict(table, point, rows, columns)
        self.revision += num_tokens == 0

    def progress(self, num_tokens: Mapping[Key, int]) -> None:
        """Say how many tokens some of the jobs have come to."""
        rows = self._table.rows(list(num_tokens))
        self._table.decoded[rows] = np.fromiter(num_tokens.values(), dtype=np.int64, count=len(rows))

    def finish(self, job: Job, num_tokens: int) -> None:
        """Say that a job has finished with ``num_tokens`` tokens; an empty completion counts as one."""
        row = self._table.rows([job.key])
        self._table.decoded[row] = self._table.total[row] = max(num_tokens, 1)
        self._unnoticed += 1
        if self._unnoticed * RECOUNTS >= len(self._table):
            self._stale = True
            self._unnoticed = 0
            self.revision += 1

    def end(self, commit: bool = True) -> None:
        """Learn from the rollout, and forget its jobs."""
        rows = np.arange(len(self._table))
        rows = rows[self._learned(rows)]
        observed = {point: _joined(chunks) for point, chunks in self._observed.items() if chunks}
        self._known.learn(self._table, {BEFORE: (rows, self._known.columns(self._table, BEFORE, rows))} | observed)
        self.informative = self._known.informative(self.min_correlation)
        self._clear()
        self.revision += 1

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        """Return the tokens expected of each job in all, float64, shape (jobs,); its limit where nothing is known yet.

        It is more than the job has come to, and no more than its limit.
        """
        self._recount()
        return self._known.expected(self._table, self._table.rows([job.key for job in jobs]))

    def quantile(self, jobs: Sequence[Job], q: float) -> np.ndarray:
        """Return the number of tokens that each job stays below with probability ``q``, float64, shape (jobs,)."""
        if not 0 <= q <= 1:
            raise ValueError(f"q must be from 0 to 1, not {q}.")
        self._recount()
        return self._known.expected(self._table, self._table.rows([job.key for job in jobs]), q)

    def metrics(self) -> dict[str, float]:
        """Return the quality of the last predictions, before decoding (no suffix) and at each later point.

        A figure is left out as long as there is nothing to take it from.
        """
        own = {"lengths/informative": float(self.informative), "lengths/ignored": float(self.num_ignored)}
        return own | self._known.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learned as plain Python values; a rollout under way is not part of it."""
        return {"known": self._known.state_dict(), "num_ignored": self.num_ignored, "revision": self.revision}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned, and forget the rollout under way.

        Raises:
            ValueError: It is the state of a predictor with other points, scalars or another seed.
        """
        self._known.load_state_dict(state["known"])
        self.num_ignored, self.revision = state["num_ignored"], state["revision"] + 1
        self.informative = self._known.informative(self.min_correlation)
        self._clear()

    def _learned(self, rows: np.ndarray) -> np.ndarray:
        """Which rows models learn from: one of so many, to bound what is kept of a rollout."""
        return rows % max(1, math.ceil(len(self._table) / MOST_LEARNED)) == 0

    def _recount(self) -> None:
        """Take account of the siblings that have finished."""
        if self._stale:
            self._table.shift = self._known.siblings.shifts(self._table)
            self._stale = False

    def _clear(self) -> None:
        self._table = JobTable(len(self._known.starts))
        self._observed: dict[int, list[Columns]] = {point: [] for point in range(len(self.points))}
        self._unnoticed = 0
        self._stale = False


def _joined(chunks: list[Columns]) -> Columns:
    rows, columns = zip(*chunks, strict=True)
    return np.concatenate(rows), np.concatenate(columns)


def _check_points(points: Sequence[int], limit: int | None) -> None:
    if not points or min(points) < 0 or list(points) != sorted(set(points)):
        raise ValueError(f"points must be ascending numbers of tokens from 0 on, each once, not {tuple(points)}.")
    if limit is not None and points[-1] >= limit:
        raise ValueError(f"points names {points[-1]} tokens, but a completion has at most {limit}; leave it out.")


def _check(num_scalars: int, history: int, min_correlation: float, forgetting: float) -> None:
    if not 0 <= num_scalars < NUM_COLUMNS:
        raise ValueError(f"num_scalars must be from 0 to {NUM_COLUMNS - 1}, not {num_scalars}.")
    if history < 0:
        raise ValueError(f"history must be a number of prompts >= 0, not {history}; 0 does without.")
    if not -1 <= min_correlation <= 1:
        raise ValueError(f"min_correlation must be a correlation from -1 to 1, not {min_correlation}.")
    if not 0 < forgetting <= 1:
        raise ValueError(f"forgetting must be in (0, 1], not {forgetting}; 1 forgets nothing.")
