"""The page of architectures says what the newest result says, and no family is wrong in it."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.architectures_page import architectures_page, newest

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"


def test_the_page_is_made_of_the_newest_result() -> None:
    assert PAGE.read_text() == architectures_page(newest()), (
        "run python -m benchmarks.architectures_page > docs/architectures.md"
    )


def test_every_family_is_exact_refused_or_cannot_be_built() -> None:
    outcomes = [row["outcome"] for row in json.loads(newest().read_text())["rows"]]
    assert set(outcomes) <= {"exact", "refused", "not built"}
    assert sum(outcome != "not built" for outcome in outcomes) >= 40
