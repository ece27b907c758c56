"""Rows of JSON lines that any text and any number can stand in."""

from __future__ import annotations

import json
import math

from lit_grpo.faults import json_line


def test_lone_surrogates_are_escaped_and_read_back() -> None:
    row = {"completion": "a\ud800é", "\udfff": ["\udc00"]}
    line = json_line(row).encode("utf-8")
    assert json.loads(line) == row
    assert b"\xc3\xa9" in line  # other text stays readable


def test_numbers_that_json_has_not_are_null_at_any_depth() -> None:
    line = json_line({"reward": math.nan, "rewards": {"a": [math.inf, 1.5]}, "step": 1})
    assert line == '{"reward": null, "rewards": {"a": [null, 1.5]}, "step": 1}\n'
