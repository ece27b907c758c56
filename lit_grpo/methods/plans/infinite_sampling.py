"""Plans in which each slot has a list of its own, dealt as evenly as expected lengths allow.

``infinite_sampling`` is the two-stage plan of Infinite Sampling (arXiv 2506.22950), as we read it: balanced global
grouping by expected length, then shortest-first refill. ``balanced`` decodes each list longest first.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from lit_grpo.limits import Limit, check_fields
from lit_grpo.scheduling.jobs import Job, Lengths
from lit_grpo.scheduling.plans import Plan
from lit_grpo.scheduling.plans.plan import Queue, slot_bound
from lit_grpo.types import Key


class Lanes(Queue):
    """Jobs are dealt onto one lane per slot, as even as :func:`balanced_lanes` can; a slot takes from its own lane.

    A plan is not told which slot is free: it is the one whose job has finished. When a lane runs dry, its slot takes
    the next job of the lane with the most tokens left, so that no slot idles while work waits. What is put first
    comes first, in any free slot. Lanes are dealt out again, over all slots alike, when jobs are added or estimates
    change.

    With ``longest_first=False`` this is the two-stage plan of Infinite Sampling (arXiv 2506.22950): balanced global
    grouping by expected length, then shortest-first refill. The paper leaves open how the grouping is done for more
    than a few slots, since an FPTAS exists only for a fixed number of them (here: :func:`balanced_lanes`, which uses
    one where it has an answer); whether a slot keeps to its group (here: yes, until that is empty); its epsilon; and
    what happens with new jobs.

    Args:
        lengths: Predicted lengths; if they are not informative, the order is that of arrival.
        num_slots: Lanes that the jobs are dealt onto.
        longest_first: Begin each lane with its longest job; if false, with its shortest.
        epsilon: Largest relative difference of the longest lane from the shortest possible one, if that can be reached.
    """

    def __init__(self, lengths: Lengths, num_slots: int, longest_first: bool, epsilon: float) -> None:
        super().__init__(lengths, num_slots)
        self._longest_first = longest_first
        self._epsilon = epsilon
        self._jobs: list[Job] = []
        self._expected: list[float] = []  # tokens of each
        self._lanes: list[list[int]] = [[] for _ in range(num_slots)]  # numbers of jobs; the next one last
        self._left: np.ndarray = np.zeros(num_slots)  # tokens expected of what waits in a lane
        self._next_lane = 0  # that of the job peeked at
        self._idle = list(range(num_slots))[::-1]  # lanes whose slot is free; the next one last
        self._lane_of: dict[Key, int] = {}  # of jobs that were handed out

    def left(self, job: Job) -> None:
        super().left(job)
        lane = self._lane_of.pop(job.key, None)
        if lane is not None:
            self._idle.append(lane)

    def _arrange(self, jobs: list[Job], estimates: np.ndarray | None) -> None:
        num_lanes = len(self._lanes)
        if estimates is None:  # one list for all slots
            estimates, order = np.ones(len(jobs)), np.zeros(len(jobs))
            lanes = np.zeros(len(jobs), dtype=np.int64)
        else:
            lanes = balanced_lanes(np.rint(estimates), num_lanes, self._epsilon)
            order = -estimates if self._longest_first else estimates
        self._jobs, self._expected = jobs, estimates.tolist()
        by_lane = np.lexsort((order, lanes))  # equal ones in the order of arrival
        ends = np.cumsum(np.bincount(lanes, minlength=num_lanes))[:-1]
        self._lanes = [numbers[::-1].tolist() for numbers in np.split(by_lane, ends)]
        self._left = np.bincount(lanes, weights=estimates, minlength=num_lanes)

    def _peek(self) -> Job:
        """Look at the lane of a free slot, or where that is empty at the fullest."""
        own = self._idle[-1] if self._idle else 0
        self._next_lane = own if self._idle and self._lanes[own] else int(self._left.argmax())
        return self._jobs[self._lanes[self._next_lane][-1]]

    def _hand_out(self, job: Job) -> None:
        if not self._first:
            lane = self._next_lane
            length = self._expected[self._lanes[lane].pop()]
            self._left[lane] = self._left[lane] - length if self._lanes[lane] else 0.0
        super()._hand_out(job)
        if self._idle:  # else there are more slots than lanes
            self._lane_of[job.key] = self._idle.pop()


@dataclass(frozen=True)
class Balanced(Plan):
    """Lists of about equal length, one for each slot, each decoded longest first (:class:`Lanes`)."""

    epsilon: Annotated[float, Limit(gt=0, lt=1)] = 0.02
    """Largest relative difference of the longest list from the shortest possible one."""
    follows_lengths: ClassVar[bool] = True
    longest_first: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)

    def queue(self, lengths: Lengths, num_slots: int) -> Queue:
        return Lanes(lengths, num_slots, self.longest_first, self.epsilon)


@dataclass(frozen=True)
class InfiniteSampling(Balanced):
    """Lists of about equal length, each decoded shortest first: the two stages of arXiv 2506.22950, as we read it."""

    longest_first: ClassVar[bool] = False


PLANS = {"balanced": Balanced(), "infinite_sampling": InfiniteSampling()}


# ---- dealing jobs onto slots: longest first, MULTIFIT, and a dynamic program with a guarantee --------


MOST_LOADS = 4_000_000
"""Load vectors that the dynamic program keeps, times jobs x lanes x lanes: up to a fifth of a second of work."""


def fptas_lanes(lengths: np.ndarray, num_lanes: int, epsilon: float, known: np.ndarray) -> np.ndarray | None:
    """Return a lane for each job with a makespan of at most ``1 + epsilon`` times the best, or None for no answer.

    The dynamic program of Horowitz and Sahni (1976) for a fixed number of lanes: lengths are rounded down to a unit,
    and for one job after another, the longest first, all load vectors that can be reached are listed, each once. Those
    are up to ``(jobs / epsilon) ** (lanes - 1)``, so three things make fewer of them. Jobs of at most ``epsilon`` times
    the lower bound are left out and dealt at the end, the longest first, to the lane with the least. A vector is
    dropped where it cannot come to less than ``1 / (1 + epsilon)`` of the schedule that is known, because a lane is too
    full or the lanes with room have too little of it for what is left: where none remains, what is known is good
    enough. And of more vectors than there is time for (``MOST_LOADS``) those with the fullest lanes are kept. Once any
    were cut so, the result is an answer only if it is within ``1 + epsilon`` of the lower bound.

    Where it answers, measured with :func:`packed_lanes` as what is known: all of 40 random instances of 12 jobs on 2
    to 4 lanes with each epsilon from 0.001 to 0.3, and of 24 jobs on 4 lanes with 0.01 or more. Of 200 made-up groups
    of 32 jobs (40 of each family in ``replay.traces``) all 200 on 4 lanes with 0.01 or more; on 8 lanes 153 with
    0.01, 196 with 0.02 and all with 0.05. Longest first alone is as good in 68, 113 and 174 of the latter.

    Args:
        lengths: Tokens expected of each job, whole numbers, shape (jobs,).
        num_lanes: Slots that the jobs are dealt onto.
        epsilon: What the makespan may exceed the best by, relative to it; between 0 and 1.
        known: A lane for each job, of any schedule; the better it is, the less there is to look at.
    """
    bound, most = slot_bound(lengths, num_lanes), makespan(lengths, known, num_lanes)
    if most <= (1 + epsilon) * bound:
        return known
    order = np.argsort(-lengths, kind="stable")
    large, small = np.split(order, [np.count_nonzero(lengths > epsilon * bound)])
    sizes, limit = _rounded(lengths[large], most / (1 + epsilon), epsilon * bound)
    most_loads = MOST_LOADS // (len(order) * num_lanes**2) + 1
    steps, cut = _reachable(sizes, num_lanes, limit, most_loads)
    if steps is None:
        return None if cut else known
    lanes = np.zeros(len(lengths), dtype=np.int64)
    lanes[large] = _trace_back(steps, sizes, num_lanes)
    _fill_up(lanes, lengths, large, small, num_lanes)
    return None if cut and makespan(lengths, lanes, num_lanes) > (1 + epsilon) * bound else lanes


def _rounded(lengths: np.ndarray, below: float, error: float) -> tuple[np.ndarray, int]:
    """Round down to a unit so that a lane with less than ``below`` is off by at most ``error`` in all.

    Returns the lengths in units, and the most units that are less than ``below``. Lengths are in descending order.
    """
    most_jobs = int(np.searchsorted(np.cumsum(lengths[::-1]), below + error, side="right"))
    # One job more than that is over ``below`` in units too; and whole numbers are exact with a unit of 1.
    unit = max(error / (most_jobs + 1), 1.0)
    return np.floor(lengths / unit).astype(np.int64), math.ceil(below / unit) - 1


Step = tuple[np.ndarray, np.ndarray]
"""For each load vector after a job: the vector that it came from, and the lane that took the job."""


def _reachable(sizes: np.ndarray, num_lanes: int, limit: int, most_loads: int) -> tuple[list[Step] | None, bool]:
    """List the steps to the load vectors up to ``limit``; the last step is that of the best vector alone.

    Returns None for the steps where no vector remains, and whether any were cut for being more than ``most_loads``.
    """
    loads = np.zeros((1, num_lanes), dtype=np.int64)  # each in ascending order
    left = sizes.sum() - np.cumsum(sizes)  # after each job
    steps: list[Step] = []
    cut = False
    for size, rest in zip(sizes.tolist(), left.tolist(), strict=True):
        is_first = np.diff(loads, axis=1, prepend=-1) > 0  # of lanes with equal loads
        parents, chosen = np.nonzero(is_first & (loads + size <= limit))
        grown = loads[parents]
        grown[np.arange(len(grown)), chosen] += size
        room = limit - grown
        keep = np.flatnonzero(np.where(room >= sizes[-1], room, 0).sum(axis=1) >= rest)
        grown = np.sort(grown[keep], axis=1)
        first = _distinct(grown, limit)
        if len(first) > most_loads:
            cut = True
            first = first[np.argsort(-np.square(grown[first]).sum(axis=1), kind="stable")[:most_loads]]
        if not len(first):
            return None, cut
        loads = grown[first]
        steps.append((parents[keep[first]], chosen[keep[first]]))
    if steps:
        best = [int(loads[:, -1].argmin())]
        steps[-1] = (steps[-1][0][best], steps[-1][1][best])
    return steps, cut


def _distinct(loads: np.ndarray, limit: int) -> np.ndarray:
    """Return the number of one row of each kind. All rows have the same total, so that the last lane tells nothing."""
    bits = limit.bit_length()
    width = max(62 // bits, 1)  # lanes that go into one number
    weights = 1 << (bits * np.arange(width, dtype=np.int64))
    parts = [loads[:, lane : min(lane + width, loads.shape[1] - 1)] for lane in range(0, loads.shape[1] - 1, width)]
    numbers = np.array([part @ weights[: part.shape[1]] for part in parts])
    order = np.lexsort(numbers)
    return order[np.any(np.diff(numbers[:, order], axis=1, prepend=-1) != 0, axis=0)]


def _fill_up(lanes: np.ndarray, lengths: np.ndarray, dealt: np.ndarray, jobs: np.ndarray, num_lanes: int) -> None:
    """Give each of some jobs to the lane with the least, beside those that have been dealt; writes to ``lanes``."""
    loads = np.bincount(lanes[dealt], weights=lengths[dealt], minlength=num_lanes)
    for job in jobs.tolist():
        lanes[job] = loads.argmin()
        loads[lanes[job]] += lengths[job]


def _trace_back(steps: list[Step], sizes: np.ndarray, num_lanes: int) -> np.ndarray:
    """Follow the best vector back to the start, then deal the jobs along the way."""
    state, path = 0, []
    for parents, chosen in reversed(steps):
        path.append(int(chosen[state]))
        state = int(parents[state])
    lanes = np.zeros(len(sizes), dtype=np.int64)
    sorted_lanes = [(0, lane) for lane in range(num_lanes)]
    for job, (place, size) in enumerate(zip(reversed(path), sizes.tolist(), strict=True)):
        load, lane = sorted_lanes[place]
        lanes[job] = lane
        sorted_lanes[place] = (load + size, lane)
        sorted_lanes.sort()
    return lanes


MULTIFIT_ROUNDS = 10
MOST_WORK = 50_000
"""More than LPT is tried up to this many jobs x lanes: it costs their product, and with many jobs LPT is as good."""


def balanced_lanes(lengths: np.ndarray, num_lanes: int, epsilon: float) -> np.ndarray:
    """Return a lane for each job, int64, shape (jobs,), so that the largest total length of a lane is small.

    Longest-first is taken where it is within ``1 + epsilon`` of the lower bound. Else that of :func:`fptas_lanes`,
    within ``1 + epsilon`` of the best, where it has an answer; else the better of longest-first and MULTIFIT (Coffman,
    Garey, Johnson 1978: at most 13/11 of the best), for which there is no such bound: for any number of lanes the
    problem is strongly NP-hard and has no FPTAS.

    Args:
        lengths: Tokens of each job, whole numbers, shape (jobs,).
        num_lanes: Slots that the jobs are dealt onto.
        epsilon: What the makespan may exceed the best by, relative to it, where that can be had.
    """
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    lanes = longest_first_lanes(lengths, num_lanes)
    target = (1.0 + epsilon) * slot_bound(lengths, num_lanes)
    if makespan(lengths, lanes, num_lanes) <= target or len(lengths) * num_lanes > MOST_WORK:
        return lanes
    lanes = packed_lanes(lengths, num_lanes, lanes)
    answer = fptas_lanes(lengths, num_lanes, epsilon, lanes)
    return lanes if answer is None else min(answer, lanes, key=lambda each: makespan(lengths, each, num_lanes))


def makespan(lengths: np.ndarray, lanes: np.ndarray, num_lanes: int) -> float:
    return float(np.bincount(lanes, weights=lengths, minlength=num_lanes).max())


def longest_first_lanes(lengths: np.ndarray, num_lanes: int) -> np.ndarray:
    """Give each job, the longest first, to the lane with the least so far."""
    lanes = np.zeros(len(lengths), dtype=np.int64)
    loads = [(0.0, lane) for lane in range(num_lanes)]
    values = lengths.tolist()
    for job in np.argsort(-lengths, kind="stable").tolist():
        load, lane = loads[0]
        lanes[job] = lane
        heapq.heapreplace(loads, (load + values[job], lane))
    return lanes


def packed_lanes(lengths: np.ndarray, num_lanes: int, lanes: np.ndarray) -> np.ndarray:
    """Return what MULTIFIT finds: the least capacity, below that of ``lanes``, that first-fit decreasing needs."""
    low, high = slot_bound(lengths, num_lanes), makespan(lengths, lanes, num_lanes)
    for _ in range(MULTIFIT_ROUNDS):
        middle = (low + high) / 2
        packed = _first_fit_decreasing(lengths, num_lanes, middle)
        if packed is None:
            low = middle
        else:
            lanes, high = packed, makespan(lengths, packed, num_lanes)
    return lanes


def _first_fit_decreasing(lengths: np.ndarray, num_lanes: int, capacity: float) -> np.ndarray | None:
    loads = [0.0] * num_lanes
    lanes = np.zeros(len(lengths), dtype=np.int64)
    for job in np.argsort(-lengths, kind="stable").tolist():
        length = float(lengths[job])
        lane = next((lane for lane, load in enumerate(loads) if load + length <= capacity), None)
        if lane is None:
            return None
        loads[lane] += length
        lanes[job] = lane
    return lanes
