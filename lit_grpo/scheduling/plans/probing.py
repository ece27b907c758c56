"""The probe: the first tokens of every job, before any goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from lit_grpo.scheduling.jobs import Followed, Job, Lengths, NoLengths
from lit_grpo.scheduling.plans.plan import make_plan
from lit_grpo.scheduling.plans.queue import Queue, anything_fits
from lit_grpo.types import GroupKey, Key


class Probing:
    """Decodes every job to its first tokens, in the order of arrival; then a plan decides what goes on.

    This is how Infinite Sampling (arXiv 2506.22950) can tell the completions of one prompt apart: nothing is known of
    them but what they have begun with. A job that has come so far gives up its slot (``park``), and waits for
    the plan once every other has been begun. The tokens are needed anyway, so all that the probe costs is taking jobs
    out of their slots and back.

    Args:
        plan: The name of the plan that orders what has been probed.
        lengths: What is thought of the lengths; the plan follows it.
        num_slots: Slots there are.
        num_tokens: The tokens at which a job is parked.
    """

    def __init__(self, plan: str, lengths: Lengths, num_slots: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._plan = make_plan(plan, Followed(lengths), num_slots)
        self._first = Queue(NoLengths(), num_slots)  # jobs that have not been begun
        self._probed: set[Key] = set()  # jobs that the plan has been given
        self._missing: Counter[GroupKey] = Counter()  # jobs that have not been parked and have not ended

    def __len__(self) -> int:
        """Return the number of jobs that wait."""
        return len(self._first) + len(self._plan)

    @property
    def all_begun(self) -> bool:
        """Whether the plan decides what is next."""
        return not len(self._first)

    def probes(self, group: GroupKey) -> bool:
        """Whether jobs of a group are still to be parked."""
        return self._missing[group] > 0

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs that wait to be decoded."""
        jobs = list(jobs)
        self._first.add(jobs)
        self._missing.update(job.group for job in jobs)

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out at most ``free_slots`` jobs: those to be begun, then the plan's."""
        admitted = self._first.admit(free_slots, fits)
        if self.all_begun:
            admitted += self._plan.admit(free_slots - len(admitted), fits)
        return admitted

    def park(self, job: Job) -> None:
        """A job has been probed: it waits for the plan."""
        self._first.finish(job, self.num_tokens)
        self._missing[job.group] -= 1
        self._probed.add(job.key)
        self._plan.add([job])

    def set_aside(self, job: Job) -> None:
        """Let a job wait again, before all others."""
        (self._plan if job.key in self._probed else self._first).set_aside(job)

    def finish(self, job: Job, num_tokens: int) -> None:
        """A job has come to its end."""
        if job.key in self._probed:
            self._plan.finish(job, num_tokens)
        else:
            self._first.finish(job, num_tokens)
            self._missing[job.group] -= 1
