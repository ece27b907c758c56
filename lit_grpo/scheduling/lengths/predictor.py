"""How long completions are going to be: learned online, from what the policy does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_grpo.budgets.history import Lengths, PromptHistory
from lit_grpo.scheduling.jobs import Job
from lit_grpo.scheduling.lengths.history import scales, sibling_shifts
from lit_grpo.scheduling.lengths.model import FORGETTING, LengthModel
from lit_grpo.scheduling.lengths.projection import Projection
from lit_grpo.scheduling.lengths.quality import spearman, within_correlation
from lit_grpo.types import GroupKey, Key

MOST_SCALARS, NUM_COLUMNS = 63, 256  # of features, after their projection
MOST_LEARNED = 16_384  # rows of a rollout that each stage learns from
WINDOW = 64  # groups that quality is taken from
ENOUGH = 64  # finished completions, before predictions are followed
NEW_PROMPT, KNOWN_PROMPT = 0.3, 8  # rows as which what lies between groups counts in regressions
RECOUNTS = 32  # how often in a rollout the siblings are taken account of
JOB = np.dtype(
    [(name, np.int64) for name in ("group", "limit", "decoded", "total", "seen", "stage")]
    + [(name, np.float64) for name in ("mu", "new", "before", "shift", "number", "mean", "variance", "scale")]
)
"""What is known of a job. ``mu`` is the predicted log of the tokens after those of its latest ``stage``, ``before``
what it was before decoding, ``new`` what that would be without a history, ``shift`` what siblings add; ``number`` to
``scale`` are of the prompt's history. ``total`` is 0 until it has ended, ``seen`` counts the stages observed."""


@dataclass(frozen=True)
class Outcome:
    """What was foretold of a rollout's jobs, and what they came to.

    ``said`` has, for each of ``points``, the total tokens foretold when a job had so many, float64, shape (jobs,
    points); NaN where it did not get there or nothing was said. ``totals`` are 0 of jobs that have not ended;
    ``groups`` says which share a prompt. Both are int64, shape (jobs,).
    """

    points: tuple[int, ...]
    said: np.ndarray
    totals: np.ndarray
    groups: np.ndarray


class LengthPredictor:
    """Predicts the lengths of completions, across all rollouts of a run. It implements ``LearntLengths``.

    A stage is the time before decoding or one of the later ``points``. At each, two small regressions correct the log
    of the tokens that were expected anyway by the policy's features (:class:`LengthModel`), one for prompts without a
    history, one for those with; a prediction mixes them, the more history the more of the second. Both learn from all
    completions, the second as if their siblings had been an earlier visit. An estimate is the mean over the errors of
    past predictions that a completion has not yet outlived; those of jobs that wait are corrected by what siblings have
    done (:func:`sibling_shifts`).

    What is told of a rollout is kept aside until ``end``, and never part of the state: with ``commit``, all of it is
    learnt at once; without, nothing remains. Of a rollout that is committed before all its jobs have finished, those
    begun count at what is expected of them (Buckley and James 1979), for otherwise only the short ones would.

    ``revision`` changes when estimates of jobs that wait have changed. ``informative`` is set when a rollout is
    committed: whether lengths foretold before decoding have ranked the last completions with a correlation of at least
    ``min_correlation``, and of twice the standard error that it has by chance with as many groups.

    Args:
        points: After how many tokens features are observed, ascending; 0 is the last position of the prompt.
        num_scalars: How many columns at the end of the features are no hidden state (mean log-prob, entropy);
            these are not projected.
        min_correlation: The rank correlation from which on predictions are worth following.
        max_tokens: The limit of completions, where it is known, to check ``points`` against.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        points: Sequence[int] = (0, 8, 32, 64),
        num_scalars: int = 0,
        min_correlation: float = 0.2,
        max_tokens: int | None = None,
    ) -> None:
        _check(points, max_tokens, num_scalars, min_correlation)
        self.points, self.min_correlation = tuple(points), min_correlation
        self.revision, self.informative = 0, False
        self._settings = {"points": list(points), "num_scalars": num_scalars}
        self._stages = tuple(sorted({0, *points}))
        self._projection = Projection(NUM_COLUMNS, num_scalars)
        self.history, self._is_own = PromptHistory(), True
        self._models = [(LengthModel(NEW_PROMPT), LengthModel(KNOWN_PROMPT)) for _ in self._stages]
        self._quality = [np.empty((0, 3)) for _ in self._stages]  # rows of predicted, actual, number of the group
        # of all log lengths, forgetting: their number and sum, squares within groups and their degrees of freedom
        self._logs = np.zeros(4)
        self._num_groups, self._num_ignored = 0, 0  # of what has been committed
        self._clear()

    def share(self, history: PromptHistory) -> None:
        """Go by what others know of prompts too; the lengths that are noted there count once its owner commits them."""
        self.history, self._is_own = history, False

    def begin(self, jobs: Sequence[Job]) -> None:
        """Take the jobs of a rollout, all at once or in portions."""
        new = list({job.key: job for job in jobs if job.key not in self._rows}.values())
        self._rows |= {job.key: len(self._jobs) + row for row, job in enumerate(new)}
        for job in new:
            self._groups.setdefault(job.group, len(self._groups))
        added = np.zeros(len(new), dtype=JOB)
        added["group"], added["limit"] = [self._groups[job.group] for job in new], [job.max_tokens for job in new]
        for name in ("mu", "new", "before"):
            added[name] = np.nan
        known = self.history.lengths([job.key[0] for job in new])
        self._remember(added, *known.T)
        self._jobs = np.concatenate([self._jobs, added])
        self._said = np.concatenate([self._said, np.full((len(new), len(self._stages)), np.nan)])
        self._predict(0, np.arange(len(self._jobs) - len(new), len(self._jobs)), np.empty((len(new), 0)))
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
        stage, rows = self._stages.index(num_tokens), self._rows_of(keys)
        jobs, finite = self._jobs[rows], np.isfinite(features).all(1)
        self._ignored += int((~finite).sum())
        fresh = finite & (jobs["total"] == 0) & (jobs["seen"] <= stage) & (jobs["limit"] > num_tokens)
        if fresh.any():
            rows, features = rows[fresh], self._projection(features[fresh])
            self._jobs["decoded"][rows] = np.maximum(self._jobs["decoded"][rows], num_tokens)
            self._jobs["seen"][rows] = stage + 1
            learned = rows % math.ceil(len(self._jobs) / MOST_LEARNED) == 0
            self._observed[stage].append((rows[learned], features[learned]))
            self._predict(stage, rows, features)
            self.revision += num_tokens == 0

    def progress(self, num_tokens: Mapping[Key, int]) -> None:
        """Say how many tokens some of the jobs have come to."""
        rows = self._rows_of(list(num_tokens))
        self._jobs["decoded"][rows] = np.fromiter(num_tokens.values(), dtype=np.int64, count=len(rows))

    def finish(self, job: Job, num_tokens: int) -> None:
        """Say that a job has finished with ``num_tokens`` tokens; an empty completion counts as one."""
        row = self._rows_of([job.key])
        self._jobs["decoded"][row] = self._jobs["total"][row] = max(num_tokens, 1)
        self._unnoticed += 1
        if self._unnoticed * RECOUNTS >= len(self._jobs):
            self._jobs["shift"] = sibling_shifts(self._jobs, self._within)
            self._unnoticed = 0
            self.revision += 1

    def end(self, commit: bool) -> None:
        """Forget the jobs of the rollout under way; before that, learn from them if ``commit``."""
        if commit:
            self._num_ignored += self._ignored
            if (self._jobs["decoded"] > 0).any():
                self._learn()
        self._clear()
        self.revision += 1

    def outcome(self) -> Outcome:
        """Return what was foretold of the rollout under way, each figure by what was known at its point."""
        return Outcome(self._stages, self._said.copy(), self._jobs["total"].copy(), self._jobs["group"].copy())

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        """Return the tokens expected of each job in all, float64, shape (jobs,); its limit where nothing is known yet.

        It is more than the job has come to, and no more than its limit.
        """
        return self._expected(self._jobs[self._rows_of([job.key for job in jobs])])

    def within_correlation(self, point: int) -> float:
        """Return how well the last completions were ordered within groups at ``point``; 0 where these are too few."""
        rows = self._quality[self._stages.index(point)]
        return within_correlation(*rows.T) if len(rows) >= ENOUGH else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the quality of the last predictions at each point; a figure is left out where there is none."""
        ignored = float(self._num_ignored + self._ignored)
        figures = {"lengths/informative": float(self.informative), "lengths/ignored": ignored}
        for point, rows in zip(self._stages, self._quality, strict=True):
            if len(rows):
                figures[f"lengths/spearman_at_{point}"] = spearman(rows[:, 0], rows[:, 1])
                figures[f"lengths/log_error_at_{point}"] = float(np.abs(np.log(rows[:, 0] / rows[:, 1])).mean())
                if point:
                    figures[f"lengths/within_at_{point}"] = self.within_correlation(point)
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learned as plain Python values; neither a rollout under way nor the history is part."""
        return {
            "settings": self._settings,
            "scale": self._projection.scale.tolist() if self._num_groups else [],
            "models": [[model.state_dict() for model in pair] for pair in self._models],
            "quality": [rows.tolist() for rows in self._quality],
            "logs": self._logs.tolist(),
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
        for pair, states in zip(self._models, state["models"], strict=True):
            for model, its_state in zip(pair, states, strict=True):
                model.load_state_dict(its_state)
        self._quality = [np.array(rows, dtype=np.float64).reshape(-1, 3) for rows in state["quality"]]
        self._logs, self._projection.scale = np.array(state["logs"]), np.array(state["scale"], dtype=np.float64)
        self._num_groups, self._num_ignored = state["num_groups"], state["num_ignored"]
        self.informative = self._is_informative()
        self.end(commit=False)

    @property
    def _within(self) -> float:
        """The variance of log lengths within a group."""
        return self._logs[2] / self._logs[3] if self._logs[3] else 1.0

    def _remember(self, jobs: np.ndarray, number: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> None:
        jobs["number"], jobs["mean"], jobs["variance"] = number, mean, variance
        jobs["scale"] = scales(number, variance, self._within)

    def _predict(self, stage: int, rows: np.ndarray, features: np.ndarray) -> None:
        """Predict rows at a stage, and write down what is said of them as they were then."""
        jobs = self._jobs[rows]
        if len(self._of_errors(stage, known=False).errors):
            new, known = (
                said + model.predict(features)
                for said, model in zip(self._anyway(stage, jobs), self._models[stage], strict=True)
            )
            jobs["mu"], jobs["stage"] = _mixed(jobs["number"], new, known), stage
            if stage == 0:
                jobs["new"], jobs["before"] = new, jobs["mu"]
        self._jobs[rows] = jobs
        jobs["decoded"], jobs["shift"] = self._stages[stage], 0.0
        self._said[rows, stage] = np.where(np.isnan(jobs["mu"]), np.nan, self._expected(jobs))

    def _anyway(self, stage: int, jobs: np.ndarray) -> list[np.ndarray]:
        """Return the logs of the tokens expected from a stage on by what was known before: of new and known prompts."""
        if stage == 0:
            return [np.full(len(jobs), self._logs[1] / self._logs[0]), jobs["mean"]]
        start = np.full(len(jobs), self._stages[stage])
        rests = [
            self._of_errors(0, known).mean(jobs[name], scale, start, jobs["limit"]) - start
            for known, name, scale in ((False, "new", np.ones(len(jobs))), (True, "before", jobs["scale"]))
        ]
        return [np.log(np.maximum(rest, 0.5)) for rest in rests]

    def _of_errors(self, stage: int, known: bool) -> LengthModel:
        """Return the model of known or new prompts if it knows its errors, and else the other one."""
        pair = self._models[stage]
        return pair[known] if len(pair[known].errors) else pair[not known]

    def _expected(self, jobs: np.ndarray) -> np.ndarray:
        """Return the mean total tokens of jobs, given what has been decoded of them."""
        decoded, limit, totals = jobs["decoded"], jobs["limit"], jobs["limit"].astype(np.float64)
        mu = jobs["mu"] + np.where(decoded == 0, jobs["shift"], 0.0)
        for stage, start in enumerate(self._stages):
            for known in (False, True):
                mine = (jobs["stage"] == stage) & ((jobs["number"] > 0) == known) & ~np.isnan(mu)
                if mine.any():
                    lasted, rest = np.maximum(decoded[mine] - start, 0), limit[mine] - start
                    about = mu[mine], jobs["scale"][mine], lasted, rest
                    totals[mine] = start + self._of_errors(stage, known).mean(*about)
        totals = np.clip(totals, np.minimum(decoded + 1, limit), limit)
        return np.where(jobs["total"] > 0, jobs["total"], totals)

    def _learn(self) -> None:
        """Judge what was said of the rollout, and refit everything."""
        jobs, groups, names = self._jobs, self._jobs["group"], [group[0] for group in self._groups]
        for stage, said in enumerate(self._said.T):
            judged = np.column_stack([said, jobs["total"], groups + self._num_groups])
            rows = np.concatenate([self._quality[stage], judged[(jobs["total"] > 0) & ~np.isnan(said)]])
            self._quality[stage] = rows[rows[:, 2] >= self._num_groups + len(names) - WINDOW]
        self._num_groups += len(names)
        totals = np.where((jobs["total"] == 0) & np.isnan(jobs["mu"]), jobs["decoded"] + 1.0, self._expected(jobs))
        begun, logs = jobs["decoded"] > 0, np.log(totals)
        visit = _moments(groups, logs, begun)
        sums = visit[:, 0] @ np.column_stack([np.ones(len(visit)), visit[:, 1:]])
        self._logs = FORGETTING * self._logs + (*sums, np.maximum(visit[:, 0] - 1, 0).sum())
        self.history.note_lengths([(name, Lengths(*row)) for name, row in zip(names, visit.tolist(), strict=True)])
        if self._is_own:
            self.history.commit_lengths()
        new, visited = jobs["number"] == 0, jobs.copy()  # as if the others of a group had been an earlier visit
        count, mean, variance = visit[groups].T
        self._remember(visited, count - begun, (count * mean - logs * begun) / np.maximum(count - begun, 1), variance)
        visited["new"] = np.where(np.isnan(jobs["new"]), self._logs[1] / self._logs[0], jobs["new"])
        visited["before"] = _mixed(visited["number"], visited["new"], visited["mean"])
        for stage, (start, chunks) in enumerate(zip(self._stages, self._observed, strict=True)):
            if stage == 0 and not chunks:
                chunks.append((np.arange(len(jobs)), np.empty((len(jobs), 0))))
            if chunks and (stage == 0 or len(self._of_errors(0, known=False).errors)):
                rows, features = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
                usable = np.argsort(rows)
                usable = usable[(begun & (totals > start))[rows[usable]]]
                rows = rows[usable]
                self._fit(stage, visited[rows], features[usable], np.log(totals[rows] - start), new[rows])
        self.informative = self._is_informative()

    def _fit(self, stage: int, jobs: np.ndarray, features: np.ndarray, logs: np.ndarray, new: np.ndarray) -> None:
        """Teach both models of a stage the logs of the tokens that were to come."""
        for known, (model, anyway) in enumerate(zip(self._models[stage], self._anyway(stage, jobs), strict=True)):
            some = (jobs["number"] > 0) | (not known)
            x = features[some, : 0 if known and stage == 0 else None].astype(np.float64)
            scale, fresh = (jobs["scale"], some) if known else (np.ones(len(jobs)), new)
            model.learn(x, (logs - anyway)[some], jobs["group"][some], scale[some], fresh[some])

    def _is_informative(self) -> bool:
        said, actual, groups = self._quality[0].T
        by_chance = 2 / math.sqrt(max(len(np.unique(groups)), 1))
        return len(said) >= ENOUGH and spearman(said, actual) >= max(self.min_correlation, by_chance)

    def _rows_of(self, keys: Sequence[Key]) -> np.ndarray:
        try:
            return np.fromiter(map(self._rows.__getitem__, keys), dtype=np.int64, count=len(keys))
        except KeyError as error:
            raise ValueError(
                f"The predictor does not know the job {error.args[0]!r}; give it to begin() first."
            ) from None

    def _clear(self) -> None:
        self._rows: dict[Key, int] = {}
        self._groups: dict[GroupKey, int] = {}
        self._jobs, self._said = np.zeros(0, dtype=JOB), np.empty((0, len(self._stages)))
        self._observed: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in self._stages]
        self._unnoticed = self._ignored = 0
        if not self._num_groups:
            self._projection.scale = np.empty(0)


def _moments(groups: np.ndarray, logs: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Return number, mean and variance of those of ``logs``, shape (n,), that are ``mine``, by group: (groups, 3)."""
    count, total, squares = (np.bincount(groups, mine * logs**power) for power in range(3))
    mean = total / np.maximum(count, 1)
    return np.column_stack([count, mean, np.maximum(squares / np.maximum(count, 1) - mean**2, 0.0)])


def _mixed(number: np.ndarray, new: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return logs, the more by what is known of a prompt the more of its completions there have been."""
    return np.where(number > 0, (new + number * known) / (number + 1), new)


def _check(points: Sequence[int], limit: int | None, num_scalars: int, min_correlation: float) -> None:
    if not points or min(points) < 0 or list(points) != sorted(set(points)):
        raise ValueError(f"points must be ascending numbers of tokens from 0 on, each once, not {tuple(points)}.")
    if limit is not None and points[-1] >= limit:
        raise ValueError(f"points names {points[-1]} tokens, but a completion has at most {limit}; leave it out.")
    if not 0 <= num_scalars <= MOST_SCALARS:
        raise ValueError(f"num_scalars must be from 0 to {MOST_SCALARS}, not {num_scalars}.")
    if not -1 <= min_correlation <= 1:
        raise ValueError(f"min_correlation must be a correlation from -1 to 1, not {min_correlation}.")
