"""The watch over the requests to a server: who is told what after how long, and when a server is given up.

Time is the event loop's own, which passes at once.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lit_grpo.rollout.vllm import http
from lit_grpo.rollout.vllm.http import ServerError, Watch

URL, NEVER = "http://one", 1e9
FRONT, ENGINE, GENERATE = "/health", "/is_paused", "/inference/v1/generate"


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time passes when nothing is left to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # pyrefly: ignore[missing-attribute]
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()  # pyrefly: ignore[missing-attribute]


@dataclass
class Script:
    """A server: when its tokens come, and from when to when its front end and its engine do not answer, in seconds.

    With ``steps`` the engine answers when a token comes, and not before. ``gone`` is when it begins to refuse
    connections, and ``ill`` when it begins to say that it is not well.
    """

    tokens: Sequence[float] = ()
    front: tuple[float, float] = (NEVER, NEVER)
    engine: tuple[float, float] = (NEVER, NEVER)
    steps: bool = False
    gone: float = NEVER
    ill: float = NEVER


class Course:
    """What a watch says and does, in seconds since the beginning.

    Args:
        script: The server.
        last: Whether no other server is up.
    """

    def __init__(self, loop: Loop, script: Script, last: bool = False) -> None:
        self.loop, self.script, self.began = loop, script, loop.now
        self.watch = Watch(URL, 60.0, self.ask)
        self.watch.is_last = lambda: last
        self.told: list[tuple[float, str]] = []
        self.num_asked = 0

    @property
    def at(self) -> float:
        """The time."""
        return self.loop.now - self.began

    async def until(self, moment: float) -> None:
        """Let time pass."""
        await asyncio.sleep(max(moment - self.at, 0.0))

    async def ask(self, path: str) -> httpx.Response:
        """Answer as the script has it."""
        self.num_asked += 1
        await asyncio.sleep(0.01)
        if self.at >= self.script.gone:
            raise ServerError("no", "away")
        silent = [self.script.front] if path == FRONT else [self.script.front, self.script.engine]
        for begins, ends in silent:
            if begins <= self.at < ends:
                await self.until(ends)
        if path == ENGINE and self.script.steps:
            await self.until(min((moment for moment in self.script.tokens if moment > self.at), default=NEVER))
        return httpx.Response(503 if self.at >= self.script.ill else 200)

    async def completion(self) -> None:
        """Give the tokens, and then nothing."""
        for moment in self.script.tokens:
            await self.until(moment)
            self.watch.moves()
        await self.until(NEVER)

    def run(self, *requests: Coroutine[Any, Any, Any], seconds: float = 1000.0) -> tuple[float, list[Any]]:
        """Wait for requests, at most so long; return when they ended, and with what (``None`` for no end)."""

        async def both() -> list[Any]:
            tasks = [asyncio.ensure_future(request) for request in requests]
            done, _ = await asyncio.wait(tasks, timeout=seconds)
            ended = self.at
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return [ended, [task.exception() or task.result() if task in done else None for task in tasks]]

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            show = warnings.showwarning

            def note(message: Any, *others: Any, **more: Any) -> None:
                self.told.append((self.at, str(message)))

            warnings.showwarning = note
            ended, results = self.loop.run_until_complete(both())
            warnings.showwarning = show
        assert not said
        return ended, results


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop = Loop()
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: loop.now))
    yield loop
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0.0))
    loop.close()


def completions(course: Course, number: int = 2) -> list[Coroutine[Any, Any, None]]:
    """Requests for completions, of which the first gets the tokens."""
    first = course.watch.over(course.completion(), GENERATE)
    return [first, *(course.watch.over(course.until(NEVER), GENERATE) for _ in range(number - 1))]


SILENT = (3.0, NEVER)
FAULTS: dict[str, tuple[Script, bool, float, list[float], str]] = {
    # the server, whether it is the last, when it is given up, when the user is told before, and why
    "its front end is silent": (Script([1, 2, 3], front=SILENT), False, 11.0, [8.0], "it does not answer"),
    "its engine is silent": (
        *(Script([1, 2, 3], engine=SILENT), False, 11.0, [8.0]),
        "it answers, but its engine does not",
    ),
    "nothing ever came": (Script(engine=(0.0, NEVER)), False, 8.0, [5.0], "but its engine does not"),
    "it refuses connections": (Script([1, 2, 3], gone=3.0), False, 5.0, [], "is gone: it refuses connections"),
    "it says that it is not well": (Script([1, 2, 3], ill=3.0), False, 5.0, [], "is gone: it says that it is not well"),
    "it is well, and stands still": (
        *(Script([1, 2, 3]), False, 63.0, [8.0, 13.0, 23.0, 43.0]),
        "and it says that it is well",
    ),
    "the last one's engine is silent": (
        *(Script([1, 2, 3], engine=SILENT), True, 63.0, [8.0, 13.0, 23.0, 43.0]),
        "it answers, but its engine does not",
    ),
    "the last one refuses connections": (Script([1, 2, 3], gone=3.0), True, 5.0, [], "it refuses connections"),
    "its engine falls silent later": (Script([1], engine=(30.0, NEVER)), False, 38.5, [6.0, 11.0, 21.0], "engine does"),
    "after a step of 7 s": (
        Script([7, 14], steps=True),
        False,
        35.0,
        [5.0, 12.0, 19.0, 24.0, 34.0],
        "its engine does",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_server_is_told_of_in_time_and_given_up(name: str, loop: Loop) -> None:
    script, last, ends, told, why = FAULTS[name]
    course = Course(loop, script, last)
    ended, failures = course.run(*completions(course))
    assert all(isinstance(failure, ServerError) and failure.kind == "hung" for failure in failures)
    assert why in str(failures[0]) and str(failures[0]).startswith(f"The vLLM server at {URL} ")
    assert ends - 1.0 <= ended <= ends + 1.0
    told_at = [moment for moment, _ in course.told]
    for moment, expected in zip(told_at, told, strict=True):
        assert expected <= moment <= expected + 2.0
    then = "No other server is well, so the run waits" if last else "and the run goes on with the other servers."
    assert all(text.startswith(f"Waiting for the vLLM server at {URL}: none of its 2 c") for _, text in course.told)
    assert all(then in text for _, text in course.told)


WELL: dict[str, Script] = {
    "a drip": Script(range(0, 900, 4), engine=(0.0, NEVER)),
    "a long step after others": Script([6, *range(22, 900, 16)], steps=True),
    "quick ones": Script([moment / 10 for moment in range(9000)]),
}


@pytest.mark.parametrize("name", WELL)
def test_a_server_whose_tokens_come_is_waited_for(name: str, loop: Loop) -> None:
    course = Course(loop, WELL[name])
    _, results = course.run(*completions(course), seconds=850.0)
    assert results == [None, None]
    if name != "a long step after others":
        assert not course.told
    if name == "quick ones":
        assert not course.num_asked  # it costs the server nothing


def test_a_server_that_was_only_slow_has_more_time_when_it_is_back_and_another_process_has_not(loop: Loop) -> None:
    course = Course(loop, Script(engine=(0.0, NEVER)))
    lasted: list[float] = []
    for _ in range(3):
        before = course.at
        ended, _ = course.run(*completions(course))
        lasted.append(ended - before)
    assert lasted == pytest.approx([8.0, 24.0, 60.0], abs=1.0) and course.watch.patience_s == 60.0
    for has_tokens, expected_s in ((False, 20.0), (True, 8.0)):  # the first step of a process may be its longest
        course.watch.forget()
        course.watch.moves(has_tokens)
        before = course.at
        ended, _ = course.run(*completions(course))
        assert ended - before == pytest.approx(expected_s, abs=1.0)


def test_a_server_that_is_the_last_for_a_while_is_left_out_once_another_is_up(loop: Loop) -> None:
    course = Course(loop, Script(engine=(0.0, NEVER)))
    course.watch.is_last = lambda: course.at < 20.0
    ended, _ = course.run(*completions(course))
    assert 20.0 <= ended <= 21.0


def test_of_servers_that_are_all_silent_none_is_left_out_early(loop: Loop) -> None:
    """Their steps may be long, and nobody could go on in their place; the first that answers makes the other late."""
    slow, hung = Course(loop, Script([20.0], steps=True)), Course(loop, Script(engine=(0.0, NEVER)))
    slow.watch.is_last, hung.watch.is_last = lambda: hung.watch.is_silent, lambda: slow.watch.is_silent
    ended: dict[Course, float] = {}

    async def noting(course: Course) -> None:
        try:
            await course.watch.over(course.completion() if course is slow else course.until(NEVER), GENERATE)
        except ServerError:
            ended[course] = course.at

    slow.run(noting(slow), noting(hung), seconds=25.0)
    assert list(ended) == [hung] and 20.0 <= ended[hung] <= 22.0
    assert all("No other server is well" in text for at, text in slow.told if at < 20.0)


Work = Callable[[Course, float], Coroutine[Any, Any, Any]]
WORK: dict[str, tuple[Script, list[float], bool, float]] = {
    # the server, the seconds that it worked before, whether it is the last, and when it is given up
    "for the first time": (Script(engine=(0.0, NEVER)), [], False, 300.0),
    "that was quick before": (Script(engine=(0.0, NEVER)), [1.0], False, 20.0),
    "that took long before": (Script(engine=(0.0, NEVER)), [10.0, 20.0, 5.0], False, 60.0),
    "of the last one": (Script(engine=(0.0, NEVER)), [1.0], True, 300.0),
    "without a front end": (Script(front=(0.0, NEVER)), [], False, 20.0),
}


@pytest.mark.parametrize("name", WORK)
def test_work_on_weights_has_the_time_that_it_took_before(name: str, loop: Loop) -> None:
    script, before, last, limit = WORK[name]
    course = Course(loop, script, last)
    for seconds in before:
        _, results = course.run(course.watch.over(asyncio.sleep(seconds, "done"), "reload", asks=(FRONT,)))
        assert results == ["done"]
    began = course.at
    ended, (failure,) = course.run(course.watch.over(course.until(NEVER), "reload", asks=(FRONT,)))
    assert isinstance(failure, ServerError) and "reload has not been answered" in str(failure)
    assert ended - began == pytest.approx(limit, abs=1.0)


def test_nobody_is_asked_of_a_server_that_has_not_shown_its_guard(loop: Loop) -> None:
    course = Course(loop, Script())
    ended, (failure,) = course.run(course.watch.over(course.until(NEVER), "/owner", asks=()))
    assert 60.0 <= ended <= 61.0 and "nothing else is known of it" in str(failure)
    assert course.num_asked == 0 and len(course.told) == 4


def test_seconds_without_an_answer_are_known_until_one_comes(loop: Loop) -> None:
    course = Course(loop, Script(engine=(0.0, 50.0)))
    course.run(*completions(course))
    assert course.watch.lost_s == pytest.approx(8.0, abs=1.0)
    course.run(asyncio.sleep(50.0))
    assert course.watch.lost_s == pytest.approx(58.0, abs=1.0)
    course.run(course.watch.over(course.ask(ENGINE), "whether it is well"))
    assert course.watch.lost_s == 0.0


def test_a_request_that_is_withdrawn_is_watched_no_more(loop: Loop) -> None:
    course = Course(loop, Script(front=(0.0, NEVER)))
    _, results = course.run(*completions(course), seconds=6.0)
    assert results == [None, None] and len(course.told) == 1
    course.run(asyncio.sleep(100.0))
    assert len(course.told) == 1 and course.watch.lost_s == 0.0
