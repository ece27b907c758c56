"""What waits to be decoded, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from lit_grpo.scheduling.jobs import Job, Lengths
from lit_grpo.types import Key

Order = Callable[[np.ndarray, int], np.ndarray]
"""Orders jobs, the next one first: from the tokens expected of each, shape (jobs,), and the slots to be filled."""

NARROW = 0.75
"""Share of the slots that are in use where memory counts as the limit."""


def anything_fits(job: Job) -> bool:
    """Memory is no limit."""
    return True


class Queue:
    """Continuous sampling: a free slot takes the next job, whatever its group.

    A plan only orders: it never drops, splits or repeats a job.

    It holds what waits alone: a job that gives up its slot and is to wait again is put first, or added.

    Jobs are put in order when there are new ones, and again when ``lengths.revision`` changes: that costs one estimate
    of all that wait and a sort; handing out costs the same however many wait. Where memory refuses a job while a
    quarter of the slots or more are idle, only as many slots count for the order from then on as are in use, until
    there are new jobs.

    Args:
        lengths: What is thought of the lengths; where they are not informative, the order is that of arrival.
        num_slots: Slots that are to be filled.
        order: How jobs are ordered by length; None for the order of arrival.
    """

    def __init__(self, lengths: Lengths, num_slots: int, order: Order | None = None) -> None:
        self._lengths, self._num_slots, self._order = lengths, num_slots, order
        self._waiting: dict[Key, Job] = {}  # in the order of arrival
        self._first: list[Job] = []  # before all others; the last one comes next
        self._queue: list[Job] = []  # the next one last
        self._arranged_for: tuple[int, bool] | None = None
        self._width = num_slots  # slots that memory allows to be used
        self._num_active = 0

    def __len__(self) -> int:
        """Return the number of jobs that wait."""
        return len(self._waiting) + len(self._first)

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs that wait to be decoded."""
        for job in jobs:
            self._waiting[job.key] = job
        self._arranged_for, self._width = None, self._num_slots

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out at most ``free_slots`` jobs: what was put first, then the next ones in order.

        Each is offered to ``fits`` first, which answers whether there is memory for it beside those before it. The
        first that does not fit ends the admission, so that a large one is not passed over for ever.
        """
        admitted: list[Job] = []
        if free_slots < 1:
            return admitted
        now = (self._lengths.revision, self._lengths.informative)
        if now != self._arranged_for:
            self._arranged_for = now
            jobs = list(self._waiting.values())
            follows = jobs and self._lengths.informative
            self._arrange(jobs, np.maximum(self._lengths.estimate(jobs), 1.0) if follows else None)
        while len(admitted) < free_slots and len(self):
            job = self._first[-1] if self._first else self._peek()
            if not fits(job):
                self._narrow()
                break
            if self._first:
                self._first.pop()
            else:
                self._take()
                del self._waiting[job.key]
            self._started(job)
            admitted.append(job)
        return admitted

    def put_first(self, job: Job) -> None:
        """Let a job wait before all others: it was preempted, or it comes back from its environment."""
        self._first.append(job)

    def drop(self, job: Job) -> None:
        """Forget a job that waits, since it is wanted no more."""
        if self._waiting.pop(job.key, None) is not None:
            self._arranged_for = None
        else:
            self._first.remove(job)

    def left(self, job: Job) -> None:
        """A job that was handed out has given up its slot, for whatever reason."""
        self._num_active -= 1

    def _narrow(self) -> None:
        if self._num_active <= NARROW * self._width:
            self._width, self._arranged_for = max(self._num_active, 1), None

    def _arrange(self, jobs: list[Job], estimates: np.ndarray | None) -> None:
        """Put all waiting jobs in order; without ``estimates``, shape (jobs,), as they have arrived."""
        if estimates is not None and self._order is not None:
            jobs = [jobs[number] for number in self._order(estimates, self._width).tolist()]
        self._queue = jobs[::-1]

    def _peek(self) -> Job:
        """Return the next job; there is one."""
        return self._queue[-1]

    def _take(self) -> None:
        """Remove the job that ``_peek`` returned."""
        self._queue.pop()

    def _started(self, job: Job) -> None:
        """Note that a job is being handed out."""
        self._num_active += 1
