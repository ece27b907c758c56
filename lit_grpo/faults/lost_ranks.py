"""Lost ranks: when a rank is gone, the other ranks end with a message instead of waiting."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

LOOK_S = 0.2


class Child(Protocol):
    """A process that this process has started."""

    returncode: int | None

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        ...

    def kill(self) -> None:
        """End the process."""
        ...


class RankWatch:
    """Ends this rank with a message when a rank that it started, or the rank that started it, is gone.

    Lightning's launcher looks for killed ranks every five seconds and ends the first rank without a message, so killed
    ranks are hidden from it during this watch. Ranks that the launcher has started would wait for the first rank until
    the time-out of their backend. torchrun and schedulers watch their ranks themselves.

    Args:
        rank: The number of this rank.
        children: The ranks that it has started, in their order, from ``rank`` + 1 on.
        parent: The process id of the rank that started this one; None if no rank did.
        how_to_go_on: Returns the sentence that tells the user how to resume.
    """

    def __init__(
        self, rank: int, children: Sequence[Child], parent: int | None, how_to_go_on: Callable[[], str]
    ) -> None:
        self._rank, self._children, self._parent = rank, children, parent
        self._how_to_go_on = how_to_go_on
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="lit_grpo-ranks")
        for observer in threading.enumerate():
            if observer.name == "child-process-observer" and children:  # Lightning's thread; it has no public handle
                vars(observer)["_child_processes"] = [_Hidden(child, self._over) for child in children]
        if children or parent is not None:
            self._thread.start()

    def end(self, error: BaseException | None = None) -> None:
        """Stop watching; if a lost rank may be the cause of ``error``, first take some time to find out which."""
        if error is not None and lost_rank(error) and self._thread.is_alive():
            self._thread.join(10 * LOOK_S)
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            if gone := self._gone():
                print(f"\nerror: {gone}, and the others cannot go on. {self._how_to_go_on()}", file=sys.stderr)
                sys.stderr.flush()
                for child in self._children:
                    child.kill()
                os._exit(1)

    def _gone(self) -> str:
        """Say which rank is gone, and why; empty if none is, or if the rank ended by itself with its own message."""
        for rank, child in enumerate(self._children, self._rank + 1):
            if (child.poll() or 0) < 0:
                return f"Rank {rank} is gone, ended by {signal.Signals(-(child.poll() or 0)).name}"
        if self._parent is not None and os.getppid() != self._parent:
            return "Rank 0 is gone"
        return ""


class _Hidden:
    """A child that seems to run after it was killed, until the watch is ``over``."""

    def __init__(self, child: Child, over: threading.Event) -> None:
        self._child, self._over = child, over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    @property
    def returncode(self) -> int | None:
        code = self._child.returncode
        return code if self._over.is_set() or (code or 0) >= 0 else None


def lost_rank(error: BaseException) -> str:
    """Return a sentence that a rank is gone, if that is the cause of a collective's error; else an empty text."""
    said = str(error).strip().partition("\n")[0].partition(". ")[0]
    if isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in said):
        cause = re.sub(r"^\[[^]]*\] ?", "", said)  # without the line of gloo's source
        return f"Another rank is gone, and this one cannot go on without it ({cause})."
    return ""
