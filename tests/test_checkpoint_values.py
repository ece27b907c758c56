"""Values that users' objects put into checkpoints: kept as they were, or refused before a checkpoint is replaced."""

from __future__ import annotations

import datetime
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_grpo.checkpoints import BackgroundIO, CheckpointError, FolderIO, WholeFileIO, fault_of, read
from lit_grpo.checkpoints.disk import not_written
from lit_grpo.process.values import checksum, find_foreign

Point = namedtuple("Point", "x")


class Color(StrEnum):
    RED = "red"


class Own:
    """An object of the user's."""


KEPT: dict[str, Any] = {
    "scalars": [None, True, 2**80, 0.5, 1j, "text", "\ud800", b"bytes", b"", bytearray(b"more")],
    "containers": {"tuple": (1, (2,)), "set": {1, 2}, 3: OrderedDict(a=1), (4, 5): Counter("aab")},
    "tensor": torch.arange(3),
    "board": np.arange(6, dtype=np.int16).reshape(2, 3),
    "numpy": [np.float32(0.1), np.int64(3), np.bool_(True), np.str_("x"), np.array(["ab", "c"]), np.empty((0, 2))],
    "days": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "nested": {"deep": [{"rng": (3, tuple(range(5)))}]},
}


def alike(mine: Any, own: Any) -> bool:
    if isinstance(own, dict):
        return list(mine) == list(own) and all(alike(mine[key], own[key]) for key in own)
    if isinstance(own, list | tuple):
        return len(mine) == len(own) and all(map(alike, mine, own))
    if isinstance(own, np.ndarray | np.generic):
        return type(mine) is type(own) and mine.dtype == own.dtype and np.array_equal(mine, own)
    return bool(mine.equal(own)) if isinstance(own, torch.Tensor) else type(mine) is type(own) and mine == own


@pytest.mark.parametrize("writer", ["file", "background", "folder"])
def test_plain_values_and_those_of_numpy_come_back_as_they_were(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    io = {"file": WholeFileIO(), "background": BackgroundIO(WholeFileIO()), "folder": FolderIO()}[writer]
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}, "callbacks": KEPT}, path)
    io.teardown()
    for saved in (read(path), io.load_checkpoint(path, weights_only=True)):
        assert alike(saved["callbacks"], KEPT) and torch.equal(saved["state_dict"]["w"], torch.ones(2))
    if writer != "folder":
        torch.load(path, weights_only=True)  # anybody reads it without running code


def test_numbers_of_numpy_in_keys_and_sets_become_numbers(tmp_path: Path) -> None:
    WholeFileIO().save_checkpoint(
        {"counts": {np.int64(3): {np.float64(0.5)}, (np.int64(1), 2): 4}}, tmp_path / "a.ckpt"
    )
    counts = read(tmp_path / "a.ckpt")["counts"]
    assert counts == {3: {0.5}, (1, 2): 4} and [type(key) for key in counts] == [int, tuple]


FOREIGN = [
    (datetime.datetime(2020, 1, 1), "is a datetime.datetime (datetime.datetime(2020, 1, 1, 0, 0))"),
    (Path("a"), "is a pathlib.PosixPath (PosixPath('a'))"),
    (Fraction(1, 2), "is a fractions.Fraction (Fraction(1, 2))"),
    (deque([1]), "is a collections.deque (deque([1]))"),
    (defaultdict(list), "is a collections.defaultdict (defaultdict(<class 'list'>, {}))"),
    (Own(), "is a test_checkpoint_values.Own ("),
    (lambda: 1, "is a function ("),
    (threading.Lock(), "is a _thread.lock ("),
    (Point(1), "is a test_checkpoint_values.Point (Point(x=1))"),
    (Color.RED, "is a test_checkpoint_values.Color ("),
    (frozenset({1}), "is a frozenset (frozenset({1}))"),
    (np.array([Own()]), "is a NumPy array of dtype object ("),
]


@pytest.mark.parametrize(("value", "why"), FOREIGN)
@pytest.mark.parametrize("writer", [WholeFileIO(), FolderIO(), BackgroundIO(WholeFileIO())])
def test_a_value_that_no_reader_gives_back_is_named_and_the_checkpoint_before_stays(
    writer: Any, value: Any, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    writer.save_checkpoint({"version": 1}, path)
    with pytest.raises(CheckpointError) as raised:
        writer.save_checkpoint({"version": 2, "callbacks": {"Mine": {"seen": [0, value]}}}, path)
        writer.wait()
    sentence = str(raised.value)
    assert f"last.ckpt could not be read back, because callbacks['Mine']['seen'][1] {why}" in sentence
    assert (
        "and the one before it is unchanged; have the state() or state_dict() that says so return numbers" in sentence
    )
    assert read(path)["version"] == 1 and [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_state_that_contains_itself_is_foreign() -> None:
    state: dict[str, Any] = {}
    state["self"] = [state]
    assert "contains itself" in str(find_foreign(state))
    assert "has no words" not in str(find_foreign(Mute()))


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("has no words")


def test_checksums_hold_for_every_value_that_comes_back_and_for_no_other(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    WholeFileIO().save_checkpoint({"callbacks": KEPT}, path)
    assert fault_of(path) is None
    for place, value in (("scalars", [None, 1]), ("containers", {}), ("tensor", torch.arange(4)), ("days", None)):
        saved = torch.load(path, weights_only=True)
        saved["callbacks"][place] = value
        torch.save(saved, tmp_path / f"{place}.ckpt")
        assert fault_of(tmp_path / f"{place}.ckpt") == "is not what was saved (callbacks was changed)"
    assert checksum([1, (True, {"a": 0.0})]) != checksum([1, (1, {"a": 0.0})]) != checksum([1, [1, {"a": 0.0}]])
    assert checksum({"a": 1, "b": 2}) != checksum({"b": 2, "a": 1}) and checksum({1, 2}) == checksum({2, 1})


def test_a_checkpoint_whose_folder_is_gone_is_not_said_to_need_room(tmp_path: Path) -> None:
    gone = tmp_path / "runs" / "last.ckpt"
    said = str(not_written(gone, FileNotFoundError(2, "No such file or directory")))
    assert said.endswith("(No such file or directory); its folder was moved or deleted while the run went on.")
    (tmp_path / "last.ckpt").touch()
    said = str(not_written(tmp_path / "last.ckpt", OSError(28, "No space left on device")))
    assert said.endswith("device), and the one before it is unchanged; make room or choose another run.dir.")
