"""The plan that knows nothing of lengths."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from lit_grpo.scheduling.jobs import Job


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
