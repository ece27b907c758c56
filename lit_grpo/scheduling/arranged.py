"""What all plans that follow lengths have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import numpy as np

from lit_grpo.scheduling.first_come import anything_fits
from lit_grpo.scheduling.jobs import Job, Key, Lengths


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
