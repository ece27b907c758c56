"""Calls of users' code, each with a time limit: rewards, tools, environments and agents.

Async functions run on one event loop of the process (:data:`USERS_LOOP`), sync ones in a bounded pool of threads.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from lit_grpo.foreign import Visit, refuse_exits
from lit_grpo.process.terminal import error_text

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
                with suppress(InvalidStateError):  # it was canceled
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


_T = TypeVar("_T")
Function = Callable[[], Any]
MOST_LOST = 1000
"""So many calls may hang at a time, each in a thread that cannot be stopped, before the run ends."""
_RAMP_S = 0.01  # after which calls that are not done get one more thread; calls that take no time need only one
_END_S = 1.0  # that the loop may take to end
_STREAMS = {1: "stdout", 2: "stderr"}


class CallTimeout(TimeoutError):
    """A call has taken too long; it may go on, and its result is dropped.

    Attributes:
        cpu_s: Seconds of CPU time that the call had used, as far as they are known: of a call in a thread, on Linux.
    """

    cpu_s: float = 0.0

    @classmethod
    def after(cls, timeout_s: float | None, cpu_s: float = 0.0) -> CallTimeout:
        error = cls(f"it took longer than {timeout_s:g} s; make it faster, or raise its time limit")
        error.cpu_s = cpu_s
        return error


class TooManyHang(RuntimeError):
    """More calls hang than there may be threads for."""


class CallResult(NamedTuple):
    """The value that a function returned, or the error that it raised or that stands for its time limit."""

    value: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        """Return the value, or raise the error in the coroutine that waits for it.

        Futures refuse ``StopIteration``. ``CancelledError`` and errors of users that are no ``Exception`` would end
        that coroutine in silence. A ``RuntimeError`` is raised in place of each of these.
        """
        error = self.error
        if error is None:
            return self.value
        may = isinstance(error, Exception | SystemExit | KeyboardInterrupt | GeneratorExit)
        raise error if may and not isinstance(error, StopIteration) else RuntimeError(error_text(error))


class Calls:
    """Makes calls of users' code, each with a time limit.

    The coroutines that wait for calls run on an event loop of their own (:meth:`start`). No user's code runs on that
    loop, so the time limits hold whatever a user's function does.

    A thread cannot be stopped from outside. A thread whose call takes too long is abandoned: it ends when its call
    returns, which may be never, and does not keep the interpreter from exiting. It counts in :data:`MOST_LOST`.

    Args:
        num_threads: Number of threads for calls that are not async, and as many more for those that are ``apart``.
        of: Name of the called functions in messages.
        remedy: Remedy if too many calls hang, for messages.
    """

    def __init__(self, num_threads: int, of: str, remedy: str) -> None:
        self._stream_copies: dict[int, int] = {}
        for descriptor in _STREAMS:
            with suppress(OSError):  # a daemon has none
                self._stream_copies[descriptor] = os.dup(descriptor)
        self._num_threads = num_threads
        self._of, self._remedy = of, remedy
        refuse_exits()
        self._keeper = EventLoop("lit_grpo-calls")
        self._free = {is_apart: asyncio.Semaphore(num_threads) for is_apart in (False, True)}
        self._ends: dict[object, float] = {}  # of calls that are being made
        self._idle: list[_CallThread] = []
        self._lost: set[_CallThread] = set()

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a coroutine that makes calls, from any thread."""
        return self._keeper.begin(coroutine)

    @property
    def is_in_time(self) -> bool:
        """True if a call is being made that has time left; asked from any thread."""
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
        """Call ``close`` once all that was started has been canceled."""
        self._keeper.at_end(close)

    async def call(
        self,
        function: Function,
        is_async: bool,
        timeout_s: float | None,
        took: Callable[[float], None],
        owner: str,
        apart: bool = False,
    ) -> Any:
        """Make a call of ``owner``'s code; ``took`` is told its seconds, without the wait for a thread.

        Calls that are ``apart`` do not wait for the threads of others.

        Without ``timeout_s`` it has the time that it takes, until its task is canceled; it is then left alone as one
        that has taken too long.

        Raises:
            CallTimeout: It has taken too long.
            TooManyHang: So have too many others.
            BaseException: Whatever the function raised, or a RuntimeError (:meth:`CallResult.unwrap`).
        """
        if is_async:
            return await self._timed(self.at_once(function, True, timeout_s, owner), timeout_s, took)
        async with self._free[apart]:
            result = await self._timed(self.at_once(function, False, timeout_s, owner), timeout_s, took)
        if inspect.isawaitable(result):  # of a sync function around an async one, such as a decorator's
            return await self._timed(self.at_once(lambda: result, True, timeout_s, owner), timeout_s, took)
        return result

    async def at_once(self, function: Function, is_async: bool, timeout_s: float | None, owner: str) -> Any:
        """Make a short call as :meth:`call` does, without waiting for a thread that others have."""
        if is_async:
            (result,) = await self._await([function], timeout_s, owner)
            return result.unwrap()
        series = _Series([function], owner)
        await self._in_thread(series, timeout_s)
        return series.results[0].unwrap()

    async def call_all(
        self,
        functions: Sequence[Function],
        is_async: bool,
        timeout_s: float | None,
        owner: str,
        stop_on_error: bool = False,
    ) -> list[CallResult]:
        """Make calls, each with the same limit, and return their results in order; async ones all at a time.

        A thread takes one call after another, so that thousands of short calls cost little. A call that takes longer
        than ``timeout_s`` has a :class:`CallTimeout` as its result, and a new thread makes the calls after it.

        Args:
            functions: The functions to call, without arguments.
            is_async: Whether they are async functions.
            timeout_s: The most seconds of one call.
            owner: Whose functions they are, as in ``reward 'length'``.
            stop_on_error: Whether sync calls after an error are left out; the results then end with the first error.

        Raises:
            TooManyHang: Too many calls have taken too long.
            BrokenLoop: A function has closed the file descriptors of the loop.
        """
        if is_async:
            return await self._await(functions, timeout_s, owner)
        series = _Series(functions, owner, stop_on_error)
        tasks: list[asyncio.Task[None]] = []
        try:
            while series.is_left and len(tasks) < self._num_threads:
                tasks.append(asyncio.create_task(self._until_empty(series, timeout_s)))
                await asyncio.wait(tasks, timeout=_RAMP_S)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return series.in_order()

    async def _until_empty(self, series: _Series, timeout_s: float | None) -> None:
        async with self._free[False]:
            while series.is_left:
                await self._in_thread(series, timeout_s)

    async def _timed(
        self, call: Coroutine[Any, Any, Any], timeout_s: float | None, took: Callable[[float], None]
    ) -> Any:
        began = time.monotonic()
        try:
            with self.within(timeout_s):
                return await call
        finally:
            took(time.monotonic() - began)

    async def _in_thread(self, series: _Series, timeout_s: float | None) -> None:
        """Have a thread make the calls of a series, until none is left or one takes too long."""
        if len(self._lost) > MOST_LOST:
            self._lost = {each for each in self._lost if each.is_alive}
        if len(self._lost) > MOST_LOST:
            raise TooManyHang(
                f"{len(self._lost)} calls of {self._of} have taken longer than they may, and go on in threads that "
                f"cannot be stopped; {self._remedy}."
            )
        thread = self._idle.pop() if self._idle else _CallThread()
        ended = thread.begin(series)
        try:
            while not ended.done() and not thread.is_overdue(series, timeout_s):
                await asyncio.wait([ended], timeout=thread.left_s(timeout_s))
        finally:
            if ended.done():
                self._idle.append(thread)
            else:
                ended.cancel()
                thread.end()
                self._lost.add(thread)

    async def _await(self, functions: Sequence[Function], timeout_s: float | None, owner: str) -> list[CallResult]:
        """Await all functions at once on the loop of users' coroutines, and cancel those that take too long."""
        results: dict[int, CallResult] = {}
        ended = asyncio.wrap_future(USERS_LOOP.begin(_await_all(functions, results, owner)))
        try:
            is_late = not (await asyncio.wait([ended], timeout=timeout_s))[0]
        finally:
            ended.cancel()
        if not ended.cancelled():
            ended.result()  # raises what has broken the loop
        missing = CallResult(error=asyncio.CancelledError())  # a user's function may cancel the tasks of others
        if is_late and len(results) < len(functions):
            results = dict(results)  # what comes from now on is too late
            where = await USERS_LOOP.replace_if_blocked()
            blocked = f"an async function blocks the event loop at {where}; await in it, or make it sync"
            missing = CallResult(error=CallTimeout(blocked) if where else CallTimeout.after(timeout_s))
        return [results.get(number, missing) for number in range(len(functions))]

    def reopen_streams(self) -> list[str]:
        """Open ``sys.stdout``, ``sys.stderr`` and their file descriptors again if they were closed; return their names.

        A function of a user that calls ``sys.stdout.close()`` or ``os.close(1)``, as some libraries do, would otherwise
        end the run at its next line on the screen. What is written while they are closed is lost.
        """
        reopened: list[str] = []
        for descriptor, copy in self._stream_copies.items():
            name = _STREAMS[descriptor]
            stream = getattr(sys, name)
            is_gone = False
            try:
                os.fstat(descriptor)
            except OSError:
                is_gone = True
                with suppress(OSError):  # the copy is closed as well
                    os.dup2(copy, descriptor)
            if stream is not None and stream.closed:
                is_gone = True
                again = open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
                setattr(sys, name, again)
            reopened += [name] if is_gone else []
        return reopened

    def stop(self) -> None:
        """Cancel what waits, and end the threads; one whose call goes on is left alone."""
        self._keeper.close(wait_s=_END_S)
        for copy in self._stream_copies.values():
            with suppress(OSError):  # a function has closed it
                os.close(copy)
        self._stream_copies = {}
        for thread in self._idle:
            thread.end()


class _Series:
    """Calls in their order, for any thread to take, and their results by number; ``lock`` guards it."""

    def __init__(self, functions: Sequence[Function], owner: str, stop_on_error: bool = False) -> None:
        self.functions, self.owner = functions, owner
        self.results: dict[int, CallResult] = {}
        self.lock = threading.Lock()
        self._stop_on_error = stop_on_error
        self._num_taken = 0

    @property
    def is_left(self) -> bool:
        return self._num_taken < len(self.functions)

    def take(self) -> int | None:
        if not self.is_left:
            return None
        self._num_taken += 1
        return self._num_taken - 1

    def put(self, number: int, result: CallResult) -> None:
        self.results[number] = result
        if self._stop_on_error and result.error is not None:
            self._num_taken = len(self.functions)

    def in_order(self) -> list[CallResult]:
        """Return the results in the order of the calls, up to the first error if an error stops the rest."""
        results: list[CallResult] = []
        for number in sorted(self.results):
            results.append(self.results[number])
            if self._stop_on_error and results[-1].error is not None:
                break
        return results


class _CallThread:
    """A daemon thread that makes the calls of one series after another, until it is told to end."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[_Series, asyncio.Future[None]] | None] = SimpleQueue()
        self._number: int | None = None  # of the call that is being made
        self._visit: Visit | None = None  # that call
        self._began_s = self._cpu_began_s = 0.0
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._work, name="lit_grpo-call", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def begin(self, series: _Series) -> asyncio.Future[None]:
        """Begin to make calls, from a coroutine; the future is done when none is left."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._began_s = time.monotonic()
        self._jobs.put((series, ended))
        return ended

    def left_s(self, timeout_s: float | None) -> float | None:
        """Return the seconds after which the call that is being made may be overdue."""
        return None if timeout_s is None else max(self._began_s + timeout_s - time.monotonic(), 0.001)

    def is_overdue(self, series: _Series, timeout_s: float | None) -> bool:
        """Return whether the call that is being made has taken too long; it then has that as its result."""
        if timeout_s is None or time.monotonic() < self._began_s + timeout_s:
            return False
        with series.lock:
            if self._number is None or time.monotonic() < self._began_s + timeout_s:
                return False
            series.put(self._number, CallResult(error=CallTimeout.after(timeout_s, self._cpu_s())))
            self._is_abandoned = True
            if self._visit is not None:
                self._visit.abandon()
            return True

    def _cpu_s(self) -> float:
        """Return the seconds of CPU time of the call that is being made; 0 where the system does not say them."""
        if self._thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident)) - self._cpu_began_s

    def end(self) -> None:
        self._is_abandoned = True
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            series, ended = job
            self._make_calls(series)
            with suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                ended.get_loop().call_soon_threadsafe(_settle, ended)
            del job, series, ended

    def _make_calls(self, series: _Series) -> None:
        process, result = os.getpid(), None
        while True:
            with series.lock:
                if self._is_abandoned:
                    return
                if self._number is not None and result is not None:
                    series.put(self._number, result)
                self._number, self._began_s = series.take(), time.monotonic()
                self._cpu_began_s = time.thread_time()
                if self._number is None:
                    return
                visit = self._visit = Visit(series.owner)
            with visit:
                result = _made(series.functions[self._number])
                if os.getpid() != process:  # the function has forked, and its child returned here as well
                    os._exit(0)


def _settle(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _made(function: Function) -> CallResult:
    try:
        return CallResult(function())
    except BaseException as error:  # a user's function runs here: every error must reach the caller
        return CallResult(error=_readable(error))


async def _await_all(functions: Sequence[Function], results: dict[int, CallResult], owner: str) -> None:
    """Await functions at once, on the loop of users' coroutines; write their results by number."""

    async def awaited(number: int, function: Function) -> None:
        process = os.getpid()
        with Visit(owner):
            try:
                result = CallResult(await function())
            except BaseException as error:  # a user's function runs here: every error must reach the caller
                result = CallResult(error=_readable(error))
            if os.getpid() != process:  # the function has forked, and its child returned here as well
                os._exit(0)
        results[number] = result

    if len(functions) == 1:  # an environment's: without a task of its own
        await awaited(0, functions[0])
    else:
        await asyncio.gather(*(awaited(number, function) for number, function in enumerate(functions)))


def _readable(error: BaseException) -> BaseException:
    """Return an error whose text can be printed; it is tried where the user's function was called."""
    try:
        str(error)
        return error
    except BaseException:  # its __str__ is a user's function
        return RuntimeError(f"{type(error).__name__}, whose text cannot be printed")
