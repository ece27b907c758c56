"""The page of architectures says what the newest result says, and no family is wrong in it."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.architectures_page import architectures_page, newest, newest_with_vllm

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"


def test_the_page_is_made_of_the_newest_results() -> None:
    assert PAGE.read_text() == architectures_page(newest(), newest_with_vllm()), (
        "run python -m scripts.architectures_page > docs/architectures.md"
    )


def test_every_family_is_exact_refused_or_cannot_be_built() -> None:
    outcomes = [row["outcome"] for row in json.loads(newest().read_text())["rows"]]
    assert set(outcomes) <= {"exact", "refused", "not built"}
    assert sum(outcome != "not built" for outcome in outcomes) >= 40


def test_no_family_is_wrong_in_vllm_without_a_sentence() -> None:
    rows = json.loads(newest_with_vllm().read_text())["rows"]
    assert {row["outcome"] for row in rows} <= {"exact", "rounded", "refused", "not run here", "not built"}
    assert sum(row["outcome"] == "exact" for row in rows) >= 40
    assert all(row["detail"] for row in rows if row["outcome"] in ("refused", "not run here"))
    assert {row["family"] for row in rows if row["outcome"] == "rounded"} == {"apertus", "bloom"}
