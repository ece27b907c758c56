"""The process in which a reward function is called: see :class:`lit_grpo.rewards.processes.ProcessCall`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any

from lit_grpo.rewards.loading import error_text, load_object

Logged = tuple[str, tuple[Any, ...]]


def main() -> None:
    """Answer each call on the standard input until the input ends."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # meant for the trainer; when the trainer ends, the input ends
        signal.signal(ignored, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the function's own prints must not mix with the replies
    process, call = os.getpid(), _load(*pickle.load(sys.stdin.buffer))
    runner = asyncio.Runner()  # one event loop for all calls, so that the function may keep a client
    while True:
        try:
            arguments, loggers = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        logged: list[Logged] = []
        for name in loggers:
            arguments[name] = functools.partial(_log, logged, name)
        returned = _returned(call, arguments, runner)
        if os.getpid() != process:  # the function has forked, and its child returned here as well
            os._exit(0)
        replies.write(_pickled(returned, logged))
        replies.flush()


def _log(logged: list[Logged], name: str, *values: Any) -> None:
    logged.append((name, values))


def _load(path: str, args: dict[str, Any]) -> Callable[..., Any]:
    """Return the function; if it cannot be loaded, a function that raises the reason."""
    try:
        loaded = load_object(path)
        built: Any = loaded(**args) if inspect.isclass(loaded) else functools.partial(loaded, **args)
        return built
    except Exception as error:  # the user's class is built here, and may fail in any way
        return functools.partial(_raise, error)


def _raise(error: Exception, **_: Any) -> None:
    raise error


def _returned(call: Callable[..., Any], arguments: dict[str, Any], runner: asyncio.Runner) -> Any:
    """Return the value of a call, or the error that it raised."""
    try:
        returned = call(**arguments)
        return runner.run(returned) if inspect.iscoroutine(returned) else returned
    except Exception as error:  # a user's function runs here: every error must reach the caller
        return error


def _pickled(returned: Any, logged: list[Logged]) -> bytes:
    try:
        pickled = pickle.dumps((returned, logged))
        pickle.loads(pickled)  # some errors can be pickled but not unpickled
        return pickled
    except Exception as error:  # an object that cannot be pickled may raise any error
        told = returned if isinstance(returned, Exception) else error
        return pickle.dumps((RuntimeError(error_text(told)), []))
