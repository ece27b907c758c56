"""Two runs whose environments take other times: equal but for rounding, and bit for bit in lock-step."""

from __future__ import annotations

import json
import random
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import table_rows

import lit_grpo
from lit_grpo.checkpoints import read
from lit_grpo.environments.calls import ToolCall, Turn
from lit_grpo.environments.chat import Chat
from tests.doubles.conversations import chat_tokenizer, chatty_policy

ROWS = [{"prompt": f"Count {number}.", "number": number} for number in range(4)]
PLUGINS: dict[str, list[Any]] = {
    "alone": [],
    "eptree": [{"eptree": {"tokens": 2, "rounds": 2, "branches": 1}}],
    "treepo": [{"treepo": {"width": 4, "segment": 5}}],
    "trace": [{"trace": {"width": 4}}],
    "arpo": [{"arpo": {"width": 6}}],
    "april": ["april"],
}


class Sleeps:
    """Takes another time for each answer whenever it is asked."""

    clock = random.Random()

    def reset(self, number: int, **_: Any) -> str:
        self._sleep()
        self.counts = [number]
        return " Begin."

    def count(self, by: int) -> str:
        """Count.

        Args:
            by: How far.
        """
        self._sleep()
        self.counts.append(by)
        return str(sum(self.counts))

    def _sleep(self) -> None:
        time.sleep(self.clock.random() * 0.03)

    def get_reward(self) -> float:
        return float(sum(self.counts) % 5)

    def state(self) -> list[int]:
        return self.counts

    def restore(self, state: list[int]) -> None:
        self.counts = state


def read_as_calls(chat: Chat, token_ids: Any, before: Any, tools: Any) -> Turn:
    """Make a call of most turns of a random policy, which writes none."""
    number = zlib.crc32(repr(list(token_ids)).encode())
    return Turn("words") if number % 4 == 0 else Turn("", "", [ToolCall("count", {"by": number % 7})])


def train(plugins: list[Any], name: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Train for three updates; return the samples and the weights."""
    run = lit_grpo.train(
        "policy",
        ROWS,
        max_steps=3,
        batch_size=2,
        num_generations=3,
        sampling={"max_tokens": 40, "max_observed": 400},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        callbacks={"rollout": {"plugins": plugins}, "sample_logger": {"every_n_updates": 1}},
        trainer={"accelerator": "cpu", "enable_progress_bar": False},
        name=name,
    )
    weights = read(run.folder / "checkpoints/last.ckpt")["state_dict"]
    return (run.folder / "samples.jsonl").read_text(), weights


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chatty_policy(chat_tokenizer()).save_pretrained(tmp_path / "policy")
    chat_tokenizer().save_pretrained(tmp_path / "policy")
    monkeypatch.setattr(Chat, "read", read_as_calls)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", table_rows(PLUGINS, ["april"]))
def test_runs_in_lock_step_are_equal_bit_for_bit_in_every_mode(name: str) -> None:
    plugins = [{"environments": {"factory": Sleeps, "lock_step": True}}, *PLUGINS[name]]
    (samples, weights), (again, same) = train(plugins, "first"), train(plugins, "second")
    assert samples == again
    assert all(torch.equal(weight, same[key]) for key, weight in weights.items())


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["alone", "eptree", "treepo", "trace"])
def test_answers_in_another_order_change_nothing_but_rounding_where_a_rollout_waits_for_all(name: str) -> None:
    plugins = [{"environments": {"factory": Sleeps}}, *PLUGINS[name]]
    (samples, weights), (again, near) = train(plugins, "first"), train(plugins, "second")
    told = [[json.loads(line)["completion"] for line in each.strip().split("\n")] for each in (samples, again)]
    assert told[0] == told[1]
    assert all(torch.allclose(weight, near[key], atol=1e-5) for key, weight in weights.items())
