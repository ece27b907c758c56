"""Async calls on an event loop of their own, each with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from lit_grpo.rewards.loop_thread import LoopThread

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
