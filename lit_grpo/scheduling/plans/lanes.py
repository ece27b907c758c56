"""Plans in which each slot has a list of its own."""

from __future__ import annotations

import numpy as np

from lit_grpo.scheduling.jobs import Job, Lengths
from lit_grpo.scheduling.plans.grouping import balanced_lanes
from lit_grpo.scheduling.queue import Queue
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
        lengths: What is thought of the lengths; where they are not informative, the order is that of arrival.
        num_slots: Lanes that the jobs are dealt onto.
        longest_first: Whether a lane begins with its longest job, else with its shortest.
        epsilon: What the largest lane may exceed the smallest possible by, relative to it, where that can be had.
    """

    def __init__(self, lengths: Lengths, num_slots: int, longest_first: bool, epsilon: float) -> None:
        super().__init__(lengths, num_slots)
        self._longest_first = longest_first
        self._epsilon = epsilon
        self._jobs: list[Job] = []
        self._expected: list[float] = []  # tokens of each
        self._lanes: list[list[int]] = [[] for _ in range(num_slots)]  # numbers of jobs; the next one last
        self._left = np.zeros(num_slots)  # tokens expected of what waits in a lane
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

    def _take(self) -> None:
        lane = self._next_lane
        length = self._expected[self._lanes[lane].pop()]
        self._left[lane] = self._left[lane] - length if self._lanes[lane] else 0.0

    def _started(self, job: Job) -> None:
        super()._started(job)
        if self._idle:  # else there are more slots than lanes
            self._lane_of[job.key] = self._idle.pop()
