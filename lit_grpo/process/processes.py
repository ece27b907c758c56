"""Functions that are called in processes of their own, so that one that crashes or never returns harms nobody else."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from lit_grpo.process.calls import CallResult, CallTimeout
from lit_grpo.process.terminal import error_text

_START = """
import pickle, sys
from multiprocessing.connection import Connection
link = Connection(int(sys.argv[1]))
sys.path[:] = pickle.loads(link.recv_bytes())
from lit_grpo.process.processes import answer
answer(link)
"""
_LOADING_S = 300.0  # that a process may take to load its function, or as long as a call where that is longer
_ENDING_S = 10.0  # that a process may take to end, once it does not answer any more


class ProcessEnded(RuntimeError):
    """A process has ended instead of answering.

    Attributes:
        code: Exit code of the process; negative if a signal ended it.
    """

    def __init__(self, code: int) -> None:
        by_signal = f"its process was ended by {signal.Signals(-code).name}" if code < 0 else ""
        super().__init__(by_signal or f"its process ended with code {code}")
        self.code = code


class TooMuchComputing(RuntimeError):
    """A call has used more CPU time than it may."""


class ProcessCall:
    """Calls a function in a process that has loaded it; each thread that calls at the same time has its own process.

    Arguments and values must be picklable. All processes end with this object, and with this process. The start of a
    process does not count in either limit. How much CPU time a call uses does not depend on what else the machine
    does, so ``cpu_s`` may decide a score, and ``timeout_s`` may not.

    Args:
        load: Returns the function, sync or async; it is pickled, and called in the process.
        timeout_s: The most seconds for one call; a process that takes longer is ended.
        cpu_s: The most seconds of CPU time for one call, of all threads of its process together; by default any number.
        recorded: Names of arguments that are functions of this process. Their calls are recorded, and made here once
            the function has returned.
    """

    def __init__(
        self,
        load: Callable[[], Callable[..., Any]],
        timeout_s: float | None,
        cpu_s: float = 0.0,
        recorded: Sequence[str] = (),
    ) -> None:
        self._load, self._timeout_s, self._cpu_s, self._recorded = pickle.dumps(load), timeout_s, cpu_s, recorded
        self._idle: list[_Process] = []
        self._running: set[_Process] = set()
        weakref.finalize(self, _end_all, self._running)

    def __call__(self, **arguments: Any) -> Any:
        """Make one call.

        Raises:
            CallTimeout: The call, or the start of its process, takes too long.
            TooMuchComputing: The call uses more than ``cpu_s``.
            ProcessEnded: The process ends.
            Exception: Any error of the function.
        """
        functions = {name: arguments.pop(name) for name in self._recorded if name in arguments}
        message = pickle.dumps((arguments, list(functions), self._cpu_s))
        try:
            process = self._idle.pop()
        except IndexError:
            process = _Process(self._running)
        try:
            if not process.has_loaded:
                process.load(self._load, None if self._timeout_s is None else max(self._timeout_s, _LOADING_S))
            result, calls = process.ask(message, self._timeout_s)
        except ProcessEnded as error:
            if error.code == -signal.SIGPROF and self._cpu_s:
                raise TooMuchComputing(f"it used more than {self._cpu_s:g} s of CPU time") from None
            raise
        except BaseException:
            process.end()
            raise
        self._idle.append(process)
        for name, values in calls:
            functions[name](*values)
        return result.unwrap()


class _Process:
    """A running process that answers; only one thread at a time uses it."""

    def __init__(self, running: set[_Process]) -> None:
        self.has_loaded = False
        self._link, its = Pipe()
        with its:
            # -P keeps files of the working directory from standing in for modules of Python.
            command = [sys.executable, "-P", "-c", _START, str(its.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()])
        self._running = running
        running.add(self)

    def load(self, load: bytes, timeout_s: float | None) -> None:
        """Have it load its function; a function that cannot be loaded raises the reason at each call."""
        self._send(pickle.dumps(sys.path))
        self.ask(load, timeout_s)
        self.has_loaded = True

    def ask(self, message: bytes, timeout_s: float | None) -> Any:
        """Return the answer to a message."""
        self._send(message)
        if not self._link.poll(timeout_s):
            raise CallTimeout.after(timeout_s)
        try:
            return pickle.loads(self._link.recv_bytes())
        except (EOFError, ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING_S)
            raise ProcessEnded(self.end()) from None

    def end(self) -> int:
        """End the process if it has not ended by itself; return what it ended with."""
        self._process.kill()
        self._running.discard(self)
        return self._process.wait()

    def _send(self, message: bytes) -> None:
        with suppress(ConnectionError):  # it has ended, as the missing answer will say
            self._link.send_bytes(message)


def _end_all(processes: set[_Process]) -> None:
    while processes:
        processes.pop().end()


def answer(link: Connection) -> None:
    """Load the function, and answer each call until the other process has ended."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it may be ignored by inheritance
    for ignored in (signal.SIGINT, signal.SIGTERM):  # meant for the other process, with which this one ends
        signal.signal(ignored, signal.SIG_IGN)
    with suppress(OSError):  # there may be no standard error
        os.dup2(2, 1)  # prints of the function do not mix with those of the run
    process, load = os.getpid(), link.recv_bytes()
    try:
        call = pickle.loads(load)()
    except Exception as error:  # the user's module and class run here, and may fail in any way
        call = functools.partial(_raise, error)
    link.send_bytes(pickle.dumps(None))
    runner = asyncio.Runner()  # one event loop for all calls, so that the function may keep a client
    while True:
        try:
            arguments, names, cpu_s = pickle.loads(link.recv_bytes())
        except (EOFError, ConnectionError):
            return
        calls: list[tuple[str, tuple[Any, ...]]] = []
        for name in names:
            arguments[name] = functools.partial(_record, calls, name)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # whose signal ends the process
        try:
            value = call(**arguments)
            result = CallResult(runner.run(value) if inspect.iscoroutine(value) else value)
        except Exception as error:  # a user's function runs here: every error must reach the caller
            result = CallResult(error=error)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if os.getpid() != process:  # the function has forked, and its child returned here as well
            os._exit(0)
        link.send_bytes(_pickled(result, calls))


def _raise(error: Exception, **_: Any) -> None:
    raise error


def _record(calls: list[tuple[str, tuple[Any, ...]]], name: str, *values: Any) -> None:
    calls.append((name, values))


def _pickled(result: CallResult, calls: list[tuple[str, tuple[Any, ...]]]) -> bytes:
    try:
        pickled = pickle.dumps((result, calls))
        pickle.loads(pickled)  # some errors can be pickled but not unpickled
        return pickled
    except Exception as error:  # an object that cannot be pickled may raise any error
        return pickle.dumps((CallResult(error=RuntimeError(error_text(result.error or error))), []))
