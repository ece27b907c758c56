"""Prediction of lengths: the prompt's mean, one ridge regression, and a probe within groups, fitted online."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, cast

import numpy as np

from lit_grpo.budgets.history import LengthMoments, PromptHistory
from lit_grpo.limits import Limit, check_value
from lit_grpo.scheduling.jobs import Job, PredictedRollout
from lit_grpo.types import AllGather, GroupKey, Key, Part, alone, over_ranks

PREDICTION_POINTS = (0, 8, 32, 64)
MOST_SCALARS, NUM_COLUMNS = 63, 256  # of features, after their projection
BETWEEN = 1.0  # rows as which what differs between groups counts in a ridge
VARIANCE_COUNT = 4  # completions as which all prompts count in what is expected of the variance of one
NUM_ERRORS, NUM_QUANTILES, TAIL = 1024, 128, 8  # past errors kept, and used; the largest go on as a Pareto tail
MOST_LEARNED = 16_384  # rows of a rollout whose features are kept
WINDOW = 64  # groups that quality is taken from
ENOUGH = 64  # finished completions, before predictions are followed
FORGETTING = 0.95  # the weight of all that has been learned, at each new rollout
PENALTY = 0.1  # of every slope, where the variance of a column is 1
LEAST_WORTH = 0.05  # of slopes: they always order a little what is alike otherwise
JOB = np.dtype(
    [(name, np.int64) for name in ("group", "limit", "decoded", "total", "seen", "stage")]
    + [(name, np.float64) for name in ("number", "before", "mu", "scale")]
)
"""A job. ``total`` is 0 until it has ended; ``seen`` counts the stages observed; ``number`` is of earlier completions
of its prompt. ``before`` is the log of its length as predicted before decoding, ``mu`` that of the tokens after those
of its latest ``stage``; ``scale`` is the size of the errors to be expected. NaN is not known."""


class LengthPredictor:
    """Predicts the lengths of completions, across all rollouts of a run. It implements ``FittedLengths``.

    All is in logs of tokens. **Before decoding**, a prompt's length is the mean of its earlier completions, with the
    mean of all prompts, corrected by a ridge on the policy's features of the prompt, as one completion more. **At
    each later point**, what is expected of completions that have come as far is corrected by a ridge on their
    features, which learns mostly within groups. **An estimate** is the mean over the errors of past predictions that
    a completion has not yet outlived, in units of how much the lengths of its prompt vary. What
    siblings have done is left out: it changed the rank correlation of jobs that wait by 0.01 at most.

    New prompts are learned at the points as if the others of their group had been an earlier visit, so that what is
    learned serves their next visit too. What is told of a rollout is kept aside until
    ``end``, and never part of the state: with ``commit``, all of it is learned at once; without, nothing remains. Jobs
    that were begun and have not finished count at what is expected of them (Buckley and James 1979), for otherwise
    only the short ones would.

    ``revision`` changes when estimates of jobs that wait have changed. ``informative`` is set when a rollout is
    committed: whether lengths predicted before decoding have ranked the last completions with a correlation of at least
    ``min_correlation``, and of twice the standard error that it has by chance with as many groups.

    Args:
        points: Numbers of tokens after which features are observed, ascending; 0 is the last position of the prompt.
        num_scalars: Number of columns at the end of the features that are no hidden state (mean log-prob, entropy);
            these are not projected.
        min_correlation: The rank correlation from which on predictions are worth following.
        max_tokens: The limit of completions, where it is known, to check ``points`` against.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        points: Sequence[int] = PREDICTION_POINTS,
        num_scalars: int = 0,
        min_correlation: float = 0.2,
        max_tokens: int | None = None,
    ) -> None:
        if not points or min(points) < 0 or list(points) != sorted(set(points)):
            raise ValueError(f"points must be ascending numbers of tokens from 0 on, each once, not {tuple(points)}.")
        if max_tokens is not None and points[-1] >= max_tokens:
            raise ValueError(
                f"points names {points[-1]} tokens, but a completion has at most {max_tokens}; leave it out."
            )
        check_value("num_scalars", num_scalars, Annotated[int, Limit(ge=0, le=MOST_SCALARS)])
        check_value("min_correlation", min_correlation, Annotated[float, Limit(ge=-1, le=1)])
        self.points, self.min_correlation = tuple(points), min_correlation
        self.revision = 0
        self._settings = {"points": list(points), "num_scalars": num_scalars}
        self._stages = tuple(sorted({0, *points}))
        self._projection = Projection(NUM_COLUMNS, num_scalars)
        self.history, self._is_own = PromptHistory(), True
        self._ridges = [Ridge(BETWEEN) for _ in self._stages]
        self._errors = [
            [np.empty(0)] * 2 for _ in self._stages
        ]  # of new and known prompts' logs, in units of the scale
        self._error_quantiles: dict[
            tuple[int, int], np.ndarray
        ] = {}  # of the errors, by stage and kind, as they are needed
        self._quality = [np.empty((0, 3)) for _ in self._stages]  # rows of predicted, actual, number of the group
        self._sums = np.zeros(3)  # of all log lengths, forgetting: their number, sum and squares
        self._mean = math.nan
        self._num_groups, self._num_ignored = 0, 0  # of what has been committed
        self._ignored = 0  # of the rollout under way
        self.end(commit=False)

    def share(self, history: PromptHistory) -> None:
        """Go by what others know of prompts too; the lengths that are noted there count once its owner commits them."""
        self.history, self._is_own = history, False

    def begin(self, jobs: Sequence[Job]) -> None:
        """Take the jobs of a rollout, all at once or in portions."""
        names: list[str] = []
        columns: list[tuple[int, int]] = []
        for job in jobs:
            if job.key not in self._rows:
                self._rows[job.key] = len(self._rows)
                names.append(job.key[0])
                columns.append((self._groups.setdefault(job.key[:2], len(self._groups)), job.max_tokens))
        added = np.zeros(len(names), dtype=JOB)
        added["group"], added["limit"] = np.array(columns, dtype=np.int64).reshape(-1, 2).T
        number, mean, variance = self.history.lengths(names).T
        added["number"], added["scale"] = number, self._scale(number, variance)
        added["before"] = added["mu"] = (self._mean + number * mean) / (1 + number)
        said = np.full((len(names), len(self._stages)), np.nan)
        said[:, 0] = np.where(np.isnan(added["mu"]), np.nan, self._expected(added))
        self._jobs, self._said = np.concatenate([self._jobs, added]), np.concatenate([self._said, said])
        self.revision += 1

    def observe(self, keys: Sequence[Key] | Sequence[GroupKey], num_tokens: int, features: np.ndarray) -> None:
        """Take the features of completions that have come to ``num_tokens`` tokens, or of prompts (0 tokens).

        A row with a feature that is not finite is ignored and counted, and the job keeps the estimate that it had. The
        same holds, uncounted, for a job that has finished or has been observed at this or a later point.

        Args:
            keys: The jobs; with 0 tokens also groups, a row of ``features`` for all of a group's jobs.
            num_tokens: Sampled tokens of each, one of ``points``.
            features: The policy's last hidden state and some scalars, shape (keys, D), of any floating type.
        """
        if num_tokens not in self.points:
            raise ValueError(f"num_tokens is {num_tokens}, but features are observed at {self.points} tokens.")
        features = np.asarray(features)
        if features.ndim != 2 or len(features) != len(keys):
            raise ValueError(f"features must have one row for each of {len(keys)} jobs, not shape {features.shape}.")
        if len(keys) and len(keys[0]) == 2:
            of_groups = [np.flatnonzero(self._jobs["group"] == self._groups[cast(GroupKey, key)]) for key in keys]
            rows, features = np.concatenate(of_groups), np.repeat(features, [len(each) for each in of_groups], axis=0)
        else:
            rows = self._rows_of(cast("Sequence[Key]", keys))
        stage = self._stages.index(num_tokens)
        jobs, finite = self._jobs[rows], np.isfinite(features).all(1)
        self._ignored += int((~finite).sum())
        fresh = finite & (jobs["total"] == 0) & (jobs["seen"] <= stage) & (jobs["limit"] > num_tokens)
        if not fresh.any():
            return
        rows, jobs, x = rows[fresh], jobs[fresh], self._projection(features[fresh])
        jobs["decoded"], jobs["seen"] = np.maximum(jobs["decoded"], num_tokens), stage + 1
        learned = rows % math.ceil(len(self._jobs) / MOST_LEARNED) == 0
        self._observed[stage].append((rows[learned], x[learned]))
        if any(map(len, self._errors[stage])):
            correction = self._ridges[stage].predict(x)
            if stage == 0:
                jobs["before"] += correction / (1 + jobs["number"])
            jobs["mu"] = self._after(stage, jobs) + (correction if stage else 0.0)
            jobs["stage"] = stage
        self._jobs[rows] = jobs
        jobs["decoded"] = num_tokens  # what is said at this stage, before anything else has come
        self._said[rows, stage] = np.where(np.isnan(jobs["mu"]), np.nan, self._expected(jobs))
        self.revision += num_tokens == 0

    def progress(self, num_tokens: Mapping[Key, int]) -> None:
        """Say how many tokens some of the jobs have come to."""
        rows = self._rows_of(list(num_tokens))
        self._jobs["decoded"][rows] = np.fromiter(num_tokens.values(), dtype=np.int64, count=len(rows))

    def finish(self, job: Job, num_tokens: int) -> None:
        """Say that a job has finished with ``num_tokens`` tokens; an empty completion counts as one."""
        row = self._rows_of([job.key])
        self._jobs["decoded"][row] = self._jobs["total"][row] = max(num_tokens, 1)

    def end(self, commit: bool) -> None:
        """Forget the jobs of the rollout under way; before that, learn from them if ``commit``."""
        if commit:
            self._num_ignored += self._ignored
            if (self._jobs["decoded"] > 0).any():
                self._learn()
        said, actual, groups = self._quality[0].T
        by_chance = 2 / math.sqrt(max(len(np.unique(groups)), 1))
        enough = len(said) >= ENOUGH
        self.informative = enough and spearman(said, actual) >= max(self.min_correlation, by_chance)
        self._rows: dict[Key, int] = {}
        self._groups: dict[GroupKey, int] = {}
        self._jobs, self._said = np.zeros(0, dtype=JOB), np.empty((0, len(self._stages)))
        self._observed: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in self._stages]
        self._ignored = 0
        if not self._num_groups:
            self._projection.scale = np.empty(0)
        self.revision += 1

    def outcome(self) -> PredictedRollout:
        """Return what was predicted of the rollout under way, each figure by what was known at its point."""
        jobs = self._jobs
        return PredictedRollout(
            tuple(self._rows), self._stages, self._said.copy(), jobs["total"].copy(), jobs["group"].copy()
        )

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        """Return the tokens expected of each job in all, float64, shape (jobs,); its limit where nothing is known yet.

        It is more than the job has come to, and no more than its limit.
        """
        return self._expected(self._jobs[self._rows_of([job.key for job in jobs])])

    def within_correlation(self, point: int) -> float:
        """Return how well the last completions were ordered within groups at ``point``; 0 where these are too few."""
        rows = self._quality[self._stages.index(point)]
        return within_correlation(*rows.T) if len(rows) >= ENOUGH else 0.0

    def metrics(self, all_gather: AllGather = alone) -> dict[str, float]:
        """Return the quality of the last predictions at each point; a figure is left out where there is none.

        Each rank predicts by itself. The figures are means over the completions of all ranks, which call it together,
        or those of this rank by default.
        """
        ignored = Part(self._num_ignored + self._ignored)
        figures = {"lengths/informative": Part(self.informative, "mean"), "lengths/ignored": ignored}
        for point, rows in zip(self._stages, self._quality, strict=True):
            if len(rows):
                errors = np.abs(np.log(rows[:, 0] / rows[:, 1]))
                found = {"spearman": spearman(rows[:, 0], rows[:, 1]), "log_error": float(errors.mean())}
                found |= {"within": self.within_correlation(point)} if point else {}
                for name, value in found.items():
                    figures[f"lengths/{name}_at_{point}"] = Part(value * len(rows), "mean", len(rows))
        return over_ranks(figures, all_gather)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learned as plain Python values; neither a rollout under way nor the history is part."""
        return {
            "settings": self._settings,
            "scale": self._projection.scale.tolist() if self._num_groups else [],
            "ridges": [ridge.state_dict() for ridge in self._ridges],
            "errors": [[errors.tolist() for errors in pair] for pair in self._errors],
            "quality": [rows.tolist() for rows in self._quality],
            "sums": self._sums.tolist(),
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
        for ridge, its_state in zip(self._ridges, state["ridges"], strict=True):
            ridge.load_state_dict(its_state)
        self._errors = [[np.array(errors, dtype=np.float64) for errors in pair] for pair in state["errors"]]
        self._error_quantiles.clear()
        self._quality = [np.array(rows, dtype=np.float64).reshape(-1, 3) for rows in state["quality"]]
        self._sums, self._projection.scale = np.array(state["sums"]), np.array(state["scale"], dtype=np.float64)
        self._mean = self._sums[1] / self._sums[0] if self._sums[0] else math.nan
        self._num_groups, self._num_ignored = state["num_groups"], state["num_ignored"]
        self.end(commit=False)

    def _scale(self, number: np.ndarray, variance: np.ndarray) -> np.ndarray:
        """Return the errors to be expected where so many completions have come, with such a variance of their logs."""
        of_all = self._sums[2] / self._sums[0] - self._mean**2 if self._sums[0] else 1.0
        mixed = (number * variance + VARIANCE_COUNT * of_all) / (number + VARIANCE_COUNT)
        return np.sqrt(np.maximum(mixed, 1e-4))

    def _after(self, stage: int, jobs: np.ndarray) -> np.ndarray:
        """Return the logs of the tokens to be expected after a stage's by what was known before decoding."""
        if stage == 0:
            return jobs["before"]
        start = np.full(len(jobs), float(self._stages[stage]))
        total = self._mean_length(0, jobs, jobs["before"], start, jobs["limit"])
        return np.log(np.maximum(total - start, 0.5))

    def _mean_length(
        self, stage: int, jobs: np.ndarray, mu: np.ndarray, lasted: np.ndarray, limit: np.ndarray
    ) -> np.ndarray:
        """Return :func:`mean_length` by the errors of a stage: of new prompts for these, of known ones for those."""
        means = np.empty(len(jobs))
        for known in (0, 1):
            mine = (jobs["number"] > 0) == known
            errors = self._errors[stage][known] if len(self._errors[stage][known]) else self._errors[stage][1 - known]
            if mine.any():
                if (stage, known) not in self._error_quantiles:
                    shares = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
                    few = len(errors) <= NUM_QUANTILES
                    self._error_quantiles[stage, known] = np.sort(errors) if few else np.quantile(errors, shares)
                quantiles = self._error_quantiles[stage, known]
                means[mine] = mean_length(mu[mine], jobs["scale"][mine], quantiles, lasted[mine], limit[mine])
        return means

    def _expected(self, jobs: np.ndarray) -> np.ndarray:
        """Return the mean total tokens of jobs, given what has been decoded of them."""
        decoded, limit, totals = jobs["decoded"], jobs["limit"], jobs["limit"].astype(np.float64)
        for stage, start in enumerate(self._stages):
            mine = (jobs["stage"] == stage) & ~np.isnan(jobs["mu"])
            if mine.any():
                lasted, rest = np.maximum(decoded[mine] - start, 0), limit[mine] - start
                totals[mine] = start + self._mean_length(stage, jobs[mine], jobs["mu"][mine], lasted, rest)
        totals = np.clip(totals, np.minimum(decoded + 1, limit), limit)
        return np.where(jobs["total"] > 0, jobs["total"], totals)

    def _learn(self) -> None:
        """Judge what was said of the rollout, and learn everything."""
        jobs, groups, num_before = self._jobs, self._jobs["group"], self._num_groups
        self._num_groups += len(self._groups)
        totals = np.where((jobs["total"] == 0) & np.isnan(jobs["mu"]), jobs["decoded"] + 1.0, self._expected(jobs))
        begun, logs = jobs["decoded"] > 0, np.log(totals)
        powers = np.column_stack([np.bincount(groups, begun * logs**power) for power in range(3)])
        self._sums = FORGETTING * self._sums + powers.sum(0)
        self._mean = self._sums[1] / self._sums[0] if self._sums[0] else math.nan
        for (name, _), row in zip(self._groups, _moments(powers).tolist(), strict=True):
            self.history.note_lengths(name, LengthMoments(*row))
        if self._is_own:
            self.history.commit_lengths()
        unknown = np.isnan(jobs["before"])
        jobs["before"][unknown], jobs["scale"][unknown] = self._mean, self._scale(np.zeros(1), np.zeros(1))
        others = powers[groups] - begun[:, None] * np.column_stack([np.ones(len(logs)), logs, logs**2])
        number, mean, variance = _moments(others).T
        visited, twice = jobs.copy(), (jobs["number"] == 0) & (number > 0)  # as if the others had been an earlier visit
        visited["before"][twice] = ((jobs["before"] + number * mean) / (1 + number))[twice]
        visited["scale"][twice] = self._scale(number, variance)[twice]
        visited["number"][twice] = number[twice]
        for stage, (start, said, chunks) in enumerate(zip(self._stages, self._said.T, self._observed, strict=True)):
            judged = np.column_stack([said, jobs["total"], groups + num_before])[(jobs["total"] > 0) & ~np.isnan(said)]
            rows = np.concatenate([self._quality[stage], judged])
            self._quality[stage] = rows[rows[:, 2] >= self._num_groups - WINDOW]
            if stage and not chunks:
                continue
            parts = chunks or [(np.arange(len(jobs)), np.empty((len(jobs), 0)))]
            rows, x = map(np.concatenate, zip(*parts, strict=True))
            order = np.argsort(rows)
            order = order[(begun & (totals > start))[rows[order]]]
            rows, x = rows[order], x[order].astype(np.float64)
            if len(rows):
                self._fit(stage, x, np.log(totals[rows] - start), jobs[rows], visited[rows], twice[rows])

    def _fit(
        self, stage: int, x: np.ndarray, logs: np.ndarray, jobs: np.ndarray, visited: np.ndarray, twice: np.ndarray
    ) -> None:
        """Learn the logs of the tokens that came after a stage's, of jobs as they were and as if ``visited``."""
        correction = self._ridges[stage].predict(x) if stage else 0.0  # what was said before decoding has it
        anyway, on_return = self._after(stage, jobs), self._after(stage, visited)
        rows = np.concatenate([jobs, visited[twice]])
        errors = np.concatenate([logs - anyway - correction, (logs - on_return - correction)[twice]]) / rows["scale"]
        for known in (0, 1):
            of_kind = [self._errors[stage][known], errors[(rows["number"] > 0) == known]]
            self._errors[stage][known] = np.concatenate(of_kind)[-NUM_ERRORS:]
        self._error_quantiles.clear()
        if x.shape[1]:
            self._ridges[stage].learn(x, logs - (on_return if stage else self._mean), jobs["group"])

    def _rows_of(self, keys: Sequence[Key]) -> np.ndarray:
        try:
            return np.fromiter(map(self._rows.__getitem__, keys), dtype=np.int64, count=len(keys))
        except KeyError as error:
            raise ValueError(
                f"The predictor does not know the job {error.args[0]!r}; give it to begin() first."
            ) from None


def mean_length(
    mu: np.ndarray, scale: np.ndarray, errors: np.ndarray, lasted: np.ndarray, limit: np.ndarray
) -> np.ndarray:
    """Return the mean of ``min(length, limit)`` over lengths > ``lasted``; all but ``errors`` have the shape (n,).

    A length is ``exp(mu + scale e)``, ``e`` any of the past ``errors``, ascending, with the same chance (Duan 1983,
    "Smearing estimate"). Where fewer than eight are larger, it is the eight largest, scaled up as a Pareto tail is.
    """
    totals, tail = np.exp(mu[:, None] + scale[:, None] * errors), max(len(errors) - TAIL, 0)
    totals *= np.maximum(lasted / totals[:, tail], 1)[:, None]
    alive = totals > lasted[:, None]
    alive[:, tail:] = True
    return (np.minimum(totals, limit[:, None]) * alive).sum(1) / alive.sum(1)


def _moments(powers: np.ndarray) -> np.ndarray:
    """Return number, mean and variance, shape (n, 3), of what has these sums of powers 0 to 2."""
    number = np.maximum(powers[:, 0], 1)
    mean = powers[:, 1] / number
    return np.column_stack([powers[:, 0], mean, np.maximum(powers[:, 2] / number - mean**2, 0.0)])


def make_predictor(
    prediction_points: Sequence[int] | None,
    probe: Sequence[int],
    observed: Sequence[int],
    min_correlation: float,
    max_tokens: int,
) -> LengthPredictor:
    """Return a predictor for completions of at most ``max_tokens``, which looks wherever anybody wants to know.

    Args:
        prediction_points: Where a user wants it to look; by default at those of ``PREDICTION_POINTS`` below the limit.
        probe: Where completions wait for the others, as a user has said.
        observed: Numbers of tokens at which plug-ins look at completions.
        min_correlation: From which on predictions are followed.
        max_tokens: The most tokens that a completion can have.

    Raises:
        ValueError: The probe leaves nothing to order.
    """
    points = prediction_points or [point for point in PREDICTION_POINTS if point < max_tokens]
    if probe and probe[-1] > max_tokens - 2:
        raise ValueError(
            f"probe_tokens names {probe[-1]}, but sampling.max_tokens is {max_tokens}: {max(max_tokens - 2, 0)} is the "
            "largest that leaves anything to order."
        )
    looks = {*points, *(probe if len(probe) == 1 else ()), *observed}
    return LengthPredictor(sorted(looks), num_scalars=2, min_correlation=min_correlation, max_tokens=max_tokens)


class Ridge:
    """Predicts a number from columns by ridge regression that forgets, trained on batches of rows in groups.

    What differs within groups counts in full, and what differs between groups as ``between`` rows a group at most:
    generalized least squares with a random effect of groups (Fuller and Battese 1973). A prediction is the mean plus
    the slopes' part times ``worth``: the factor, at most 1, that would have been best on batches before they were
    learned (without it, the rank correlation after 8 tokens is 0.02 less).

    Args:
        between: Number of rows that the differences between groups count as, per group, at most.
    """

    def __init__(self, between: float) -> None:
        self.between = between
        self.moments = np.empty((0, 0))  # of the columns (1, x, y), weighted
        self.sums = np.zeros(3)  # of rows, of slopes' parts times what they should have been, and of their squares

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return predictions, shape (n,), for ``x``, shape (n, columns); 0 where nothing has been learned."""
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
        return {"moments": self.moments.tolist(), "sums": self.sums.tolist()}

    def load_state_dict(self, state: dict[str, list]) -> None:
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
        num_columns: Max number of columns after the projection, including the scalars. Features with no more columns
            are not projected.
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
    ranks: list[np.ndarray] = []
    for values in (a, b):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse] - (len(a) + 1) / 2)
    ranks_a, ranks_b = ranks
    norm = float(np.sqrt(np.square(ranks_a).sum() * np.square(ranks_b).sum()))
    return float(ranks_a @ ranks_b) / norm if norm else 0.0


def within_correlation(predicted: np.ndarray, actual: np.ndarray, groups: np.ndarray) -> float:
    """Return how well lengths > 0, shape (n,), are ordered within ``groups``, numbers of shape (n,).

    It is the rank correlation of the logs of lengths, each less the mean of its group: what differs between groups does
    not count, groups whose lengths differ much count for more, and no outlier counts for much.
    """
    _, groups, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    centered = [logs - (np.bincount(groups, logs) / sizes)[groups] for logs in (np.log(predicted), np.log(actual))]
    a, b = (np.round(each[sizes[groups] > 1], 9) for each in centered)  # so that what is equal ties
    return spearman(a, b)
