"""A reward function in processes of its own."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

START = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from {module} import main; main()"
WORKER = "lit_grpo.rewards.process_worker"


class ProcessCall:
    """Calls what a path names in a process that has loaded it, one for each thread that calls at the same time.

    Args:
        path: What to load.
        args: Its arguments, as in :class:`lit_grpo.rewards.RewardSpec`.
        timeout_s: A process that takes longer for one call is ended.
    """

    def __init__(self, path: str, args: Mapping[str, Any], timeout_s: float | None) -> None:
        self._loads = (path, dict(args))
        self._timeout_s = timeout_s
        self._idle: list[_Process] = []
        weakref.finalize(self, _end_all, self._idle)

    def __call__(self, **arguments: Any) -> Any:
        """Make one call.

        Raises:
            TimeoutError: It takes too long.
            RuntimeError: Its process ends.
            Exception: Whatever the function raises.
        """
        loggers = {name: arguments.pop(name) for name in ("log_metric", "log_extra") if name in arguments}
        try:
            process = self._idle.pop()
        except IndexError:
            process = _Process(*self._loads)
        returned, logged = process.call(arguments, list(loggers), self._timeout_s)
        self._idle.append(process)
        for name, values in logged:
            loggers[name](*values)
        if isinstance(returned, Exception):
            raise returned
        return returned


class _Process:
    """A running ``process_worker.py``; for one thread at a time."""

    def __init__(self, *loads: Any) -> None:
        command = [sys.executable, "-c", START.format(module=WORKER)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(sys.path)
        self._send(loads)

    def call(self, arguments: dict[str, Any], loggers: list[str], timeout_s: float | None) -> Any:
        """Return what the function returned or raised, and what it logged."""
        assert self._process.stdout is not None
        overdue = threading.Event()
        timer = threading.Timer(timeout_s or 0.0, lambda: (overdue.set(), self._process.kill()))
        timer.daemon = True
        if timeout_s is not None:
            timer.start()
        try:
            self._send((arguments, loggers))
            return pickle.load(self._process.stdout)
        except EOFError:
            self.end()
        finally:
            timer.cancel()
        if overdue.is_set():
            raise TimeoutError(f"it took longer than {timeout_s:g} s")
        raise RuntimeError(f"its process ended with code {self._process.returncode}")

    def end(self) -> None:
        """End the process, where it has not ended by itself."""
        assert self._process.stdout is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        data = pickle.dumps(message)
        with contextlib.suppress(BrokenPipeError):  # that it has ended is told by the reply that does not come
            self._process.stdin.write(data)
            self._process.stdin.flush()


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()
