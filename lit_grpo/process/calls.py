"""Calls of users' code, each with a time limit: rewards, tools, environments and agents.

Async functions run on one event loop of the process, sync ones in a bounded pool of threads.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from lit_grpo.process.loops import EventLoop
from lit_grpo.process.terminal import error_text

_T = TypeVar("_T")
_NOT_USERS = (str(Path(asyncio.__file__).parent), threading.__file__, str(Path(__file__).parents[1]))
_BLOCKED_S = 1.0  # that a free loop may take for nothing before it counts as blocked

logger = logging.getLogger(__name__)


class UsersLoop:
    """Runs users' coroutines on one event loop, from the first coroutine to the end of the process.

    An HTTP client or a lock that a user's module keeps is bound to the event loop that used it first. Validation,
    training and test, rewards and tools, and one run after another therefore share this loop. Only a function that
    blocks the loop, such as ``time.sleep`` in an async function, makes later coroutines run on a new one.
    """

    def __init__(self) -> None:
        self._loop = EventLoop("lit_grpo-async-calls")

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine, from any thread; the future gets its result."""
        return self._loop.begin(coroutine)

    async def replace_if_blocked(self) -> str:
        """Give later coroutines a new loop if a function blocks this one, and say so.

        Returns:
            The function that blocks the loop, as ``file.py:12 (name)``; an empty text if the loop is free.
        """
        loop = self._loop
        sign = asyncio.wrap_future(loop.begin(asyncio.sleep(0)))
        await asyncio.wait([sign], timeout=_BLOCKED_S)
        if sign.done():
            return ""
        where = _users_function(loop.thread_id)
        if loop is self._loop:
            self._loop = EventLoop("lit_grpo-async-calls")
            logger.warning(
                "An async function blocks the event loop at %s, so later async calls run on a new event loop, on which "
                "clients and locks of the old one fail. Await at this line, or make the function sync.",
                where,
            )
        return where


def _users_function(thread_id: int | None) -> str:
    """Return the outermost function of the user on a thread's stack."""
    frame = sys._current_frames().get(thread_id or 0)
    for each in traceback.extract_stack(frame) if frame is not None else ():
        if not each.filename.startswith((*_NOT_USERS, "<frozen")):
            return f"{Path(each.filename).name}:{each.lineno} ({each.name})"
    return "an unknown line"


USERS_LOOP = UsersLoop()
"""The only one of this process."""


MOST_LOST = 1000
"""So many calls may hang at a time, each in a thread that cannot be stopped, before the run ends."""
_END_S = 1.0  # that the loop may take to end


class CallTimeout(Exception):
    """A call has taken too long; it may go on, and its result is dropped."""


class TooManyHang(RuntimeError):
    """More calls hang than there may be threads for."""


class Calls:
    """Makes calls of users' code, each with a time limit.

    What waits for them is a coroutine on a loop of its own (:meth:`start`), on which no user's code runs: so it keeps
    its time whatever that code does.

    Args:
        num_threads: How many calls that are not async run at a time, and as many of those that are ``apart``.
    """

    def __init__(self, num_threads: int) -> None:
        self._keeper = EventLoop("lit_grpo-environments")
        self._free = {is_apart: asyncio.Semaphore(num_threads) for is_apart in (False, True)}
        self._ends: dict[object, float] = {}  # of calls that are being made
        self._idle: list[_CallThread] = []
        self._lost: set[_CallThread] = set()

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a coroutine that makes calls, from any thread."""
        return self._keeper.begin(coroutine)

    @property
    def is_in_time(self) -> bool:
        """Whether a call is being made that has time left; asked from any thread."""
        return any(end > time.monotonic() for end in list(self._ends.values()))

    @contextmanager
    def within(self, timeout_s: float | None) -> Iterator[None]:
        """Let :attr:`is_in_time` know of something that has so many seconds; without a limit of nothing."""
        mark = object()
        self._ends[mark] = time.monotonic() + (timeout_s or 0.0)
        try:
            yield
        finally:
            del self._ends[mark]

    def at_end(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Call ``close`` once all that was started has been cancelled."""
        self._keeper.at_end(close)

    async def call(
        self,
        function: Callable[[], Any],
        is_async: bool,
        timeout_s: float | None,
        took: Callable[[float], None],
        apart: bool = False,
    ) -> Any:
        """Make a call; ``took`` is told its seconds, without the wait for a thread.

        Calls that are ``apart`` do not wait for the threads of others.

        Without ``timeout_s`` it has the time that it takes, until its task is cancelled; it is then left alone as one
        that has taken too long.

        Raises:
            CallTimeout: It has taken too long.
            TooManyHang: So have too many others.
            BaseException: Whatever the function raised; a RuntimeError where that would end the loop (:func:`_raised`).
        """
        if is_async:
            return await self._timed(self._await(function, timeout_s), timeout_s, took)
        async with self._free[apart]:
            result = await self._timed(self._run(function, timeout_s), timeout_s, took)
        if inspect.isawaitable(result):  # of a sync function around an async one, such as a decorator's
            return await self._timed(self._await(lambda: result, timeout_s), timeout_s, took)
        return result

    async def at_once(self, function: Callable[[], Any], is_async: bool, timeout_s: float) -> Any:
        """Make a short call as :meth:`call` does, without waiting for a thread that others have."""
        return await (self._await if is_async else self._run)(function, timeout_s)

    async def _timed(
        self, call: Coroutine[Any, Any, Any], timeout_s: float | None, took: Callable[[float], None]
    ) -> Any:
        began = time.monotonic()
        try:
            with self.within(timeout_s):
                return await call
        finally:
            took(time.monotonic() - began)

    async def _run(self, function: Callable[[], Any], timeout_s: float | None) -> Any:
        self._check_lost()
        thread = self._idle.pop() if self._idle else _CallThread()
        outcome = thread.begin(function)
        try:
            await asyncio.wait([outcome], timeout=timeout_s)
        finally:
            if outcome.done():
                self._idle.append(thread)
            else:
                outcome.cancel()
                thread.end()
                self._lost.add(thread)
        if not outcome.cancelled():
            return outcome.result()
        raise CallTimeout

    def _check_lost(self) -> None:
        if len(self._lost) > MOST_LOST:
            self._lost = {each for each in self._lost if each.is_alive}
        if len(self._lost) > MOST_LOST:
            raise TooManyHang(
                f"{len(self._lost)} calls of environments or tools have taken longer than they may, and go on in "
                "threads that cannot be stopped; let them end by themselves."
            )

    async def _await(self, function: Callable[[], Any], timeout_s: float | None) -> Any:
        outcome = asyncio.wrap_future(USERS_LOOP.begin(_caught(function)))
        try:
            await asyncio.wait([outcome], timeout=timeout_s)
        except asyncio.CancelledError:
            outcome.cancel()
            raise
        if outcome.done():
            value, error = outcome.result()
            if error is not None:
                raise error
            return value
        outcome.cancel()
        await USERS_LOOP.replace_if_blocked()
        raise CallTimeout

    def stop(self) -> None:
        """Cancel what waits, and end the threads; one whose call goes on is left alone."""
        self._keeper.close(wait_s=_END_S)
        for thread in self._idle:
            thread.end()


async def _caught(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return await function(), None
    except BaseException as error:  # a user's function runs here: every error must reach the caller
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return None, _raised(readable(error))


def readable(error: BaseException) -> BaseException:
    """Return an error whose text can be printed; it is tried where the user's function was called."""
    try:
        str(error)
        return error
    except BaseException:  # its __str__ is a user's function
        return RuntimeError(f"{type(error).__name__}, whose text cannot be printed")


def _raised(error: BaseException) -> BaseException:
    """Return what a user's function has raised, as what a future may raise in the coroutine that waits for it.

    ``StopIteration`` is refused by futures; ``CancelledError`` and errors of users that are no ``Exception`` would end
    that coroutine in silence.
    """
    may = isinstance(error, Exception | SystemExit | KeyboardInterrupt | GeneratorExit)
    return error if may and not isinstance(error, StopIteration) else RuntimeError(error_text(error))


class _CallThread:
    """A daemon thread that makes one call after another."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lit_grpo-tool", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it has not come to its end."""
        return self._thread.is_alive()

    def begin(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Begin a call, from a coroutine."""
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._jobs.put((function, outcome))
        return outcome

    def end(self) -> None:
        """End after the call that is being made."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, outcome = job
            try:
                value, error = function(), None
            except BaseException as raised:  # a user's function runs here: every error must reach the caller
                value, error = None, readable(raised)
            with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                outcome.get_loop().call_soon_threadsafe(_settle, outcome, value, error)
            del job, function, outcome, value, error


def _settle(outcome: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(value)
    else:
        outcome.set_exception(_raised(error))
