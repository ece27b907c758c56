"""Which functions and methods are tools, which are refused before a run, and what is said of one that never works."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conversations import call, only
from test_environments import add, play, worker_of
from test_reward_runner import make_group

from lit_grpo.environments.contract import make_kinds
from lit_grpo.environments.tools import Tool
from lit_grpo.findings.rewards import Finding
from lit_grpo.process.signals import sets_signals
from lit_grpo.process.values import find_foreign
from lit_grpo.rewards import RewardFunction, RewardRunner, RewardSpec
from lit_grpo.rewards.function import load_rewards


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Base:
    def inherited(self, text: str) -> str:
        """Say it.

        Args:
            text: A text.
        """
        return f"{type(self).__name__} {text}"


class Words(Base):
    def reset(self, **row: Any) -> None:
        self.lookup = {"key": "value"}

    @staticmethod
    def join(text: str, times: int = 2) -> str:
        """Repeat.

        Args:
            text: A text.
            times: How often.
        """
        return text * times

    @classmethod
    def kind(cls, text: str) -> str:
        """Name the class.

        Args:
            text: A text.
        """
        return f"{cls.__name__} {text}"

    def find(self, text: str, end: str = "") -> str:
        """Look up.

        Args:
            text: A key.
            end: What follows.
        """
        return self.lookup.get(text, "nothing") + end

    loud = functools.partialmethod(find, end="!")
    search = find

    @logged
    async def later(self, text: str) -> str:
        """Say it later.

        Args:
            text: A text.
        """
        return f"later {text}"

    @functools.lru_cache  # noqa: B019
    def cached(self, text: str) -> str:
        """Say it once.

        Args:
            text: A text.
        """
        return f"cached {text}"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("join", "keykey"),
        ("kind", "Words key"),
        ("find", "value"),
        ("loud", "value!"),
        ("search", "value"),
        ("inherited", "Words key"),
        ("later", "later key"),
        ("cached", "cached key"),
    ],
)
def test_every_kind_of_method_is_a_tool_that_works(name: str, answer: str) -> None:
    worker = worker_of(Words)
    schema = worker.kinds[None].tools[name].schema["function"]
    assert schema["name"] == name and schema["parameters"]["required"] == ["text"]
    assert schema["parameters"]["properties"]["text"]["type"] == "string"
    episode = only(play(worker, lambda _, turn: "Done." if turn else call(name, text="key"), [{"prompt": "?"}])).episode
    assert episode is not None and episode.messages[1]["content"] == answer


def test_a_method_that_cannot_be_called_is_refused() -> None:
    class NoSelf:
        def reset(self) -> None: ...

        def join(text: str) -> str:  # pyrefly: ignore[invalid-annotation]
            """Join.

            Args:
                text: A text.
            """
            return text

    class Property:
        def reset(self) -> None: ...

        @property
        def join(self) -> Callable[[str], str]:
            return str

    with pytest.raises(ValueError, match=r"NoSelf.join is a method and takes no self: its first parameter is 'text'"):
        make_kinds(NoSelf, [])
    with pytest.raises(ValueError, match=r"Property.join is a property that returns a function, and only methods"):
        make_kinds(Property, [])


def test_a_callable_object_of_a_class_is_named_as_no_tool(caplog: pytest.LogCaptureFixture) -> None:
    class Holds(Words):
        client = functools.partial(len)

        class Options: ...

    with caplog.at_level(logging.WARNING):
        assert {"client", "Options"}.isdisjoint(make_kinds(Holds, [])[None].tools)
    assert "Holds.client is a callable object and no method, so the policy cannot call it" in caplog.text
    assert "Options" not in caplog.text


def test_a_tool_that_yields_is_refused() -> None:
    def pages(text: str) -> Iterator[str]:
        """Yield.

        Args:
            text: A text.
        """
        yield text

    async def stream(text: str) -> AsyncIterator[str]:
        """Yield.

        Args:
            text: A text.
        """
        yield text

    for function in (pages, stream):
        with pytest.raises(ValueError, match="cannot be a tool, because it yields its answer; return the answer"):
            Tool.of(function)


# ---- signals ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """As TRL's example ``grpo_agent`` has it."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def alarmed(key: str) -> str:
    """Look up.

    Args:
        key: A key.
    """
    with limit(5):
        return f"found {key}"


class Alarm:
    def __enter__(self) -> None:
        from signal import ITIMER_REAL, setitimer

        setitimer(ITIMER_REAL, 1.0)

    def __exit__(self, *_: Any) -> None: ...


class Alarmed(Words):
    def reset(self, **row: Any) -> None:
        with Alarm():
            super().reset(**row)


def guarded(key: str) -> str:
    try:
        signal.alarm(5)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    except ValueError:
        return "in a thread"
    return key


def test_functions_that_set_signals_are_refused_before_the_run() -> None:
    why = "sets a signal or an alarm in limit, which Python allows in the main thread only, and it is called in other"
    with pytest.raises(ValueError, match=f"the tool alarmed {why} threads; leave it out, because tool_timeout_s"):
        worker_of(tools=[alarmed])
    with pytest.raises(ValueError, match="environment Alarmed sets a signal or an alarm in __enter__, which"):
        worker_of(Alarmed)
    with pytest.raises(ValueError, match=f"reward function 'score' {why} threads; leave it out, or give it as a path"):
        load_rewards([_score()])
    assert sets_signals(guarded) is None  # it looks itself
    assert sets_signals(functools.partial(logged(alarmed), key="a")) == "limit"


def _score() -> Callable[..., float]:
    def score(completion: str) -> float:
        return float(len(alarmed(completion)))

    return score


def test_a_reward_with_an_alarm_works_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import signal\ndef score(completion):\n    signal.alarm(5)\n    signal.alarm(0)\n    return 1.0\n"
    )
    path = f"{tmp_path / 'judge.py'}:score"
    with pytest.raises(ValueError, match="leave it out, or set process: true for the reward"):
        load_rewards([path])
    runner, group = RewardRunner([RewardFunction.load(RewardSpec(path, process=True), 20.0)]), make_group("a")
    runner.score(group)
    runner.close()
    assert group.rollouts[0].rewards == {"score": 1.0}


# ---- tools that never work ----------------------------------------------------------------------------


def lookup(key: str) -> str:
    """Look up.

    Args:
        key: A key.
    """
    raise KeyError("no such table")


def test_a_tool_whose_every_call_fails_is_named_once_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    worker = worker_of(tools=[lookup, add])
    says = lambda _, turn: call("lookup", key="a") + call("add", first=1, second=2) if turn < 3 else "Done."  # noqa: E731
    with caplog.at_level(logging.WARNING):
        play(worker, says, [{"prompt": "?"}])
    sentence = (
        "All 3 calls of the tool `lookup` failed, 3 of them with \"KeyError: 'no such table'\". Mend the tool, or tell "
        "the policy in the prompt or the docstring how to call it."
    )
    assert worker.findings() == [Finding("tool lookup", "failed", sentence)]
    assert [each.message for each in caplog.records if "tool `" in each.message] == [sentence]
    metrics = worker.metrics()
    assert [metrics[f"environments/{name}/lookup"] for name in ("calls", "failed_calls")] == [3.0, 3.0]
    assert [metrics[f"environments/{name}/add"] for name in ("calls", "failed_calls")] == [3.0, 0.0]


def test_a_resumed_run_goes_on_counting_the_calls_of_tools() -> None:
    worker = worker_of(tools=[lookup])
    for num_calls, num_findings in ((2, 0), (1, 1), (0, 1)):
        says = lambda _, turn, most=num_calls: call("lookup", key="a") if turn < most else "Done."  # noqa: E731
        play(worker, says, [{"prompt": "?"}])
        assert len(worker.findings()) == num_findings
        state = worker.state_dict()
        assert find_foreign(state) is None
        worker = worker_of(tools=[lookup])
        worker.load_state_dict(state)
    assert worker.findings()[0].sentence.startswith('All 3 calls of the tool `lookup` failed, 3 of them with "KeyErr')
