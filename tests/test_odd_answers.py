"""Odd answers of tools and environments: each is an answer, a failure or a refusal; none is a traceback or a hang."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import forks
import pyarrow
import pyarrow.parquet
import pytest
import torch
from conversations import call, chat_tokenizer, only
from test_environments import Guess, play, worker_of

from lit_grpo.data import module as data_module
from lit_grpo.data.chat import UnusableRow
from lit_grpo.data.module import PromptDataModule
from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.data.sources import FileRows, GivenRows


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Endless:
    def __str__(self) -> str:
        time.sleep(30)
        return ""


class BadError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def answered(value: Any, **options: Any) -> str:
    """What the policy is answered by a tool that returns or raises a value."""

    def tool() -> Any:
        """Do it."""
        if isinstance(value, Exception):
            raise value
        return value

    del tool.__annotations__["return"]
    worker = worker_of(tools=[tool], **options)
    episode = only(play(worker, lambda _, turn: "Done." if turn else call("tool"), [{"prompt": "?"}])).episode
    assert episode is not None
    return episode.messages[1]["content"]


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("half \ud800.", "half \\ud800."),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "\udfff"}], "a\\udfff"),
        (Unprintable(), "{'error': 'no text'}"),
        (BadError(), "{'error': 'BadError, whose text cannot be printed'}"),
        (None, "None"),
        (float("nan"), "nan"),
        (torch.zeros(2), "tensor([0., 0.])"),
    ],
)
def test_odd_values_of_tools_are_answers(value: Any, answer: str) -> None:
    assert answered(value) == answer


def test_a_value_that_is_never_printed_and_one_that_is_no_text() -> None:
    with pytest.raises(ValueError, match="expected 1, got 0"):  # its trajectory has failed, and is left out
        answered(Endless(), tool_timeout_s=0.2)
    with pytest.raises(ValueError, match=r"the tool tool returns a content block without a text; write it as \{'type'"):
        answered([{"type": "text"}])


class OddDone(Guess):
    def __init__(self) -> None:
        self.done: Any = False

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: Your guess.
        """
        self.done = torch.tensor([number == 2])
        return "no"


class TwoDone(OddDone):
    def reset(self, number: int, **_: Any) -> str:
        self.done = torch.zeros(2)
        return ""


def test_a_tensor_as_done_is_read_or_fails_its_trajectory() -> None:
    assert len(only(play(worker_of(OddDone))).turns) == 2
    worker = worker_of(TwoDone, retries=0)
    assert play(worker)[0].rollouts == []
    assert worker.metrics()["environments/dropped"] == 1


class Odd(Guess):
    def reset(self, number: int, **_: Any) -> Any:
        self.right = False
        return {1: Unprintable(), 2: "\ud800"}[number]


def test_what_reset_returns_is_printed_or_fails_its_trajectory() -> None:
    worker = worker_of(Odd, retries=0)
    groups = play(worker, lambda *_: "Done.", [{"prompt": "?", "number": number} for number in (1, 2)])
    assert [len(group.rollouts) for group in groups] == [0, 1]


def test_a_tool_that_closes_standard_output_silences_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    def closes() -> str:
        """Close it."""
        os.close(1)
        return "closed"

    worker = worker_of(tools=[closes])
    play(worker, lambda _, turn: "Done." if turn else call("closes"), [{"prompt": "?"}])
    os.write(1, b"still there\n")
    assert "still there" in capfd.readouterr().out


CLOSES_ALL = """
import os
from conversations import call
from test_environments import play, worker_of
from test_reward_runner import make_group
from lit_grpo.rewards import RewardFunction, RewardRunner

close_all = getattr(os, "closerange")

def reward(completion):
    close_all(3, 1024)
    return 1.0

async def tool() -> str:
    '''Close all.'''
    close_all(3, 1024)
    return "closed"

try:
    RewardRunner([RewardFunction.of(reward, "reward")]).score(make_group("text"))
except RuntimeError as error:
    print(error)
try:
    play(worker_of(tools=[tool]), lambda *_: call("tool"), [{"prompt": "?"}])
except RuntimeError as error:
    print(error)
"""


@pytest.mark.nightly
def test_functions_that_close_all_descriptors_end_a_run_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "closes.py").write_text(CLOSES_ALL)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = forks.run([sys.executable, str(tmp_path / "closes.py")], timeout=60, env=environment)
    sentence = (
        "A reward, tool, environment or agent closed file descriptors of the run (Bad file descriptor); have it close "
        "only what it has opened, without os.closerange and without a second os.close of one number."
    )
    assert done.stdout.splitlines() == [sentence] * 2, done.stderr
    assert "Traceback" not in done.stderr


def test_rows_with_half_a_character_and_rows_without_end_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnusableRow, match=r"has a prompt with the lone surrogate '\\ud800', half a character that no"):
        PromptRenderer().render({"prompt": "half \ud800"}, chat_tokenizer())
    (tmp_path / "long.jsonl").write_text('{"prompt": "a"}\n{"prompt": "' + "a" * (17 * 2**20) + '"}\n')
    with pytest.raises(
        ValueError, match=r"line 2 of .*long.jsonl has more than 16 MiB, and a row may have at most 16 MiB"
    ):
        list(FileRows(str(tmp_path / "long.jsonl")).rows())


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet", ""])
def test_rows_without_end_are_named_whatever_they_are_read_from(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a" * (9 * 2**20), "answer": "b" * (8 * 2**20)}]
    path = tmp_path / f"long{suffix}"
    match suffix:
        case ".json":
            path.write_text(json.dumps(rows))
        case ".csv":
            path.write_text("prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in rows))
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(ValueError, match=r"^data\.train: row 1 of .* has 17 MiB of text, and a row may have at most"):
        PromptDataModule(train=FileRows(path) if suffix else GivenRows(rows)).setup("fit")


def test_a_long_cell_of_csv_is_read_and_one_without_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("prompt\n" + "a" * 200_000 + "\n")
    assert [len(row["prompt"]) for row in FileRows(path).rows()] == [200_000]
    path.write_text("prompt\nb\n" + "a" * (17 * 2**20) + "\n")
    with pytest.raises(ValueError, match=r"^Line 3 of .*long.csv has a cell of more than 16 MiB, .* quote"):
        list(FileRows(path).rows())


def test_rows_that_take_long_are_counted_on_the_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data_module, "TELL_EVERY_S", 0.0)
    PromptDataModule(train=GivenRows([{"prompt": f"{number}="} for number in range(8)])).setup("fit")
    assert re.search(r"^data    7 rows of the list given so far, after \d+ s$", capsys.readouterr().out, re.M)


@pytest.mark.nightly
def test_doctor_obeys_a_signal() -> None:
    code = """
        import os, signal, time
        from types import SimpleNamespace
        from lit_grpo.tools.doctor import checkup

        def slow(patient):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)

        checkup.CHECKS = (checkup.Check("slow", slow),)
        checkup.GRPOModule = checkup.PromptDataModule = SimpleNamespace
        scheduler = SimpleNamespace(teardown=lambda *_: print("closed"))
        signal.signal(signal.SIGTERM, lambda *_: None)  # as a run does, which stops after its batch
        doctor = checkup.CheckUp(None, scheduler, None, None)
        doctor.on_train_start(SimpleNamespace(datamodule=SimpleNamespace()), SimpleNamespace())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("closed\n", 128 + signal.SIGTERM), done.stderr
