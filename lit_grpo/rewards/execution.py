"""Calls of reward functions, sync and async, in the background and each with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from lit_grpo.process.calls import USERS_LOOP

AsyncCall = Callable[[], Coroutine[Any, Any, Any]]


async def await_calls(calls: Sequence[AsyncCall], timeout_s: float | None) -> list[Any]:
    """Await all calls at once on the loop of users' coroutines; return their values, or the errors that they raised.

    A call that takes longer than ``timeout_s`` is cancelled and gives a ``TimeoutError``. Await this function on
    another loop, which watches the time even if a call blocks that loop: then all give a ``TimeoutError``.
    """
    future = asyncio.wrap_future(USERS_LOOP.begin(_outcomes(calls, timeout_s)))
    limit_s = None if timeout_s is None else 2 * timeout_s + 1
    try:
        if (await asyncio.wait([future], timeout=limit_s))[0]:
            return future.result()
    finally:
        future.cancel()
    where = await USERS_LOOP.replace_if_blocked() or "a line that has ended since"
    blocked = TimeoutError(f"an async function blocks the event loop at {where}; await in it, or make it sync")
    return [blocked] * len(calls)


async def _outcomes(calls: Sequence[AsyncCall], timeout_s: float | None) -> list[Any]:
    return await asyncio.gather(*(_outcome(call, timeout_s) for call in calls))


async def _outcome(call: AsyncCall, timeout_s: float | None) -> Any:
    """Return the value of a call, or the error that it raised, even if the call ignores its cancellation."""
    task = asyncio.ensure_future(_caught(call))
    try:
        if (await asyncio.wait([task], timeout=timeout_s))[0]:
            return task.result()
        return TimeoutError(f"it took longer than {timeout_s:g} s")
    finally:
        task.cancel()


async def _caught(call: AsyncCall) -> Any:
    try:
        return await call()
    except BaseException as error:  # a user's function runs here: its SystemExit would end the loop of all calls
        return error


Call = Callable[[], Any]
RAMP_S = 0.01
"""Seconds after which calls that are not done get one more thread; calls that take no time need only one."""


async def run_calls(
    calls: Sequence[Call], timeout_s: float | None, stop_on_error: bool, workers: asyncio.Semaphore, num_workers: int
) -> list[Any]:
    """Run calls on up to ``num_workers`` daemon threads, each of which holds one of ``workers``.

    A call that takes longer than ``timeout_s`` gives a ``TimeoutError``; a new thread makes the calls after it.

    Returns:
        The value of each call, or the error that it raised; with ``stop_on_error`` the list ends with the first error.
    """
    queue = CallQueue(calls, stop_on_error)

    async def work() -> None:
        async with workers:
            while queue.goes_on:
                await CallThread(queue, timeout_s).ended()

    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []
        while queue.goes_on and len(tasks) < num_workers:
            tasks.append(group.create_task(work()))
            await asyncio.wait(tasks, timeout=RAMP_S)
    return queue.outcomes()


class CallQueue:
    """Calls in their order, for any thread to take, and their outcomes."""

    def __init__(self, calls: Sequence[Call], stop_on_error: bool) -> None:
        self._calls = calls
        self._stop_on_error = stop_on_error
        self._lock = threading.Lock()
        self._num_taken = 0
        self._outcomes: dict[int, Any] = {}
        self._failed = False

    @property
    def goes_on(self) -> bool:
        """Whether there is a call to take."""
        return self._num_taken < len(self._calls) and not (self._failed and self._stop_on_error)

    def take(self) -> int | None:
        """Return the number of the next call, or None if none is left."""
        with self._lock:
            if not self.goes_on:
                return None
            self._num_taken += 1
            return self._num_taken - 1

    def run(self, number: int) -> Any:
        """Make a call; return its value, or the error that it raised."""
        return _outcome_of(self._calls[number])

    def put(self, number: int, outcome: Any) -> None:
        """Store the outcome of a call."""
        with self._lock:
            self._outcomes[number] = outcome
            self._failed |= isinstance(outcome, BaseException)

    def outcomes(self) -> list[Any]:
        """Return the outcomes in the order of the calls, up to the first error if an error stops the rest."""
        outcomes: list[Any] = []
        for number in sorted(self._outcomes):
            outcomes.append(self._outcomes[number])
            if self._stop_on_error and isinstance(outcomes[-1], BaseException):
                break
        return outcomes


class CallThread:
    """A daemon thread that makes the calls of a queue until one takes too long.

    A thread cannot be stopped from outside. A thread whose call takes too long is abandoned: it ends when its call
    returns, which may be never, and does not keep the interpreter from exiting.
    """

    def __init__(self, queue: CallQueue, timeout_s: float | None) -> None:
        self._queue = queue
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._number: int | None = None
        self._started_s = 0.0
        self._abandoned = False
        self._ended = asyncio.Event()

    async def ended(self) -> None:
        """Start the thread; wait until the queue is empty or a call takes too long."""
        self._started_s = time.monotonic()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="lit_grpo-reward", daemon=True).start()
        try:
            while not await self._ended_before_deadline():
                if self._abandon_if_overdue():
                    return
        finally:
            self._abandoned = True

    async def _ended_before_deadline(self) -> bool:
        left_s = None if self._timeout_s is None else self._started_s + self._timeout_s - time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._ended.wait()
        return self._ended.is_set()

    def _abandon_if_overdue(self) -> bool:
        with self._lock:
            overdue = self._timeout_s is not None and time.monotonic() >= self._started_s + self._timeout_s
            if overdue and self._number is not None:
                self._abandoned = True
                self._queue.put(self._number, TimeoutError(f"it took longer than {self._timeout_s:g} s"))
            return self._abandoned

    def _take(self) -> int | None:
        with self._lock:
            self._number = None if self._abandoned else self._queue.take()
            self._started_s = time.monotonic()
            return self._number

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        process = os.getpid()
        while (number := self._take()) is not None:
            outcome = self._queue.run(number)
            if os.getpid() != process:  # the function has forked, and its child returned here as well
                os._exit(0)
            with self._lock:
                if self._abandoned:
                    return
                self._queue.put(number, outcome)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
            loop.call_soon_threadsafe(self._ended.set)


def _outcome_of(call: Call) -> Any:
    try:
        return call()
    except BaseException as error:  # a user's function runs here: every error must reach the caller
        return error
