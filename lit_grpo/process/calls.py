"""The event loop on which users' async functions run: rewards, tools, environments and agents."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from lit_grpo.process.loops import EventLoop

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
