"""Whoever gets a row's columns may change them: groups, validation, epochs and resumed runs have them as they were."""

from __future__ import annotations

import datetime
import threading
from pathlib import Path
from typing import Any

import pytest
from conversations import SAMPLING, call, chat_tokenizer, play, prompts_of

from lit_grpo.checkpoints import WholeFileIO, read
from lit_grpo.data.loaders import EvalLoader, PromptLoader
from lit_grpo.data.module import PromptDataModule
from lit_grpo.environments import Environments
from lit_grpo.environments.plugin import Trajectories
from lit_grpo.plugins import fresh
from lit_grpo.rewards import RewardFunction, RewardRunner
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.rules import ReleaseRule
from lit_grpo.types import Completion, Episode, Prompt, Request, Rollout, RolloutGroup, SamplingParams

ROW = {"prompt": "?", "board": [[0]]}


class Writes:
    """Begins with a board that it writes on, as its tools and reset do."""

    def reset(self, board: list[list[int]], **_: Any) -> str:
        self.board = board
        self.board[0].append(1)
        return f" {len(self.board[0])}"

    def add(self, items: list[int]) -> str:
        """Add.

        Args:
            items: What is added.
        """
        self.board[0] += items
        items.clear()
        return str(len(self.board[0]))

    def get_reward(self) -> float:
        return float(len(self.board[0]))


def worker_of(**fields: Any) -> Trajectories:
    worker = fresh(Environments(**fields))
    worker.prepare(chat_tokenizer(), {})
    return worker


def says(request: Request, turn: int) -> str:
    return call("add", items=[7, 8]) if turn == 0 else "I am done."


def test_each_reset_has_the_row_as_the_data_has_it() -> None:
    row = {"prompt": "?", "board": [[0]]}
    (group,) = play(worker_of(factory=Writes), says, [row], num_generations=4)
    assert [each.completion.episode.reward for each in group.rollouts] == [4.0] * 4  # pyrefly: ignore[missing-attribute]
    assert row == ROW


def test_a_conversation_keeps_the_arguments_that_the_policy_wrote() -> None:
    (group,) = play(worker_of(factory=Writes), says, [{"prompt": "?", "board": [[0]]}])
    (first, *_) = group.rollouts[0].completion.episode.messages  # pyrefly: ignore[missing-attribute]
    assert first["tool_calls"][0]["function"]["arguments"] == {"items": [7, 8]}


def conversation(num_rollouts: int) -> RolloutGroup:
    prompt = Prompt("train/0", (1,), "?", {"board": [[0]]}, messages=[{"role": "user", "content": "?"}])
    rollouts = []
    for sample in range(num_rollouts):
        completion = Completion(Request(prompt, (sample,), SamplingParams()), [1], [0.0], [0], "stop", "a")
        completion.episode = Episode(object(), [{"role": "assistant", "content": "a"}])
        rollouts.append(Rollout(prompt, completion))
    return RolloutGroup(prompt, rollouts)


def of_one(completion: str, board: list[list[int]], episode: Episode, completion_ids: list[int]) -> float:
    episode.messages.append({})
    board[0].append(1)
    completion_ids.append(1)
    return float(len(board[0]) + len(episode.messages) + len(completion_ids))


def of_group(completions: Any, prompts: Any, board: Any, episodes: Any, completion_ids: Any, **_: Any) -> list[float]:
    for each in (*completions, *prompts, *(episode.messages for episode in episodes), *completion_ids):
        each.append({})
    for each in board:
        each[0].append(1)
    columns = zip(completions, prompts, board, episodes, completion_ids, strict=True)
    return [float(len(a) + len(b) + len(c[0]) + len(d.messages) + len(e)) for a, b, c, d, e in columns]


async def of_one_async(completion: str, board: list[list[int]], episode: Episode, completion_ids: list[int]) -> float:
    return of_one(completion, board, episode, completion_ids)


async def of_group_async(**arguments: Any) -> list[float]:
    return of_group(**arguments)


of_group_async.__signature__ = __import__("inspect").signature(of_group)  # pyrefly: ignore[missing-attribute]


@pytest.mark.parametrize(
    ("function", "value"), [(of_one, 6.0), (of_group, 10.0), (of_one_async, 6.0), (of_group_async, 10.0)]
)
def test_each_call_of_a_reward_function_has_the_row_and_the_messages_as_they_are(function: Any, value: float) -> None:
    group = conversation(3)
    functions = [RewardFunction.of(function, name) for name in ("first", "second")]
    runner = RewardRunner(functions)
    for _ in range(2):
        runner.score(group)
        assert [rollout.rewards for rollout in group.rollouts] == [{"first": value, "second": value}] * 3
    runner.close()
    episode = group.rollouts[0].completion.episode
    assert group.prompt.columns == {"board": [[0]]} and group.prompt.messages == [{"role": "user", "content": "?"}]
    assert episode is not None and episode.messages == [{"role": "assistant", "content": "a"}]


def test_epochs_and_validations_have_rows_of_their_own() -> None:
    prompts = [Prompt(f"train/{n}", (n,), "?", {"board": [[n]]}, messages=[{"role": "user"}]) for n in range(2)]
    loader, held_out = PromptLoader(prompts, 2), EvalLoader(prompts, 2)
    state = loader.state_dict()
    for _ in range(2):
        for prompt in (*loader.draw(2), *next(iter(held_out)).prompts):
            number = int(prompt.prompt_id[-1])
            assert prompt.columns == {"board": [[number]]} and prompt.messages == [{"role": "user"}]
            prompt.columns["board"][0].append(1)
            prompt.messages.clear()
    assert loader.state_dict()["digest_of_prompts"] == state["digest_of_prompts"]


def test_the_digest_is_of_the_data_as_they_were_read() -> None:
    loader = PromptLoader([Prompt("train/0", (1,), "?", {"board": [[0]], "odd": {1: "a", "b": 2}})], 1)
    digest = loader.state_dict()["digest_of_prompts"]
    loader.prompts[0].columns["board"][0].append(1)
    assert loader.state_dict()["digest_of_prompts"] == digest


def data_of(rows: list[dict[str, Any]], tmp_path: Path) -> PromptDataModule:
    chat_tokenizer().save_pretrained(tmp_path)
    data = PromptDataModule(str(tmp_path), train=rows, batch_size=1)  # pyrefly: ignore[bad-argument-type]
    data.setup("fit")
    return data


def test_rows_that_share_a_value_have_it_apart(tmp_path: Path) -> None:
    board = [0]
    data = data_of([{"prompt": "a", "board": board}, {"prompt": "b", "board": board}], tmp_path)
    board.append(1)
    first, second = data.prompts["train"]
    assert first.columns["board"] == second.columns["board"] == [0]
    assert first.columns["board"] is not second.columns["board"]


def test_a_row_that_cannot_be_copied_is_refused_when_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"The column 'at' of row 0 of the list given holds a lock that cannot be copi"
    ):
        data_of([{"prompt": "a", "at": threading.Lock()}], tmp_path)


def test_columns_that_no_checkpoint_can_hold_come_from_the_data_again(tmp_path: Path) -> None:
    worker = worker_of(factory=Writes)
    (prompt,) = prompts_of(worker, [{"prompt": "?", "board": [[0]], "at": datetime.date(2020, 1, 1)}])
    buffer = RolloutBuffer(ReleaseRule(num_groups=1, leftovers="keep", max_staleness=9))
    buffer.open(group_requests([prompt], 1, SAMPLING, 0))
    WholeFileIO().save_checkpoint(buffer.state_dict(), tmp_path / "last.ckpt")
    buffer.load_state_dict(read(tmp_path / "last.ckpt"))
    (request,) = buffer.unfinished
    assert request.prompt.columns == {"prompt": "?", "board": [[0]]}
    buffer.give_columns([prompt])
    assert request.prompt.columns == prompt.columns and request.prompt.columns["board"] is not prompt.columns["board"]
    worker.close()
