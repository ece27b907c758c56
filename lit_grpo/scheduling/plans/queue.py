"""Plans with one queue: in the order of arrival, by length, or in rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from lit_grpo.scheduling.jobs import Job, Lengths
from lit_grpo.types import Key

Order = Callable[[np.ndarray, int], np.ndarray]
"""Orders jobs, the next one first: from the tokens expected of each, shape (jobs,), and the slots to be filled."""

NARROW = 0.75
"""Share of the slots that are in use where memory counts as the limit."""
HELD_BACK = 0.75
"""Tokens that :func:`short_last` keeps for the end, relative to ``slots x longest``."""


def shortest_first(estimates: np.ndarray, num_slots: int) -> np.ndarray:
    """Order that has the least mean completion time, and leaves the longest for the end (SJF)."""
    return np.argsort(estimates, kind="stable")


def longest_first(estimates: np.ndarray, num_slots: int) -> np.ndarray:
    """Order that ends at most 4/3 - 1/(3 slots) times as late as the best does, if they are true (LPT, Graham 1969)."""
    return np.argsort(-estimates, kind="stable")


def short_last(estimates: np.ndarray, num_slots: int) -> np.ndarray:
    """Order of arrival; but the shortest are kept for the end, longest first.

    Longest first wins its steps at the very end, where short jobs fill the slots that are free while long ones are
    decoded. Before that the order does not matter to the slots, but it does to memory: all of the longest jobs at once
    hold the most KV tokens that there can be, and where those are limited they leave slots idle, while the short ones
    later leave memory idle. So this takes as many steps as longest first where memory is no limit and fewer where it
    is, holds fewer KV tokens, and has groups whole earlier. What is kept is measured in the tokens that all slots
    decode in the time of the longest job. Where that is all there is, this is longest first.
    """
    # Among equals the later arrival comes first here, and so waits longer.
    ascending = np.lexsort((-np.arange(len(estimates)), estimates))
    limit = HELD_BACK * num_slots * estimates.max()
    count = int(np.searchsorted(np.cumsum(estimates[ascending]), limit, side="right"))
    return np.concatenate([np.sort(ascending[count:]), ascending[:count][::-1]])


def anything_fits(job: Job) -> bool:
    """Memory is no limit."""
    return True


class Queue:
    """Continuous sampling: a free slot takes the next job, whatever its group.

    A plan only orders: it never drops, splits or repeats a job.

    Jobs are put in order when there are new ones, and anew when ``lengths.revision`` changes: that costs one estimate
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
        self._first: list[Job] = []  # were set aside; the last one comes next
        self._queue: list[Job] = []  # the next one last
        self._arranged_for: tuple[int, bool] | None = None
        self._width = num_slots  # slots that memory allows to be used
        self._num_active = 0

    def __len__(self) -> int:
        """Return the number of jobs that wait."""
        return len(self._waiting) + len(self._first)

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs that wait to be decoded."""
        self._waiting.update((job.key, job) for job in jobs)
        self._arranged_for, self._width = None, self._num_slots

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out at most ``free_slots`` jobs: what was set aside, then the next ones in order.

        Each is offered to ``fits`` first, which answers whether there is memory for it beside those before it. The
        first that does not fit ends the admission, so that a large one is not passed over for ever.
        """
        admitted: list[Job] = []
        if free_slots < 1:
            return admitted
        self._arrange_if_changed()
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

    def set_aside(self, job: Job) -> None:
        """Let a job wait again, before all others."""
        self._first.append(job)
        self._num_active -= 1

    def finish(self, job: Job, num_tokens: int) -> None:
        """Count a slot as free; the lengths learn by themselves."""
        self._num_active -= 1

    def _narrow(self) -> None:
        if self._num_active <= NARROW * self._width:
            self._width, self._arranged_for = max(self._num_active, 1), None

    def _arrange_if_changed(self) -> None:
        now = (self._lengths.revision, self._lengths.informative)
        if now != self._arranged_for:
            self._arranged_for = now
            jobs = list(self._waiting.values())
            follows = jobs and self._lengths.informative
            self._arrange(jobs, np.maximum(self._lengths.estimate(jobs), 1.0) if follows else None)

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


class MicroRounds(Queue):
    """Naive micro groups: rounds in the order of arrival; a new one starts when the longest of the last is done.

    The baseline of Infinite Sampling (arXiv 2506.22950). No slot is refilled within a round, but in real decoding the
    rows that have finished are left out of the computation until it ends: later steps of a round are of fewer rows. So
    in time, though not in steps, it is a stronger baseline than a padded ``generate`` of each round, which computes
    all rows to the last step.
    """

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out the next round, or nothing where a job of the last one is unfinished."""
        return [] if self._num_active else super().admit(free_slots, fits)


class FullGroup(MicroRounds):
    """Everything at once, as ``generate`` on a whole batch does: a baseline whose memory grows with the group."""

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs; a ValueError where they are more than the slots."""
        super().add(jobs)
        if len(self) > self._num_slots:
            raise ValueError(
                f"The plan full_group decodes everything at once, and {len(self)} jobs wait for {self._num_slots} "
                f"slots: give it {len(self)} slots, or take another plan."
            )

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out everything; a ValueError where memory does not hold it."""
        begins, total = not self._num_active, len(self)
        admitted = super().admit(free_slots, fits)
        if begins and len(admitted) < min(total, free_slots):
            raise ValueError(
                f"The plan full_group decodes everything at once, and there is memory for {len(admitted)} of "
                f"{total} jobs: give it more, or take another plan."
            )
        return admitted
