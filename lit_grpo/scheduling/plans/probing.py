"""Probes and time slices: all completions come to some tokens before any goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from lit_grpo.scheduling.jobs import Followed, Job, Lengths, NoLengths
from lit_grpo.scheduling.plans.plan import make_plan
from lit_grpo.scheduling.plans.queue import Queue, anything_fits
from lit_grpo.types import GroupKey, Key


class Probing:
    """Decodes all jobs to the first of some ``points`` before any goes on to the next, and to its end after the last.

    A job that has come to a point gives up its slot (``park``). Those that have not been begun are begun in the order
    of arrival; among those that wait at a point, the plan chooses. With one point this is the probe of Infinite
    Sampling (arXiv 2506.22950), which tells the completions of one prompt apart: nothing else is known of them but what
    they have begun with. With many it shares the slots evenly, as an operating system does among processes whose times
    nobody knows ("least attained service": Nuyens and Wierman 2008, "The foreground-background queue"): whatever is
    known of lengths, no completion is begun when the others are nearly done, so that less is left to wait for at the
    end. The tokens are needed anyway; what it costs is taking jobs out of their slots and back.

    Args:
        plan: As in :func:`lit_grpo.scheduling.plans.make_plan`.
        lengths: What is thought of the lengths; the plan follows it.
        num_slots: Slots there are.
        points: Numbers of tokens, ascending.
    """

    def __init__(self, plan: str, lengths: Lengths, num_slots: int, points: Sequence[int]) -> None:
        self.points = tuple(points)
        plans = [make_plan(plan, Followed(lengths), num_slots) for _ in points]
        self._stages = [Queue(NoLengths(), num_slots), *plans]
        self._stage_of: dict[Key, int] = {}  # that the job waits or is decoded in
        self._unparked: Counter[GroupKey] = Counter()  # jobs that may come to another point

    def __len__(self) -> int:
        """Return the number of jobs that wait."""
        return sum(map(len, self._stages))

    @property
    def all_begun(self) -> bool:
        """Whether lengths are asked for next."""
        return not len(self._stages[0])

    def parks(self, group: GroupKey) -> bool:
        """Whether jobs of a group may come to another point, and wait again."""
        return self._unparked[group] > 0

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs that wait to be begun."""
        jobs = list(jobs)
        self._stages[0].add(jobs)
        self._stage_of |= {job.key: 0 for job in jobs}
        self._unparked.update(job.group for job in jobs)

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out at most ``free_slots`` jobs, those that have come least far first."""
        admitted: list[Job] = []
        for stage in self._stages:
            admitted += stage.admit(free_slots - len(admitted), fits)
            if len(stage):
                break
        return admitted

    def stops(self, point: int) -> bool:
        """Whether a job that has come to a point may have to wait there: whether others wait that are not beyond it."""
        return any(map(len, self._stages[: self.points.index(point) + 2]))

    def park(self, job: Job, point: int) -> None:
        """A job has come to a point, and waits there."""
        stage = self.points.index(point) + 1
        self._stages[self._stage_of[job.key]].finish(job, point)
        self._stages[stage].add([job])
        self._stage_of[job.key] = stage
        if stage == len(self.points):
            self._unparked[job.group] -= 1

    def set_aside(self, job: Job) -> None:
        """Let a job wait again, before all others that have come as far."""
        self._stages[self._stage_of[job.key]].set_aside(job)

    def drop(self, job: Job) -> None:
        """Forget a job that waits, since it is wanted no more."""
        stage = self._stage_of[job.key]
        self._stages[stage].drop(job)
        self._unparked[job.group] -= stage < len(self.points)

    def come_back(self, job: Job) -> None:
        """Let a job that has given up its slot wait again, before all others that have come as far."""
        stage = self._stage_of[job.key]
        self._stages[stage].come_back(job)
        self._unparked[job.group] += stage < len(self.points)

    def finish(self, job: Job, num_tokens: int) -> None:
        """A job has come to its end, or is away."""
        stage = self._stage_of[job.key]
        self._stages[stage].finish(job, num_tokens)
        if stage < len(self.points):
            self._unparked[job.group] -= 1
