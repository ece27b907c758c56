"""At which tokens completions wait for the others: learned from what that would have saved so far."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_grpo.scheduling.jobs import PredictedRollout
from lit_grpo.types import AllGather, Part, alone, over_ranks

FORGETTING = 0.8  # the weight of all earlier rollouts, at each new one
MOST_JOBS = 10_000  # of a rollout that are decoded in thought
NUM_SLICES = 16  # of the limit
SMALLEST_SLICE = 16
PARK_STEPS = 0.08
"""What taking a completion out of its slot and back costs, in decode steps: measured on the smallest of policies."""
COMPUTE_STEPS = 1.0
"""What it costs where keys and values are computed again: a pass of the policy, which reads all weights as a step."""
WORTH_IT = 0.01

Points = tuple[int, ...]


def time_slices(max_tokens: int) -> Points:
    """Return the points at which completions of at most ``max_tokens`` share their slots evenly."""
    step = max(max_tokens // NUM_SLICES, SMALLEST_SLICE)
    return tuple(range(step, max_tokens - 1, step))


class ProbeChoice:
    """Chooses the points at which completions wait for the others: none, a probe, or time slices.

    Completions pass every point at which lengths are predicted, probe or not. So it is known after each rollout what
    would have been said of them at a probe, and the steps that they would have taken are counted: in the order
    of arrival or by what was said before decoding, after a probe of each of the predictor's points, and in time
    slices, for which nothing need be predicted. What has saved most is taken, where that is more than it costs.
    A probe has to rank the completions of one prompt, too: a correlation over all would mostly be that of the prompts,
    which are told apart before decoding.

    Args:
        min_correlation: Rank correlation within groups from which on a probe is considered.
    """

    def __init__(self, min_correlation: float = 0.2) -> None:
        self.min_correlation = min_correlation
        self.savings: dict[Points, float] = {}  # share of the steps that points would have saved of late

    def points(self, correlations: Mapping[int, float]) -> Points:
        """Return the points of the next rollout.

        Args:
            correlations: Within groups, by point.
        """
        best: Points = ()
        for points, saving in self.savings.items():
            # A point that is not predicted at is a slice, for which nothing need be.
            is_sure = len(points) != 1 or correlations.get(points[0], 1) >= self.min_correlation
            if is_sure and saving >= WORTH_IT and saving > self.savings.get(best, 0.0):
                best = points
        return best

    def learn(
        self,
        outcome: PredictedRollout,
        max_tokens: int,
        num_slots: int,
        follows: bool,
        kept_tokens: float = math.inf,
    ) -> None:
        """Take what was said in a rollout, and what came.

        Args:
            outcome: Of a rollout that is learned from.
            max_tokens: The most tokens of a completion.
            num_slots: Slots that it was decoded in.
            follows: Whether what is said before decoding is followed.
            kept_tokens: Tokens of completions without a slot whose keys and values the generator keeps; those of others
                are computed again.
        """
        done = np.flatnonzero(outcome.totals > 0)[:MOST_JOBS]
        if len(done) <= num_slots:
            return
        totals, said, nothing = outcome.totals[done], outcome.said[done], np.full(len(done), np.nan)
        usual = count_steps(totals, said[:, 0] if follows else nothing, (), num_slots).steps
        candidates = [((point,), of_point) for point, of_point in zip(outcome.points[1:], said.T[1:], strict=True)]
        for points, foretold in [*candidates, (time_slices(max_tokens), nothing)]:
            if points:
                count = count_steps(totals, foretold, points, num_slots, kept_tokens)
                saving = 1 - (count.steps + PARK_STEPS * count.parked + COMPUTE_STEPS * count.computed_again) / usual
                self.savings[points] = saving + FORGETTING * (self.savings.get(points, saving) - saving)

    def metrics(self, all_gather: AllGather = alone) -> dict[str, float]:
        """Return what probes and time slices would have saved of late, as means over ranks."""
        figures: dict[str, Part] = {}
        for points, saving in self.savings.items():
            name = f"lengths/saving_of_probe_{points[0]}" if len(points) == 1 else "lengths/saving_of_slices"
            figures[name] = Part(saving, "mean")
        return over_ranks(figures, all_gather)

    def state_dict(self) -> dict[str, Any]:
        return {"savings": [[list(points), saving] for points, saving in self.savings.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.savings = {tuple(points): saving for points, saving in state["savings"]}


@dataclass(frozen=True)
class RolloutCount:
    """Cost of a rollout: decode steps, pauses of jobs at the probe, and recomputations of paused jobs."""

    steps: int
    parked: int
    computed_again: int


def count_steps(
    totals: np.ndarray, said: np.ndarray, points: Sequence[int], num_slots: int, kept_tokens: float = math.inf
) -> RolloutCount:
    """Return what a rollout takes that waits at points, longest predicted first.

    Args:
        totals: Tokens of each job, in the order of arrival, shape (jobs,).
        said: Tokens that are predicted after the first point, or without points before decoding, shape (jobs,); jobs of
            which nothing is, NaN, come last, as they have arrived.
        points: Numbers of tokens, ascending, as for :func:`lit_grpo.scheduling.plans.plan.make_queues`.
        num_slots: Number of slots that decode at a time.
        kept_tokens: Tokens of parked jobs that are kept; a job that finds no more room loses its own.
    """
    stops = [point + 1 for point in points]  # a job is looked at when it has a token more
    rank = np.argsort(np.argsort(-np.nan_to_num(said, nan=0.0), kind="stable")).tolist()
    lengths = totals.tolist()
    waiting = [(0, job if points else rank[job], job) for job in range(len(lengths))]
    heapq.heapify(waiting)
    active: list[tuple[int, int, int]] = []  # the step at which it stops, its stage, and the job
    has = [0] * len(lengths)
    kept: set[int] = set()
    step = num_parked = num_again = 0
    room = kept_tokens
    while waiting or active:
        while waiting and len(active) < num_slots:
            stage, _, job = heapq.heappop(waiting)
            if job in kept:
                kept.remove(job)
                room += has[job] - 1  # the last token has no keys yet
            elif has[job]:
                num_again += 1
            heapq.heappush(active, (step + _until(lengths[job], stops, stage) - has[job], stage, job))
        step = active[0][0]
        while active and active[0][0] == step:
            _, stage, job = heapq.heappop(active)
            has[job] = _until(lengths[job], stops, stage)
            if has[job] == lengths[job]:
                continue
            if (waiting and waiting[0][0] <= stage + 1) or (active and active[0][0] == step):
                heapq.heappush(waiting, (stage + 1, rank[job], job))
                num_parked += 1
                if has[job] - 1 <= room:
                    kept.add(job)
                    room -= has[job] - 1
            else:
                heapq.heappush(active, (step + _until(lengths[job], stops, stage + 1) - has[job], stage + 1, job))
    return RolloutCount(step, num_parked, num_again)


def _until(length: int, stops: Sequence[int], stage: int) -> int:
    """The tokens at which a job stops next."""
    return min(length, stops[stage]) if stage < len(stops) else length
