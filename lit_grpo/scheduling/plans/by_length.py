"""Plans with one queue: in the order of arrival, or by length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from lit_grpo.scheduling.jobs import Job, Lengths
from lit_grpo.types import Key


def anything_fits(job: Job) -> bool:
    """Memory is no limit."""
    return True


class FirstCome:
    """Continuous sampling in the order of arrival: a free slot takes the next job, whatever its group."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs that wait to be decoded."""
        self._waiting.extend(jobs)

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out the jobs that have waited longest."""
        admitted = []
        while self._waiting and len(admitted) < free_slots and fits(self._waiting[0]):
            admitted.append(self._waiting.popleft())
        return admitted

    def set_aside(self, job: Job) -> None:
        """Let a job wait again, before all others."""
        self._waiting.appendleft(job)

    def finish(self, job: Job, num_tokens: int) -> None:
        """Nothing to learn: the order is fixed."""

    def __len__(self) -> int:
        """Return the number of jobs that wait."""
        return len(self._waiting)


class Arranged(ABC):
    """Waiting jobs that are arranged by length when there are new ones, and anew when ``lengths.revision`` changes.

    Where the lengths are not informative, the order is that of arrival. Arranging costs one estimate of all that
    wait and a sort; handing out costs the same however many wait.

    Args:
        lengths: What is thought of the lengths.
    """

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._waiting: dict[Key, Job] = {}  # in the order of arrival
        self._first: list[Job] = []  # were set aside; the last one comes next
        self._arranged_for: tuple[int, bool] | None = None

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs that wait to be decoded."""
        self._waiting.update((job.key, job) for job in jobs)
        self._arranged_for = None

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out what was set aside, then the next ones as they are arranged."""
        admitted: list[Job] = []
        if free_slots < 1:
            return admitted
        self._arrange_if_changed()
        while len(admitted) < free_slots and (self._waiting or self._first):
            job = self._first[-1] if self._first else self._peek()
            if not fits(job):
                break
            if self._first:
                self._first.pop()
            else:
                self._take()
                del self._waiting[job.key]
            self._started(job)
            admitted.append(job)
        return admitted

    def set_aside(self, job: Job) -> None:
        """Let a job wait again, before all others."""
        self._first.append(job)

    @abstractmethod
    def finish(self, job: Job, num_tokens: int) -> None:
        """Note that a job has come to its end; the lengths learn by themselves."""

    def __len__(self) -> int:
        """Return the number of jobs that wait."""
        return len(self._waiting) + len(self._first)

    def _arrange_if_changed(self) -> None:
        now = (self._lengths.revision, self._lengths.informative)
        if now == self._arranged_for:
            return
        self._arranged_for = now
        jobs = list(self._waiting.values())
        self._arrange(jobs, np.maximum(self._lengths.estimate(jobs), 1.0) if self._lengths.informative else None)

    @abstractmethod
    def _arrange(self, jobs: list[Job], estimates: np.ndarray | None) -> None:
        """Arrange all waiting jobs.

        Args:
            jobs: In the order of arrival.
            estimates: Tokens expected of each, 1 or more, shape (jobs,); None to keep the order.
        """

    @abstractmethod
    def _peek(self) -> Job:
        """Return the next job; there is one."""

    @abstractmethod
    def _take(self) -> None:
        """Remove the job that ``_peek`` returned."""

    @abstractmethod
    def _started(self, job: Job) -> None:
        """Note that a job is being handed out."""


class ByLength(Arranged):
    """A free slot takes the longest (LPT) or the shortest (SJF) waiting job; equal ones in the order of arrival.

    Longest first ends at most 4/3 - 1/(3 slots) times as late as the best schedule does (Graham 1969) with true
    lengths. Shortest first has the least mean completion time, and leaves the longest for the end.

    Args:
        lengths: What is thought of the lengths; where they are not informative, the order is that of arrival.
        longest_first: Whether the longest comes first, else the shortest.
    """

    def __init__(self, lengths: Lengths, longest_first: bool) -> None:
        super().__init__(lengths)
        self._longest_first = longest_first
        self._queue: list[Job] = []  # the next one last

    def _arrange(self, jobs: list[Job], estimates: np.ndarray | None) -> None:
        if estimates is None:
            self._queue = jobs[::-1]
            return
        order = np.argsort(-estimates if self._longest_first else estimates, kind="stable")
        self._queue = [jobs[number] for number in order[::-1].tolist()]

    def _peek(self) -> Job:
        return self._queue[-1]

    def _take(self) -> None:
        self._queue.pop()

    def finish(self, job: Job, num_tokens: int) -> None:
        """Nothing to note."""

    def _started(self, job: Job) -> None:
        """Nothing to note."""


NARROW = 0.75
"""Share of the slots that are in use where memory counts as the limit."""


class ShortLast(Arranged):
    """A free slot takes the next job in the order of arrival; the shortest are kept for the end, longest first.

    Longest first wins its steps at the very end, where short jobs fill the slots that are free while long ones are
    decoded. Before that the order does not matter to the slots, but it does to memory: all of the longest jobs at once
    hold the most KV tokens that there can be, and where those are limited they leave slots idle, while the short ones
    later leave memory idle. So this takes as many steps as longest first where memory is no limit and fewer where it
    is, holds fewer KV tokens, and has groups whole earlier. What is kept is measured in the tokens that all slots
    decode in the time of the longest job. Where that is all there is, this is longest first.

    Where memory refuses a job while a quarter of the slots or more are idle, only as many slots count from then on as
    are in use, and less is kept, until there are new jobs.

    Args:
        lengths: What is thought of the lengths; where they are not informative, the order is that of arrival.
        num_slots: Slots that are to be filled at the end.
        held_back: Tokens that are held back, relative to ``num_slots x longest``.
    """

    def __init__(self, lengths: Lengths, num_slots: int, held_back: float = 0.75) -> None:
        super().__init__(lengths)
        if not held_back >= 0:
            raise ValueError(f"held_back is {held_back}: give 0 for the order of arrival, or more, such as 0.75.")
        self._num_slots = num_slots
        self._width = num_slots  # slots that memory allows to be used
        self._num_active = 0
        self._held_back = held_back
        self._queue: list[Job] = []  # the next one last

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs that wait to be decoded."""
        super().add(jobs)
        self._width = self._num_slots

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out what was set aside, then the next ones as they are arranged."""
        admitted = super().admit(free_slots, fits)
        refused = len(admitted) < free_slots and len(self) > 0
        if refused and self._num_active <= NARROW * self._width:
            self._width = max(self._num_active, 1)
            self._arranged_for = None
        return admitted

    def set_aside(self, job: Job) -> None:
        """Let a job wait again, before all others."""
        super().set_aside(job)
        self._num_active -= 1

    def finish(self, job: Job, num_tokens: int) -> None:
        """Count a slot as free."""
        self._num_active -= 1

    def _started(self, job: Job) -> None:
        self._num_active += 1

    def _arrange(self, jobs: list[Job], estimates: np.ndarray | None) -> None:
        if estimates is None or not jobs:
            self._queue = jobs[::-1]
            return
        # Among equals the later arrival comes first here, and so waits longer.
        ascending = np.lexsort((-np.arange(len(jobs)), estimates))
        tokens = np.cumsum(estimates[ascending])
        limit = self._held_back * self._width * estimates.max()
        count = int(np.searchsorted(tokens, limit, side="right"))
        later, sooner = ascending[:count], np.sort(ascending[count:])
        self._queue = [jobs[number] for number in np.concatenate([later, sooner[::-1]]).tolist()]

    def _peek(self) -> Job:
        return self._queue[-1]

    def _take(self) -> None:
        self._queue.pop()
