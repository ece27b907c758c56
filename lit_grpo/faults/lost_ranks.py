"""Lost ranks: when a rank is gone, the other ranks end with a message instead of waiting."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

LOOK_S = 0.2
_SEARCH_S = 10 * LOOK_S  # for a rank that is gone, after a collective has failed
_found: list[int] = []  # the ranks that are gone, of those that torchrun or a scheduler has started here


class Child(Protocol):
    """A process that this process has started."""

    returncode: int | None

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class RankWatch:
    """Ends this rank with a message when a rank that it started, or the rank that started it, is gone.

    Lightning's launcher looks for killed ranks every five seconds and ends the first rank without a message, so killed
    ranks are hidden from it during this watch. Ranks that the launcher has started would wait for the first rank until
    the time-out of their backend. torchrun and schedulers watch their ranks themselves; of theirs the one that is gone
    is looked for when a collective fails.

    Args:
        rank: The number of this rank.
        children: The ranks that it has started, in their order, from ``rank`` + 1 on.
        parent: The process id of the rank that started this one; None if no rank did.
        how_to_go_on: Returns the sentence that tells the user how to resume.
        peers: The process ids of other ranks on this machine, by their numbers.
    """

    def __init__(
        self,
        rank: int,
        children: Sequence[Child],
        parent: int | None,
        how_to_go_on: Callable[[], str],
        peers: Mapping[int, int] | None = None,
    ) -> None:
        self._peers = peers or {}
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
        if error is not None and lost_rank(error):
            if self._thread.is_alive():
                self._thread.join(_SEARCH_S)
            deadline = time.monotonic() + _SEARCH_S
            while not _found and self._peers and time.monotonic() < deadline:
                _found.extend(rank for rank, process in self._peers.items() if not _runs(process))
                time.sleep(LOOK_S / 4)
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


def _runs(process: int) -> bool:
    """Return whether a process has not ended; one whose end its parent has not seen yet has."""
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat")
        return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        return True


def lost_rank(error: BaseException) -> str:
    """Return a sentence that a rank is gone, if that is the cause of a collective's error; else an empty text."""
    said = str(error).strip().partition("\n")[0].partition(". ")[0]
    if isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in said):
        cause = re.sub(r"^\[[^]]*\] ?", "", said)  # without the line of gloo's source
        gone = f"Rank {' and rank '.join(map(str, _found))} is" if _found else "Another rank is"
        return f"{gone} gone, and this one cannot go on without it ({cause})."
    return ""
