"""A reward function that is called in separate processes."""

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
    """Calls a function in a process that has loaded it; each thread that calls at the same time has its own process.

    Args:
        path: The path of the function or class, as in :class:`lit_grpo.rewards.RewardSpec`.
        args: Its arguments.
        timeout_s: The most seconds for one call; a process that takes longer is ended.
    """

    def __init__(self, path: str, args: Mapping[str, Any], timeout_s: float | None) -> None:
        self._path, self._args = path, dict(args)
        self._timeout_s = timeout_s
        self._idle: list[_Process] = []
        weakref.finalize(self, _end_all, self._idle)

    def __call__(self, **arguments: Any) -> Any:
        """Make one call.

        Raises:
            TimeoutError: The call takes too long.
            RuntimeError: The process ends.
            Exception: Any error of the function.
        """
        loggers = {name: arguments.pop(name) for name in ("log_metric", "log_extra") if name in arguments}
        try:
            process = self._idle.pop()
        except IndexError:
            process = _Process(self._path, self._args)
        returned, logged = process.call(arguments, list(loggers), self._timeout_s)
        self._idle.append(process)
        for name, values in logged:
            loggers[name](*values)
        if isinstance(returned, Exception):
            raise returned
        return returned


class _Process:
    """A running ``process_worker.py``; only one thread at a time uses it."""

    def __init__(self, path: str, args: dict[str, Any]) -> None:
        command = [sys.executable, "-c", START.format(module=WORKER)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(sys.path)
        self._send((path, args))

    def call(self, arguments: dict[str, Any], loggers: list[str], timeout_s: float | None) -> Any:
        """Return the function's value or error, and what it logged."""
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
        """End the process if it has not ended by itself."""
        assert self._process.stdout is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        data = pickle.dumps(message)
        with contextlib.suppress(BrokenPipeError):  # call() finds out that the process has ended: no reply comes
            self._process.stdin.write(data)
            self._process.stdin.flush()


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()
