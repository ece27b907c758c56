"""How long completions are going to be: learned online, from what the policy does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_grpo.scheduling.jobs import Job
from lit_grpo.scheduling.lengths.history import PromptHistory, sibling_shifts
from lit_grpo.scheduling.lengths.model import LengthModel, Projection, Quality, spearman
from lit_grpo.scheduling.lengths.table import JobTable
from lit_grpo.types import Key

NUM_COLUMNS = 64  # of features, after their projection
MOST_LEARNED = 16_384  # rows of a rollout that each stage learns from
MOST_OF_A_GROUP = 16  # completions of a group that residuals and quality are taken from
ENOUGH = 64  # finished completions, before predictions are followed
RECOUNTS = 32  # how often in a rollout the siblings are taken account of


@dataclass(frozen=True)
class Outcome:
    """What was said of the completions of a rollout, and what they came to.

    Args:
        points: Numbers of tokens at which something was said; 0 is before decoding.
        said: Total tokens foretold of each job at each point, shape (jobs, points); NaN where nothing was, or the job
            had ended.
        totals: Tokens that each came to, shape (jobs,); 0 where it is unfinished.
        groups: A number for each, equal where they share a prompt.
    """

    points: tuple[int, ...]
    said: np.ndarray
    totals: np.ndarray
    groups: np.ndarray


class LengthPredictor:
    """Predicts the lengths of completions, across all rollouts of a run. It implements ``LearntLengths``.

    Before anything is observed, what is expected of a prompt is the mean log length of its earlier completions. At
    each of ``points`` there are two ridge regressions of the log of the tokens to come, for prompts that have a history
    and for new ones, on what was expected before decoding and on the policy's features; where these have not helped,
    the last prediction is kept (:class:`OnlineRidge`). What is seen at the prompt's end is for new ones alone. A group
    that is new also teaches those of the others, as if its other completions had been its history.

    In between, what has been decoded is taken account of: an estimate is a mean over the residuals of
    past predictions, of which only those are left that the completion has not yet outlived (:class:`Residuals`), and
    predictions of those that wait are corrected by what siblings have done (:func:`sibling_shifts`).

    What is told of a rollout is kept aside until ``end``. With ``commit``, all of it is learnt at once;
    without, nothing remains. It is never part of the state. So a rollout whose update was not made can be repeated,
    after a resume too, and counts once. Of one that is committed before all its jobs have finished, those begun count
    at what is expected of them (Buckley and James 1979), for otherwise only the short ones would.

    ``revision`` changes when estimates of jobs that wait have changed; those of jobs that are being decoded
    change with every token. ``informative`` is set when a rollout is committed: whether lengths foretold
    before decoding have ranked the last completions with a correlation of at least ``min_correlation``, and of at least
    twice the standard error that it has by chance with as many groups.

    Args:
        points: After how many tokens features are observed, ascending; 0 is the last position of the prompt.
        num_scalars: How many columns at the end of the features are no hidden state (mean log-prob, entropy);
            these are not projected.
        history: How many prompts the lengths of earlier visits are kept for; 0 does without.
        min_correlation: The rank correlation from which on predictions are worth following.
        max_tokens: The limit of completions, where it is known, to check ``points`` against.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        points: Sequence[int] = (0, 8, 32, 64),
        num_scalars: int = 0,
        history: int = 100_000,
        min_correlation: float = 0.2,
        max_tokens: int | None = None,
    ) -> None:
        _check_points(points, max_tokens)
        _check(num_scalars, history, min_correlation)
        self.points = tuple(points)
        self.min_correlation = min_correlation
        self.revision = 0
        self.informative = False
        self._settings = {"points": list(points), "num_scalars": num_scalars}
        self._starts = (0, *points)  # of each stage
        self._judged = sorted({0, *points})
        self._projection = Projection(NUM_COLUMNS, num_scalars)
        self._history = PromptHistory(history)
        self._models = [(LengthModel(), LengthModel()) for _ in self._starts]
        self._quality = [Quality() for _ in self._judged]
        self._num_groups, self._num_ignored = 0, 0  # of what has been committed
        self._clear()

    def begin(self, jobs: Sequence[Job]) -> None:
        """Take the jobs of a rollout, all at once or in portions."""
        table = self._table
        rows = table.add(jobs)
        groups, which = np.unique(table.jobs["group"][rows], return_inverse=True)
        known = self._history.columns([table.prompt_ids[group] for group in groups])[which]
        for column, name in enumerate(("prior", "weight", "scale")):
            table.jobs[name][rows] = known[:, column]
        self._predict(0, rows, np.empty((len(rows), 0)))
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
        stage, table = self.points.index(num_tokens) + 1, self._table
        rows = table.rows(keys)
        jobs, finite = table.jobs[rows], np.isfinite(features).all(1)
        self._ignored += int((~finite).sum())
        fresh = finite & (jobs["total"] == 0) & (jobs["seen"] < stage) & (jobs["limit"] > num_tokens)
        if fresh.any():
            rows, features = rows[fresh], self._projection(features[fresh])
            table.jobs["decoded"][rows] = np.maximum(table.jobs["decoded"][rows], num_tokens)
            learned = self._learned(rows)
            self._observed[stage].append((rows[learned], features[learned]))
            self._predict(stage, rows, features)
            self.revision += num_tokens == 0

    def progress(self, num_tokens: Mapping[Key, int]) -> None:
        """Say how many tokens some of the jobs have come to."""
        rows = self._table.rows(list(num_tokens))
        self._table.jobs["decoded"][rows] = np.fromiter(num_tokens.values(), dtype=np.int64, count=len(rows))

    def finish(self, job: Job, num_tokens: int) -> None:
        """Say that a job has finished with ``num_tokens`` tokens; an empty completion counts as one."""
        row = self._table.rows([job.key])
        self._table.jobs["decoded"][row] = self._table.jobs["total"][row] = max(num_tokens, 1)
        self._unnoticed += 1
        if self._unnoticed * RECOUNTS >= len(self._table):
            self._table.jobs["shift"] = sibling_shifts(self._table.jobs, self._history.within)
            self._unnoticed = 0
            self.revision += 1

    def outcome(self) -> Outcome:
        """Return what was said of the rollout under way."""
        jobs = self._table.jobs
        return Outcome(tuple(self._judged), jobs["said"], jobs["total"], jobs["group"])

    def within_correlation(self, point: int) -> float:
        """Return the rank correlation within groups of what was said at a point of late."""
        rows = self._quality[self._judged.index(point)].rows
        if len(rows) < ENOUGH:
            return 0.0
        _, group = np.unique(rows[:, 2], return_inverse=True)
        logs = np.log(rows[:, :2])
        means = np.stack([np.bincount(group, column) / np.bincount(group) for column in logs.T], 1)
        return spearman(*(logs - means[group]).T)

    def end(self, commit: bool) -> None:
        """Forget the jobs of the rollout under way; before that, learn from them if ``commit``."""
        if commit:
            self._num_ignored += self._ignored
            if (self._table.jobs["decoded"] > 0).any():
                self._learn()
        self._clear()
        self.revision += 1

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        """Return the tokens expected of each job in all, float64, shape (jobs,); its limit where nothing is known yet.

        It is more than the job has come to, and no more than its limit.
        """
        return self._expected(self._table.jobs[self._table.rows([job.key for job in jobs])])

    def metrics(self) -> dict[str, float]:
        """Return the quality of the last predictions, before decoding (no suffix) and at each later point.

        A figure is left out as long as there is nothing to take it from.
        """
        ignored = self._num_ignored + self._ignored
        figures = {"lengths/informative": float(self.informative), "lengths/ignored": float(ignored)}
        for start, quality in zip(self._judged, self._quality, strict=True):
            figures |= quality.metrics(f"_at_{start}" if start else "")
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learned as plain Python values; a rollout under way is not part of it."""
        return {
            "settings": self._settings,
            "scale": self._projection.scale.tolist() if self._num_groups else [],
            "history": self._history.state_dict(),
            "models": [[model.state_dict() for model in pair] for pair in self._models],
            "quality": [quality.rows.tolist() for quality in self._quality],
            "num_groups": self._num_groups,
            "num_ignored": self._num_ignored,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned, and forget the rollout under way.

        Raises:
            ValueError: It is the state of a predictor with other points or scalars.
        """
        if state["settings"] != self._settings:
            raise ValueError(
                f"The checkpoint's length predictor has {state['settings']}, but this one {self._settings}; "
                "give it the same arguments."
            )
        self._projection.scale = np.array(state["scale"], dtype=np.float64)
        self._history.load_state_dict(state["history"])
        for pair, states in zip(self._models, state["models"], strict=True):
            for model, its_state in zip(pair, states, strict=True):
                model.load_state_dict(its_state)
        for quality, rows in zip(self._quality, state["quality"], strict=True):
            quality.rows = np.array(rows, dtype=np.float64).reshape(-1, 3)
        self._num_groups, self._num_ignored = state["num_groups"], state["num_ignored"]
        self.informative = self._is_informative()
        self.end(commit=False)

    def _predict(self, stage: int, rows: np.ndarray, features: np.ndarray) -> None:
        """Predict rows at a stage, and write down what is said of those that are not yet beyond it."""
        start, jobs = self._starts[stage], self._table.jobs[rows]
        jobs["seen"] = stage
        for number, model, mine in self._parts(stage, jobs):
            if model.useful:
                some = jobs[mine]
                some["mu"] = model.predict(np.column_stack([self._anyway(stage, some), features[mine]]))
                some["start"], some["model"] = start, number
                if start == 0:
                    some["before"], some["base"] = some["mu"], some["model"]
                jobs[mine] = some
        said = (jobs["decoded"] == start) & ~np.isnan(jobs["mu"])
        jobs["said"][said, self._judged.index(start)] = self._expected(jobs[said])
        self._table.jobs[rows] = jobs

    def _parts(self, stage: int, jobs: np.ndarray) -> Iterator[tuple[int, LengthModel, np.ndarray]]:
        """Yield the number of each model of a stage, the model, and which of the jobs it is for, if any are."""
        known = jobs["weight"] > 0
        for familiar, model in enumerate(self._models[stage]):
            mine = known == familiar
            if mine.any() and not (familiar and stage and self._starts[stage] == 0):
                yield 2 * stage + familiar, model, mine

    def _anyway(self, stage: int, jobs: np.ndarray) -> np.ndarray:
        """Return the log of the tokens expected of jobs from a stage on, by what was known before decoding."""
        start = self._starts[stage]
        if start == 0:
            return jobs["prior"]
        jobs = jobs.copy()
        jobs["mu"], jobs["model"], jobs["start"] = jobs["before"], jobs["base"], 0
        jobs["total"], jobs["decoded"] = 0, start
        rest = np.log(np.maximum(self._expected(jobs) - start, 0.5))
        return np.where(np.isnan(jobs["mu"]), np.nan, rest)

    def _expected(self, jobs: np.ndarray) -> np.ndarray:
        """Return the mean total tokens of rows of the table, given what has been decoded of them."""
        start, decoded, limit = jobs["start"], jobs["decoded"], jobs["limit"]
        mu = jobs["mu"] + np.where(decoded == 0, jobs["shift"], 0.0)
        totals = limit.astype(np.float64)
        for number, model in enumerate(model for pair in self._models for model in pair):
            mine = (jobs["model"] == number) & ~np.isnan(mu)
            if mine.any():
                given = mu[mine], jobs["scale"][mine], (decoded - start)[mine], (limit - start)[mine]
                totals[mine] = start[mine] + model.residuals.mean(*given)
        totals = np.clip(totals, np.minimum(decoded + 1, limit), limit)
        return np.where(jobs["total"] > 0, jobs["total"], totals)

    def _learn(self) -> None:
        """Judge what was said of the rollout, and refit everything."""
        table, jobs = self._table, self._table.jobs
        kept = table.ranks() < MOST_OF_A_GROUP
        for said, quality in zip(jobs["said"].T, self._quality, strict=True):
            rows = (jobs["total"] > 0) & kept & ~np.isnan(said)
            quality.add(said[rows], jobs["total"][rows], jobs["group"][rows] + self._num_groups)
        self._num_groups += len(table.prompt_ids)
        totals = np.where((jobs["total"] == 0) & np.isnan(jobs["mu"]), jobs["decoded"] + 1.0, self._expected(jobs))
        begun = np.flatnonzero(jobs["decoded"] > 0)
        self._history.learn(table.prompt_ids, np.log(totals[begun]), jobs["group"][begun])
        self._observed[0] = [(begun, np.empty((len(begun), 0)))]
        visited = self._as_if_visited(np.log(totals))
        for stage, chunks in enumerate(self._observed):
            if chunks:
                rows, features = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
                usable = self._learned(rows) & (totals[rows] > self._starts[stage]) & (jobs["decoded"][rows] > 0)
                order = np.argsort(rows[usable])
                rows, features = rows[usable][order], features[usable][order]
                self._fit(stage, jobs[rows], features, totals[rows], kept[rows])
                again = np.flatnonzero(visited["weight"][rows] > 0)
                self._fit(stage, visited[rows[again]], features[again], totals[rows[again]], kept[rows[again]])
        self.informative = self._is_informative()

    def _as_if_visited(self, logs: np.ndarray) -> np.ndarray:
        """Return the table's jobs, those that are new as if the others of their group had been an earlier visit.

        All others have no ``weight``. The history has learnt the log lengths already.
        """
        jobs = self._table.jobs.copy()
        groups, begun = jobs["group"], jobs["decoded"] > 0
        number, total = (np.bincount(groups, each * begun)[groups] for each in (np.ones(len(jobs)), logs))
        new = (jobs["weight"] == 0) & begun & (number > 1)
        known = self._history.columns(self._table.prompt_ids)[groups]
        jobs["prior"] = jobs["before"] = (total - logs) / np.maximum(number - 1, 1)
        jobs["weight"], jobs["scale"], jobs["base"] = known[:, 1] * new, known[:, 2], 1
        return jobs

    def _fit(self, stage: int, jobs: np.ndarray, features: np.ndarray, totals: np.ndarray, kept: np.ndarray) -> None:
        """Refit the models of one stage."""
        logs = np.log(totals - self._starts[stage])
        for _, model, mine in self._parts(stage, jobs):
            columns = np.column_stack([self._anyway(stage, jobs[mine]), features[mine]])
            model.learn(columns, logs[mine], jobs["scale"][mine], kept[mine])

    def _is_informative(self) -> bool:
        before = self._quality[0]
        needed = max(self.min_correlation, 2 / math.sqrt(max(before.num_groups, 1)))
        return len(before.rows) >= ENOUGH and before.correlation() >= needed

    def _learned(self, rows: np.ndarray) -> np.ndarray:
        """Which rows models learn from: one of so many, to bound what is kept of a rollout."""
        return rows % max(1, math.ceil(len(self._table) / MOST_LEARNED)) == 0

    def _clear(self) -> None:
        self._table = JobTable(len(self._judged))
        self._observed: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in self._starts]
        self._unnoticed = self._ignored = 0
        if not self._num_groups:
            self._projection.scale = np.empty(0)


def _check_points(points: Sequence[int], limit: int | None) -> None:
    if not points or min(points) < 0 or list(points) != sorted(set(points)):
        raise ValueError(f"points must be ascending numbers of tokens from 0 on, each once, not {tuple(points)}.")
    if limit is not None and points[-1] >= limit:
        raise ValueError(f"points names {points[-1]} tokens, but a completion has at most {limit}; leave it out.")


def _check(num_scalars: int, history: int, min_correlation: float) -> None:
    if not 0 <= num_scalars < NUM_COLUMNS:
        raise ValueError(f"num_scalars must be from 0 to {NUM_COLUMNS - 1}, not {num_scalars}.")
    if history < 0:
        raise ValueError(f"history must be a number of prompts >= 0, not {history}; 0 does without.")
    if not -1 <= min_correlation <= 1:
        raise ValueError(f"min_correlation must be a correlation from -1 to 1, not {min_correlation}.")
