from pathlib import Path

import pytest
from jsonargparse import ArgumentError

from lit_grpo.cli.errors import InputParser, one_sentence, shipped_config
from lit_grpo.data.sources import FileRows, RowSource
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


def test_plain_sentence_stays() -> None:
    assert one_sentence("num_slots must be at least 1, not 0.\n") == "num_slots must be at least 1, not 0."


class Task:
    """Has fields within fields."""

    def __init__(self, sampling: SamplingParams = SamplingParams(), rows: str | RowSource | None = None) -> None:  # noqa: B008
        self.sampling, self.rows = sampling, rows


FILE_ROWS = f"{FileRows.__module__}.{FileRows.__name__}"
UNKNOWN = {
    "of a group": ({"sampling": {"max_token": 5}}, "field task.sampling.max_token; did you mean task.sampling.max"),
    "of a class": (
        {"rows": {"class_path": FILE_ROWS, "init_args": {"pth": "a"}}},
        f"There is no field task.rows.pth: {FILE_ROWS} has no 'pth'; did you mean path?",
    ),
    "like none": ({"rows": {"class_path": FILE_ROWS, "init_args": {"qq": "a"}}}, "has no 'qq'; it has path."),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_field_that_nothing_has_is_named_whole(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = InputParser()
    parser.add_class_arguments(Task, "task")
    config, sentence = UNKNOWN[case]
    with pytest.raises(SystemExit):
        parser.parse_object({"task": config})
    assert sentence in capsys.readouterr().err


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
