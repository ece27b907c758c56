"""The plan that goes by arrival and keeps the short completions for the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from lit_grpo.scheduling.arranged import Arranged
from lit_grpo.scheduling.first_come import anything_fits
from lit_grpo.scheduling.jobs import Job, Lengths

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
