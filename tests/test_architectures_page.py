"""docs/architectures.md says what the newest result file says."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.architectures_page import architectures_page, newest

ROOT = Path(__file__).parents[1]


def test_the_page_is_made_of_the_newest_result() -> None:
    assert (ROOT / "docs" / "architectures.md").read_text() == architectures_page(newest()), (
        "run python -m benchmarks.architectures_page > docs/architectures.md"
    )


def test_the_result_has_no_defect_and_judges_forty_families_at_least() -> None:
    rows = json.loads(newest().read_text())["rows"]
    outcomes = {row["outcome"] for row in rows}
    assert outcomes <= {"exact", "refused", "not built"}
    assert sum(row["outcome"] != "not built" for row in rows) >= 40
