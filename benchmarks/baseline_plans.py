"""Plans to compare with, which no run should take: give them by class path, as ``benchmarks.baseline_plans.FixedSlot``.

They are the baselines of Infinite Sampling (arXiv 2506.22950), and everything at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lit_grpo.scheduling.jobs import Job, Lengths
from lit_grpo.scheduling.plans.plan import Plan, Queue, anything_fits
from lit_grpo.types import Key

FULL_GROUP = "benchmarks.baseline_plans.FullGroup"
MICRO_ROUNDS = "benchmarks.baseline_plans.MicroRounds"
FIXED_SLOT = "benchmarks.baseline_plans.FixedSlot"


@dataclass(frozen=True)
class MicroRounds(Plan):
    """Naive micro groups: rounds in the order of arrival; a new one starts when the longest of the last is done.

    No slot is refilled within a round, but in real decoding the rows that have finished are left out of the computation
    until it ends: later steps of a round are of fewer rows. So in time, though not in steps, it is a stronger baseline
    than a padded ``generate`` of each round, which computes all rows to the last step.
    """

    def queue(self, lengths: Lengths, num_slots: int) -> Queue:
        """Return a queue that hands out rounds."""
        return Rounds(lengths, num_slots)


@dataclass(frozen=True)
class FullGroup(Plan):
    """Everything at once, as ``generate`` on a whole batch does: its memory grows with the group."""

    def queue(self, lengths: Lengths, num_slots: int) -> Queue:
        """Return a queue that hands out everything, or refuses to."""
        return OneRound(lengths, num_slots)


@dataclass(frozen=True)
class FixedSlot(Plan):
    """Each slot has a list of its own, dealt out beforehand in the order of arrival; one that runs dry idles.

    The "fixed-slot" mode of Infinite Sampling as we read it: the text that we have does not define it.
    """

    def queue(self, lengths: Lengths, num_slots: int) -> Queue:
        """Return a list for each slot."""
        return Lists(lengths, num_slots)


class Rounds(Queue):
    """A queue in which nothing is handed out while a job is unfinished."""

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out the next round, or nothing where a job of the last one is unfinished."""
        return [] if self._num_active else super().admit(free_slots, fits)


class OneRound(Rounds):
    """A round of everything."""

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs; a ValueError where they are more than the slots."""
        super().add(jobs)
        if len(self) > self._num_slots:
            raise ValueError(
                f"The plan FullGroup decodes everything at once, and {len(self)} jobs wait for {self._num_slots} "
                f"slots: give it {len(self)} slots, or take another plan."
            )

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out everything; a ValueError where memory does not hold it."""
        begins, total = not self._num_active, len(self)
        admitted = super().admit(free_slots, fits)
        if begins and len(admitted) < min(total, free_slots):
            raise ValueError(
                f"The plan FullGroup decodes everything at once, and there is memory for {len(admitted)} of "
                f"{total} jobs: give it more, or take another plan."
            )
        return admitted


class Lists(Queue):
    """A list for each slot, to which jobs are dealt in turn; those of a later group go on where the last ended.

    No slot takes from another's list, and lengths play no part. What is put first goes back to the front of its slot's
    list, and slots that wait for it are filled first.

    Args:
        lengths: Not followed.
        num_slots: Lists that the jobs are dealt onto.
    """

    def __init__(self, lengths: Lengths, num_slots: int) -> None:
        super().__init__(lengths, num_slots)
        self._lists: list[deque[Job]] = [deque() for _ in range(num_slots)]
        self._num_dealt = 0
        self._idle = list(range(num_slots))
        self._slot_of: dict[Key, int] = {}  # of jobs that were handed out

    def __len__(self) -> int:
        """Return the number of jobs that wait."""
        return sum(map(len, self._lists))

    def add(self, jobs: Iterable[Job]) -> None:
        """Deal jobs; a ValueError where the first ones are fewer than the slots."""
        jobs = list(jobs)
        if jobs and self._num_dealt + len(jobs) < self._num_slots:
            raise ValueError(
                f"The plan FixedSlot deals {len(jobs)} jobs onto {self._num_slots} slots, of which some would never "
                f"decode: lower the number of slots to {len(jobs)}, or take another plan."
            )
        for job in jobs:
            self._lists[self._num_dealt % self._num_slots].append(job)
            self._num_dealt += 1

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out the next job of the list of each idle slot; the first that does not fit ends the admission."""
        admitted: list[Job] = []
        for slot in [slot for slot in self._idle if self._lists[slot]][:free_slots]:
            if not fits(self._lists[slot][0]):
                break
            job = self._lists[slot].popleft()
            self._idle.remove(slot)
            self._slot_of[job.key] = slot
            admitted.append(job)
        return admitted

    def put_first(self, job: Job) -> None:
        """Let a job wait again, before all others of its slot, which is filled before others if it is free."""
        slot = self._slot_of[job.key]
        self._lists[slot].appendleft(job)
        if slot in self._idle:
            self._idle.remove(slot)
            self._idle.insert(0, slot)

    def drop(self, job: Job) -> None:
        """Forget a job that waits, since it is wanted no more."""
        next(each for each in self._lists if job in each).remove(job)

    def left(self, job: Job) -> None:
        """Free the slot that the job was decoded in."""
        self._idle.append(self._slot_of[job.key])
