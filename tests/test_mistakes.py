"""The doctor names all mistakes that parsing finds, where the parser ends at the first."""

from __future__ import annotations

import pytest
from test_docs import parsers

from lit_grpo.cli.parsing.mistakes import parse_or_exit


def test_a_mistake_whose_field_is_not_known_is_told_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_or_exit(parsers()["fit"].parse_args, ["--config", "absent", "--data.batch_size", "x"])
    assert capsys.readouterr().err.startswith("error: There is no config 'absent'")


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        (["--model.teacher", "live"], "live"),
        (["--model.teacher", "runs/a:b/policy"], "runs/a:b/policy"),
        (["--model.teacher", "http://127.0.0.1:8000"], "http://127.0.0.1:8000"),
        (["--model.teacher", "3"], "3"),
        (["--model.teacher", '{"policy": "base"}'], "base"),
        (["--model.teacher", "tiny", "--model.teacher.temperature", "2"], "tiny"),
    ],
)
def test_a_teacher_may_be_given_by_its_policy_alone(given: list[str], policy: str) -> None:
    settings = parsers()["fit"].parse_args(["--config", "arithmetic", *given])
    assert settings.model.teacher.policy == policy


@pytest.mark.parametrize("value", ["8", "true", "tiny"])
def test_a_value_in_place_of_a_group_of_fields_is_refused_with_one_of_the_fields(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsers()["fit"].parse_args(["--config", "arithmetic", "--model.lora", value])
    said = f"model.lora is '{value}', but it is a group of fields; give these, such as model.lora.r."
    assert said in capsys.readouterr().err
