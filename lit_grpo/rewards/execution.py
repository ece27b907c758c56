"""Calls of reward functions beside the rollout, sync and async, each with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """A daemon thread that runs an event loop until :meth:`stop`; it does not keep the interpreter alive."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start ``coroutine`` on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self, wait_s: float = 1.0) -> None:
        """Cancel what runs and end the thread; one that does not end within ``wait_s`` is left behind."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(wait_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_others())
        self._loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


AsyncCall = Callable[[], Coroutine[Any, Any, Any]]


async def await_calls(thread: LoopThread, calls: Sequence[AsyncCall], timeout_s: float | None) -> list[Any]:
    """Await all calls at once on the loop of ``thread``; return what each returned, or the error it raised.

    A call that takes longer than ``timeout_s`` is a ``TimeoutError`` and is cancelled. Await this on another
    loop, which keeps time even if a call blocks the loop of ``thread``: then all are a ``TimeoutError``.
    """
    future = asyncio.wrap_future(thread.submit(_outcomes(calls, timeout_s)))
    limit_s = None if timeout_s is None else 2 * timeout_s + 1
    if (await asyncio.wait([future], timeout=limit_s))[0]:
        return future.result()
    future.cancel()
    blocked = TimeoutError("an async reward function blocks its event loop; await in it, or make it sync")
    return [blocked] * len(calls)


async def _outcomes(calls: Sequence[AsyncCall], timeout_s: float | None) -> list[Any]:
    return await asyncio.gather(*(_outcome(call, timeout_s) for call in calls))


async def _outcome(call: AsyncCall, timeout_s: float | None) -> Any:
    """What ``call`` returned, or the error it raised; it cannot hold this up by ignoring its cancellation."""
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
    except BaseException as error:  # a user's function runs here: its SystemExit would end the loop for all
        return error


Call = Callable[[], Any]


async def run_calls(calls: Sequence[Call], timeout_s: float | None, stop_on_error: bool) -> list[Any]:
    """Run calls one after another on a daemon thread; return what each returned, or the error it raised.

    A call that takes longer than ``timeout_s`` is a ``TimeoutError``; those behind it go on in a new thread.
    With ``stop_on_error`` the first error is the last outcome.
    """
    outcomes: list[Any] = []
    while len(outcomes) < len(calls):
        outcomes += await CallThread(calls[len(outcomes) :], timeout_s, stop_on_error).outcomes()
        if stop_on_error and isinstance(outcomes[-1], BaseException):
            break
    return outcomes


class CallThread:
    """A daemon thread that works through calls until one is overdue.

    A thread cannot be stopped from outside, so one whose call is overdue is abandoned: it ends when its call
    returns, which may be never. It does not keep the interpreter from exiting.
    """

    def __init__(self, calls: Sequence[Call], timeout_s: float | None, stop_on_error: bool) -> None:
        self._calls = calls
        self._timeout_s = timeout_s
        self._stop_on_error = stop_on_error
        self._lock = threading.Lock()
        self._outcomes: list[Any] = []
        self._started_s: float = 0.0
        self._abandoned = False
        self._ended = asyncio.Event()

    async def outcomes(self) -> list[Any]:
        """Start the thread; return one outcome a call, up to a call that is overdue or the first error."""
        self._started_s = time.monotonic()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="lit_grpo-reward", daemon=True).start()
        try:
            while not await self._ended_before_deadline():
                if self._abandon_if_overdue():
                    return [*self._outcomes, TimeoutError(f"it took longer than {self._timeout_s:g} s")]
            return self._outcomes
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
            self._abandoned = overdue and not self._is_through()
            return self._abandoned

    def _is_through(self) -> bool:
        failed = bool(self._outcomes) and isinstance(self._outcomes[-1], BaseException)
        return len(self._outcomes) == len(self._calls) or (failed and self._stop_on_error)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._started_s = time.monotonic()
        for call in self._calls:
            outcome = _outcome_of(call)
            with self._lock:
                if self._abandoned:
                    return
                self._outcomes.append(outcome)
                self._started_s = time.monotonic()
                if self._is_through():
                    break
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._ended.set)


def _outcome_of(call: Call) -> Any:
    try:
        return call()
    except BaseException as error:  # a user's function runs here: whatever it raises must reach who waits
        return error
