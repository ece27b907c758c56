"""Event loops in threads, and the one on which users' async functions run: rewards, tools, environments and agents."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")
_LOOKS_S = 1.0  # after so many seconds a loop notices closed descriptors, of which nothing else wakes it
_BROKEN: list[asyncio.AbstractEventLoop] = []  # never freed, which would close the files that now have their numbers
_CLOSED = (
    "A reward, tool, environment or agent closed file descriptors of the run ({}); have it close only what it has "
    "opened, without os.closerange and without a second os.close of one number."
)
_NOT_USERS = (str(Path(asyncio.__file__).parent), threading.__file__, str(Path(__file__).parents[1]))
_BLOCKED_S = 1.0  # that a free loop may take for nothing before it counts as blocked

logger = logging.getLogger(__name__)


class BrokenLoop(RuntimeError):
    """A user's function has closed the descriptors with which an event loop waits, so nothing on it can go on."""


class EventLoop:
    """Runs coroutines in a thread of its own, from the first coroutine until it is closed.

    The thread does not keep the interpreter alive. Where it is gone, as in a forked process, a new one takes its place.
    If a function closes the loop's descriptors, the futures of its coroutines raise a :class:`BrokenLoop`.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str = "lit_grpo-loop") -> None:
        self._name = name
        self._begins = threading.Lock()  # begin may be called from several threads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._begun: set[Future[Any]] = set()
        self._closes: list[Callable[[], Coroutine[Any, Any, None]]] = []

    @property
    def thread_id(self) -> int | None:
        """The identifier of the thread; None before the first coroutine."""
        return None if self._thread is None else self._thread.ident

    def at_end(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Call ``close`` when the thread ends, so that no connection stays open."""
        self._closes.append(close)

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine, from any thread; the future gets its result."""
        with self._begins:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._begun = set()
                arguments = self._loop, self._closes, self._begun
                self._thread = threading.Thread(target=self._run, args=arguments, name=self._name, daemon=True)
                self._thread.start()
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._begun.add(future)
            future.add_done_callback(self._begun.discard)
            return future

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine and wait for its result."""
        return self.begin(coroutine).result()

    def close(self, wait_s: float = 10.0) -> None:
        """Cancel what still runs, close what was opened, and end the thread; wait no longer than ``wait_s``."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        self._closes = []
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(wait_s)

    def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        closes: list[Callable[[], Coroutine[Any, Any, None]]],
        begun: set[Future[Any]],
    ) -> None:
        """Run the loop until it is stopped, or until its descriptors are closed."""
        asyncio.set_event_loop(loop)
        loop.call_soon(_look, loop)
        try:
            loop.run_forever()
            loop.run_until_complete(_end(closes))
            loop.close()
        except OSError as error:  # of the selector alone: a coroutine's errors are its future's
            _BROKEN.append(loop)
            with self._begins:
                if self._loop is loop:
                    self._loop = None
            for future in list(begun):
                with suppress(InvalidStateError):  # it was cancelled
                    future.set_exception(BrokenLoop(_CLOSED.format(error.strerror)))


def _look(loop: asyncio.AbstractEventLoop) -> None:
    loop.call_later(_LOOKS_S, _look, loop)


async def _end(closes: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Cancel the tasks of the loop, and close what was opened."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(close() for close in closes), return_exceptions=True)
    await asyncio.sleep(0)  # a transport closes one turn of the loop after it is told to


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
