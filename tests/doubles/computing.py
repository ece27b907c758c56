"""Functions that compute, wait and end, for processes of their own: the file imports nothing that takes long."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any


def burn(cpu_s: float) -> str:
    """Compute for so many seconds of this thread's CPU time."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass
    return "done"


def burn_beside(cpu_s: float) -> str:
    """Compute in another thread."""
    thread = threading.Thread(target=burn, args=(cpu_s,))
    thread.start()
    thread.join()
    return "done"


def wait(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


def end(code: int) -> None:
    signal.raise_signal(code)


class Starts:
    """Computes when it is made, for longer than a call may."""

    def __init__(self) -> None:
        burn(0.6)

    def __call__(self, cpu_s: float) -> str:
        return burn(cpu_s)


class Of:
    """Loads a function of this file."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self) -> Callable[..., Any]:
        return self.function
