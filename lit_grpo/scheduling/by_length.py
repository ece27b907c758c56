"""Plans with one queue, sorted by length."""

from __future__ import annotations

import numpy as np

from lit_grpo.scheduling.arranged import Arranged
from lit_grpo.scheduling.jobs import Job, Lengths


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
