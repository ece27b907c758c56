"""Plans that admit nothing before all of the last admission has finished: the baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lit_grpo.scheduling.jobs import Job
from lit_grpo.scheduling.plans.by_length import FirstCome, anything_fits
from lit_grpo.types import Key


class MicroRounds(FirstCome):
    """Naive micro groups: rounds in the order of arrival, each of which keeps its rows until its longest is done.

    The baseline of Infinite Sampling (arXiv 2506.22950).
    """

    def __init__(self) -> None:
        super().__init__()
        self._unfinished: set[Key] = set()

    def admit(self, free_slots: int, fits: Callable[[Job], bool] = anything_fits) -> list[Job]:
        """Hand out the next round, or nothing where a job of the last one is unfinished."""
        if self._unfinished:
            return []
        admitted = super().admit(free_slots, fits)
        self._unfinished = {job.key for job in admitted}
        return admitted

    def set_aside(self, job: Job) -> None:
        """Let a job wait for the next round, where it comes first."""
        super().set_aside(job)
        self._unfinished.discard(job.key)

    def finish(self, job: Job, num_tokens: int) -> None:
        """Strike a job off its round."""
        self._unfinished.discard(job.key)


class FullGroup(MicroRounds):
    """Everything at once, as ``generate`` on a whole batch does: the usual baseline; its memory grows with the group.

    Args:
        num_slots: Slots there are; as many jobs may wait.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self._num_slots = num_slots

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
        whole = not self._unfinished
        total = len(self)
        admitted = super().admit(free_slots, fits)
        if whole and len(admitted) < min(total, free_slots):
            raise ValueError(
                f"The plan full_group decodes everything at once, and there is memory for {len(admitted)} of "
                f"{total} jobs: give it more, or take another plan."
            )
        return admitted
