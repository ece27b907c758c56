from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentError
from jsonargparse._actions import ActionConfigFile
from lightning.pytorch import Callback

from lit_grpo.cli.parsing.errors import InputParser, one_sentence
from lit_grpo.cli.parsing.sentences import shipped_config
from lit_grpo.data.sources import FileRows, RowSource
from lit_grpo.rewards import RewardSpec
from lit_grpo.types import SamplingParams


def test_of_all_types_that_were_tried_those_that_say_something_remain() -> None:
    message = """Parser key "model.generator":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'Generator'>, <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'nope.Nope':
        No module named 'nope'
    - Expected a <class 'NoneType'>
  Given value type: <class 'str'>
  Given value: nope.Nope"""
    assert one_sentence(message) == (
        "Parser key \"model.generator\": Problem with given class_path 'nope.Nope': No module named 'nope'"
    )


def test_of_text_or_a_class_the_fault_of_the_class_is_told() -> None:
    message = """Does not validate against any of the Union subtypes
  Subtypes: [<class 'str'>, <class 'RowSource'>, <class 'NoneType'>]
  Errors:
    - Expected a <class 'str'>
    - it takes its tasks from a package, which is not installed; install it.
    - Expected a <class 'NoneType'>
  Given value type: <class 'dict'>
  Given value: {}"""
    assert one_sentence(message) == "it takes its tasks from a package, which is not installed; install it."
    of_text = message.replace("    - it takes its tasks from a package, which is not installed; install it.\n", "")
    assert one_sentence(of_text) == "Expected a <class 'str'>"


class Task:
    """Has fields within fields."""

    def __init__(self, sampling: SamplingParams = SamplingParams(), rows: str | RowSource | None = None) -> None:  # noqa: B008
        self.sampling, self.rows = sampling, rows


FILE_ROWS = f"{FileRows.__module__}.{FileRows.__name__}"


def test_the_parser_of_a_class_in_a_config_leaves_the_sentence_to_the_one_above() -> None:
    with pytest.raises(ArgumentError, match="no such thing"):
        InputParser(exit_on_error=False).error("no such thing")


def test_a_config_that_comes_with_the_package_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(shipped_config("arithmetic")).is_file()
    assert Path(shipped_config("generators/vllm.yaml")).is_file()
    assert shipped_config("absent") == "absent"
    (tmp_path / "arithmetic.yaml").write_text("")
    assert shipped_config("arithmetic.yaml") == "arithmetic.yaml"


class Lists:
    """Has lists of dataclasses, of classes and of text, and one within a class."""

    def __init__(
        self,
        rewards: list[RewardSpec] | None = None,
        callbacks: list[Callback] | Callback | None = None,
        points: list[int] | None = None,
        owner: Owner | None = None,
    ) -> None:
        self.rewards, self.callbacks, self.points, self.owner = rewards, callbacks, points, owner


class Owner:
    """Has a list of its own."""

    def __init__(self, rewards: list[RewardSpec] | None = None) -> None:
        self.rewards = rewards


LOGGER = "lit_grpo.callbacks.SampleLogger"
BEFORE = {
    "rewards": [{"function": "a.py:f", "weight": 2.0, "args": {"pattern": "x"}}],
    "callbacks": [{"class_path": LOGGER, "init_args": {"num_samples": 9}}],
    "points": [1, 2],
    "owner": {
        "class_path": f"{__name__}.Owner",
        "init_args": {"rewards": [{"function": "a.py:f", "args": {"pattern": "x"}}]},
    },
}
AFTER = {
    "rewards": [{"function": "b.py:g"}],
    "callbacks": [{"class_path": LOGGER, "init_args": {"every_n_updates": 3}}],
    "points": [3],
    "owner": {"class_path": f"{__name__}.Owner", "init_args": {"rewards": [{"function": "b.py:g"}]}},
}


def parse_lists(folder: Path, *arguments: str) -> Any:
    for name, config in (("before", BEFORE), ("after", AFTER)):
        (folder / f"{name}.yaml").write_text(json.dumps({"task": config}))
    parser = InputParser()
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_class_arguments(Lists, "task")
    return parser.parse_args(["--config", str(folder / "before.yaml"), *arguments]).task


@pytest.mark.parametrize("by_file", [False, True], ids=["options", "files"])
def test_a_list_that_is_given_later_replaces_the_earlier_one_whole(tmp_path: Path, by_file: bool) -> None:
    options = [text for name in AFTER for text in (f"--task.{name}", json.dumps(AFTER[name]))]
    task = parse_lists(tmp_path, *(["--config", str(tmp_path / "after.yaml")] if by_file else options))
    assert [dict(reward) for reward in task.rewards] == [asdict(RewardSpec("b.py:g"))]
    given = task.callbacks[0].init_args.as_dict()
    assert given == {"every_n_updates": 3, "num_samples": 4, "num_validation_samples": 16}
    assert task.points == [3]
    assert [dict(reward) for reward in task.owner.init_args.rewards] == [asdict(RewardSpec("b.py:g"))]


def test_a_field_of_a_class_is_still_set_beside_the_others(tmp_path: Path) -> None:
    parser = InputParser()
    parser.add_class_arguments(Task, "task")
    rows = {"class_path": FILE_ROWS, "init_args": {"path": "a.jsonl"}}
    task = parser.parse_args(["--task.rows", json.dumps(rows), "--task.rows.path", "b.jsonl"]).task
    assert task.rows.init_args.path == "b.jsonl"
