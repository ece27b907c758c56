"""Runs with environments in the shape of TRL's public examples, unchanged, by a random policy."""

from __future__ import annotations

import json
import os
import random
import re
import sqlite3
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import read_metrics, table_rows
from test_environments import Guess, play, worker_of
from torch import distributed
from torch.multiprocessing.spawn import spawn

import lit_grpo
from lit_grpo.environments.calls import ToolCall, Turn
from lit_grpo.environments.chat import Chat
from lit_grpo.plugins import CannotGoOn
from lit_grpo.ranks import Ranks
from lit_grpo.tasks import Catch
from lit_grpo.tools.commands.doctor import main as doctor
from lit_grpo.tools.dashboard.report import read_folder
from lit_grpo.tools.dashboard.report.content import report_content
from tests.doubles.conversations import chat_tokenizer, chatty_policy

SIZE = 4


class Game2048:
    """As in TRL's ``grpo_2048``: a board in text, a tool that moves, an error once the game is over."""

    def reset(self, **kwargs: Any) -> str:
        """Begin."""
        self._rng = random.Random(0)
        self.board = [[0] * SIZE for _ in range(SIZE)]
        self.score, self.over = 0, False
        self._spawn()
        self._spawn()
        return self._text()

    def move(self, direction: str) -> str:
        """Slide the tiles.

        Args:
            direction: One of up, down, left, right.
        """
        if self.over:
            raise ValueError("Game over.")
        turned = [list(row) for row in self.board]
        for _ in range(["left", "up", "right", "down"].index(direction)):
            turned = [list(row) for row in zip(*turned, strict=True)][::-1]
        turned = [self._merged(row) for row in turned]
        for _ in range(-["left", "up", "right", "down"].index(direction) % 4):
            turned = [list(row) for row in zip(*turned, strict=True)][::-1]
        if turned == self.board:
            raise ValueError("Nothing moves.")
        self.board = turned
        self._spawn()
        return self._text()

    def get_reward(self) -> float:
        return float(self.score)

    def _merged(self, row: Sequence[int]) -> list[int]:
        tiles = [tile for tile in row if tile]
        merged: list[int] = []
        while tiles:
            tile = tiles.pop(0)
            if tiles and tiles[0] == tile:
                tile += tiles.pop(0)
                self.score += tile
            merged.append(tile)
        return merged + [0] * (SIZE - len(merged))

    def _spawn(self) -> None:
        free = [(row, column) for row in range(SIZE) for column in range(SIZE) if not self.board[row][column]]
        row, column = self._rng.choice(free)
        self.board[row][column] = 2
        self.over = len(free) == 1

    def _text(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.board)


def query(sql_command: str) -> str:
    """Run a query, as in TRL's ``grpo_agent``.

    Args:
        sql_command: The query.
    """
    with sqlite3.connect(":memory:") as database:
        database.execute("create table genes (name text, number integer)")
        database.execute("insert into genes values ('A', 1)")
        return str(database.execute(sql_command).fetchall())


def structured(completions: Any, **kwargs: Any) -> list[float]:
    """As rewards of that example read conversations."""
    return [float(sum(message["role"] == "tool" for message in each)) for each in completions]


GAMES = [{"prompt": "Play.", "seed": number} for number in range(4)]
MOVES = [{"direction": each} for each in ("left", "right", "up", "down", "stay")]
ARGUMENTS = {
    **{"move": MOVES, "paddle": MOVES, "slide": MOVES},
    "query": [{"sql_command": each} for each in ("select * from genes", "select nothing")],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A random policy whose turns stand for calls, which it could not write."""
    chatty_policy(chat_tokenizer()).save_pretrained(tmp_path / "policy")
    chat_tokenizer().save_pretrained(tmp_path / "policy")

    def read(chat: Chat, token_ids: Any, before: Any, tools: Any) -> Turn:
        number = zlib.crc32(repr(list(token_ids)).encode())
        if not tools or number % 4 == 0:
            return Turn("words")
        name = list(tools)[number % len(tools)]
        return Turn("", "", [ToolCall(name, ARGUMENTS[name][number // 4 % len(ARGUMENTS[name])])])

    monkeypatch.setattr(Chat, "read", read)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "policy")


def train(
    folder: str,
    rows: list[dict[str, Any]],
    rewards: Any,
    *further: str,
    max_steps: int = 2,
    max_observed: int = 400,
    **environments: Any,
) -> list[dict[str, str]]:
    run = lit_grpo.train(
        folder,
        rows,
        rewards,
        max_steps=max_steps,
        batch_size=2,
        num_generations=3,
        validation=rows[:2],
        sampling={"max_tokens": 60, "max_observed": max_observed},
        callbacks={"rollout": {"plugins": [{"environments": environments}, *further]}},
        trainer={"accelerator": "cpu", "val_check_interval": 2, "enable_progress_bar": False},
    )
    return read_metrics(run.folder / "metrics.csv")


def logged(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


@pytest.mark.nightly
def test_2048_catch_and_sqlite_train(folder: str) -> None:
    prompts = [{"prompt": [{"role": "user", "content": "Play."}], "seed": number} for number in range(4)]
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"factory": Game2048}, [], "Game2048"),
        ({"factory": Catch, "max_turns": 4}, [], "Catch"),
        ({"tools": [query]}, [structured], "structured"),
    ]
    for environments, rewards, name in cases:
        rows = train(folder, prompts, rewards, **environments)
        assert logged(rows, f"rewards/{name}/mean") and logged(rows, f"val/rewards/{name}/mean")
        assert max(logged(rows, "environments/turns")) > 1 and min(logged(rows, "environments/tool_calls")) > 0
        assert logged(rows, "environments/dropped") == [0, 0]
        assert logged(rows, "reward")


@pytest.mark.parametrize("rule", table_rows(["gigpo", "mt_grpo", "return_to_go"], ["gigpo"]))
def test_turns_of_a_game_get_credit_of_their_own(rule: str, folder: str) -> None:
    rows = train(folder, GAMES, [], rule, factory=Catch)
    assert max(logged(rows, "grad_norm")) > 0  # by what turns earned, whatever became of the ball


def test_conversations_that_are_rerendered_train_and_samples_say_so(folder: str) -> None:
    rows = train(folder, GAMES, [], "mt_grpo", factory=Catch, history="rerendered")
    assert max(logged(rows, "grad_norm")) > 0 and logged(rows, "environments/dropped") == [0, 0]
    assert (
        logged(rows, "environments/rows") == logged(rows, "environments/turns")
        and min(logged(rows, "environments/rows")) > 1
    )
    assert max(logged(rows, "sampling/logprob_gap_mean")) < 1e-5  # each turn is trained on after what it was sampled
    (file,) = Path().glob("**/samples.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    turns = [sum(message["role"] == "assistant" for message in sample["messages"]) for sample in samples]
    assert [sample["rows"] for sample in samples] == turns


def test_python_names_an_environment_and_tools_and_its_reward_decides_who_passes(folder: str) -> None:
    """Without a list of rewards, and with further settings of the plug-in."""
    run = lit_grpo.train(
        folder,
        GAMES,
        max_steps=1,
        batch_size=2,
        environment=Catch,
        tools=query,
        num_generations=3,
        validation=GAMES[:2],
        pass_reward="Catch",
        pass_threshold=-1.0,
        sampling={"max_tokens": 60, "max_observed": 400},
        callbacks={"rollout": {"plugins": [{"environments": {"max_turns": 3}}, "mt_grpo"]}},
        trainer={"accelerator": "cpu", "enable_progress_bar": False},
    )
    assert [function.name for function in run.module.rewards] == ["Catch"]
    table = read_metrics(run.folder / "metrics.csv")
    assert logged(table, "val/pass@1")[0] == 1.0  # each has at least -1
    assert max(logged(table, "environments/turns")) <= 3


def test_several_environments_are_routed_by_a_column(folder: str) -> None:
    names = ("game", "catch", "game", "catch")
    prompts = [{"prompt": "Play.", "seed": number, "environment": name} for number, name in enumerate(names)]
    rows = train(folder, prompts, [], factory={"game": Game2048, "catch": Catch})
    assert logged(rows, "rewards/Game2048/mean") or logged(rows, "rewards/Catch/mean")
    assert all(value >= 0 for value in logged(rows, "val/reward"))


def test_a_tool_that_never_works_is_named_on_the_screen_the_card_the_report_and_by_doctor(
    folder: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        "def query(sql_command: str) -> str:\n"
        '    """Run a query.\n\n    Args:\n        sql_command: The query.\n    """\n'
        "    raise KeyError('no such table')\n"
        "def score(completions, **_):\n    return [float(len(str(each)) % 7) for each in completions]\n"
    )
    train(folder, [{"prompt": "Ask."}] * 4, ["broken.py:score"], max_steps=2, tools=["broken.py:query"], max_turns=3)
    said = capfd.readouterr()
    error = "of the tool `query` failed, "
    assert error in caplog.text and "KeyError: 'no such table'" in caplog.text
    card = " ".join(said.out[said.out.index("grpo: done") :].split())
    assert "tool query" in card and error in card
    facts = report_content(read_folder(tmp_path / "runs" / "grpo"))["head"]["facts"]
    assert any(fact[0] == "Tool query" and fact[1] == "failed" for fact in facts)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Ask."}\n' * 4)
    with pytest.raises(SystemExit):
        doctor(
            [
                f"--model.policy={folder}",
                "--data.train=rows.jsonl",
                "--data.batch_size=2",
                '--model.rewards=["broken.py:score"]',
                "--model.sampling.max_tokens=60",
                "--model.sampling.max_observed=400",
                "--trainer.accelerator=cpu",
                '--rollout.plugins=[{"environments": {"tools": ["broken.py:query"], "max_turns": 3}}]',
            ]
        )
    said = capfd.readouterr()
    assert re.search(r"warn tool query +All \d+ calls of the tool `query` failed", said.out)


class Going(Catch):
    """Its server goes away for good at the 21st reset."""

    num_resets = 0

    def reset(self, *args: Any, **columns: Any) -> str:
        Going.num_resets += 1
        if Going.num_resets > 20:
            raise ConnectionError("no server")
        return super().reset(*args, **columns)


def test_a_run_whose_environment_is_gone_for_good_is_saved_and_ends(folder: str, tmp_path: Path) -> None:
    with pytest.raises(
        CannotGoOn, match=r"the last 3 batches were dropped .* Going fails when it is reset \(Connection"
    ):
        train(folder, GAMES, None, max_steps=20, factory=Going, max_turns=2, retries=0)
    kept = torch.load(tmp_path / "runs" / "grpo" / "checkpoints" / "last.ckpt", weights_only=True)
    assert 5 <= kept["global_step"] < 12


class Unset(Catch):
    """Fails at every reset, in the way that a row names."""

    fails: ClassVar[list[Callable[[], Any]]] = []

    def reset(self, *args: Any, **columns: Any) -> Any:
        return type(self).fails[0]()


def no_board() -> None:
    raise KeyError("board")


FAILURES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "raises": (no_board, "CannotGoOn", r"Unset fails when it is reset \(KeyError: 'board'\)"),
    "hangs": (lambda: time.sleep(60), "CannotGoOn", "Unset takes too long when it is reset"),
    "exits": (lambda: sys.exit(3), "CannotGoOn", r"Unset fails when it is reset \(SystemExit: 3\)"),
    "ends the process": (lambda: os._exit(3), "CannotGoOn", r"fails when it is reset \(SystemExit: os\._exit\(3\)\)"),
    "cannot be printed": (
        lambda: Unprinted(),
        "CannotGoOn",
        r"fails when it has what reset returned printed \(TypeErr",
    ),
    "is no text": (lambda: [{"type": "image"}], "NotShown", "Unset.reset returns an image, and the policy sees none"),
}


class Unprinted:
    def __str__(self) -> str:
        raise TypeError("no text")


@pytest.mark.parametrize("kind", table_rows(FAILURES, ["ends the process"]))
def test_an_environment_that_fails_at_every_reset_ends_the_run_at_its_first_batch(
    kind: str, folder: str, tmp_path: Path
) -> None:
    fails, error, why = FAILURES[kind]
    Unset.fails[:] = [fails]
    with pytest.raises(Exception, match=why) as raised:
        train(folder, GAMES, None, max_steps=3, factory=Unset, max_turns=2, retries=1, reset_timeout_s=0.2)
    assert type(raised.value).__name__ == error
    saved = tmp_path / "runs" / "grpo" / "checkpoints" / "last.ckpt"
    if error == "CannotGoOn":  # else no batch has been learned from
        assert torch.load(saved, weights_only=True)["global_step"] == 1


@pytest.mark.nightly
def test_an_environment_whose_factory_makes_none_is_a_failure_that_is_named(folder: str) -> None:

    def make() -> Catch:
        return None  # pyrefly: ignore[bad-return]

    with pytest.raises(CannotGoOn, match=r"Catch fails when it is reset \(AttributeError: 'NoneType' object"):
        train(folder, GAMES, None, max_steps=3, factory=make, max_turns=2, retries=0)


def count_on_a_rank(rank: int, folder: str) -> None:
    """Play one trajectory on the first rank and three on the second; write the metrics of both ranks together."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", world_size=2, rank=rank)
    worker = worker_of(Guess)
    play(worker, num_generations=1 + 2 * rank)
    own, both = worker.metrics(lambda counts: [counts]), worker.metrics(Ranks().gather)
    Path(folder, f"{rank}.json").write_text(json.dumps([own, both]))
    distributed.destroy_process_group()


@pytest.mark.nightly
def test_metrics_of_environments_are_those_of_all_ranks(tmp_path: Path) -> None:
    spawn(count_on_a_rank, (str(tmp_path),), nprocs=2)
    (first, both), (second, both_there) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    calls, turns = "environments/tool_calls", "environments/turns"
    assert second[calls] == 3 * first[calls] > 0
    assert both[calls] == both_there[calls] == first[calls] + second[calls]
    assert both[turns] == both_there[turns] == (first[turns] + 3 * second[turns]) / 4
