"""Runs with environments, tasks and tools of the packages themselves, by a random policy; skipped without them."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from test_environment_adapters import adding_server, sums_of_verifiers
from test_environments_in_training import logged, train

from lit_grpo.environments.adapters import SkyRL, Taskset, TextArena
from lit_grpo.environments.calls import ToolCall, Turn
from lit_grpo.environments.chat import Chat
from tests.doubles.conversations import chat_tokenizer, chatty_policy

SAYS: list[Turn] = []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A random policy whose turns stand for those of ``SAYS``, which it could not write."""
    chatty_policy(chat_tokenizer()).save_pretrained(tmp_path / "policy")
    chat_tokenizer().save_pretrained(tmp_path / "policy")

    def read(chat: Chat, token_ids: Any, before: Any, tools: Any) -> Turn:
        return SAYS[zlib.crc32(repr(list(token_ids)).encode()) % len(SAYS)]

    monkeypatch.setattr(Chat, "read", read)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "policy")


def check(rows: list[dict[str, str]], name: str, turns: float = 1) -> None:
    """Check that two steps were trained on rewards that differ, and nothing was dropped."""
    assert len(logged(rows, f"rewards/{name}/mean")) == 2 and logged(rows, f"val/rewards/{name}/mean")
    assert max(logged(rows, f"rewards/{name}/std")) > 0 and max(logged(rows, "grad_norm")) > 0
    assert logged(rows, "environments/dropped") == logged(rows, "environments/failures") == [0, 0]
    assert max(logged(rows, "environments/turns")) > turns


PROMPTS = [{"prompt": "Play.", "seed": number} for number in range(4)]


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_multi_turn"])
def test_skyrl_gym(name: str, folder: str) -> None:
    skyrl_gym = pytest.importorskip("skyrl_gym")

    class Gsm8k(SkyRL):
        def __init__(self) -> None:
            super().__init__(lambda row: skyrl_gym.make(name, extras=row))

    SAYS[:] = [Turn("#### 5"), Turn("#### 4"), Turn("I think.")]
    asked = {"prompt": "2+3?", "reward_spec": {"method": "rule", "ground_truth": "5"}, "extra_info": {"max_turns": 3}}
    rows = train(folder, [asked] * 4, [], factory=Gsm8k)
    check(rows, "Gsm8k", turns=0 if name == "gsm8k" else 1)


@pytest.mark.nightly
def test_textarena(folder: str) -> None:
    textarena = pytest.importorskip("textarena")

    class Guess(TextArena):
        def __init__(self) -> None:
            super().__init__(lambda: textarena.make("GuessTheNumber-v0"))

    SAYS[:] = [Turn(f"[{number}]") for number in range(1, 21)] + [Turn("Hm.")] * 4
    check(train(folder, PROMPTS, [], factory=Guess, max_observed=1000), "Guess")


def test_openenv(folder: str) -> None:
    SAYS[:] = [Turn("1"), Turn("2"), Turn("-1"), Turn("two")]
    with adding_server() as environment:
        check(train(folder, PROMPTS, [], factory=environment, max_turns=6), environment.__name__)


def test_verifiers_and_a_tool(folder: str) -> None:
    tasks = Taskset(sums_of_verifiers(), most=4)
    SAYS[:] = [*(Turn(str(number)) for number in range(1, 5)), Turn("", "", [ToolCall("double", {"n": 1})])]
    check(train(folder, list(tasks.rows()), [tasks.reward], tools=["test_environment_adapters.double"]), "reward")


CODES = ["print(2 + 3)", "1 / 0", "open('/etc/passwd').read()"]


def five(completions: Any, **_: Any) -> list[float]:
    """Whether the tool has said 5."""
    return [float({"role": "tool", "name": "python", "content": "5\n"} in each) for each in completions]


def test_the_python_tool(folder: str) -> None:
    pytest.importorskip("pydantic_monty")
    SAYS[:] = [Turn("words"), *(Turn("", "", [ToolCall("python", {"code": code})]) for code in CODES)]
    rows = train(folder, PROMPTS, [five], tools=["lit_grpo.environments.sandbox.python"])
    check(rows, "five")
    assert min(logged(rows, "environments/tool_calls")) > 0 and logged(rows, "environments/tool_failures") == [0, 0]
