"""Plans: which completion is decoded next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lit_grpo.types import Completion, Request


class Plan(Protocol):
    """Answers what is admitted now, told what has happened so far.

    A plan only orders: it never drops, splits or repeats a request.
    """

    def add(self, requests: Iterable[Request]) -> None:
        """Take requests that wait to be decoded."""
        ...

    def admit(self, free_slots: int) -> list[Request]:
        """Hand out at most ``free_slots`` of the waiting requests, to be decoded from now on."""
        ...

    def finish(self, completion: Completion) -> None:
        """Learn that a request has finished, and how long its completion is."""
        ...

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        ...


class FirstCome:
    """Continuous sampling in the order of arrival: a free slot takes the next request, whatever its group."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()

    def add(self, requests: Iterable[Request]) -> None:
        """Take requests that wait to be decoded."""
        self._waiting.extend(requests)

    def admit(self, free_slots: int) -> list[Request]:
        """Hand out the requests that have waited longest."""
        return [self._waiting.popleft() for _ in range(min(free_slots, len(self._waiting)))]

    def finish(self, completion: Completion) -> None:
        """Nothing to learn: the order is fixed."""

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return len(self._waiting)
