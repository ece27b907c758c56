"""Runs that are really killed in several phases, in a mode and on two ranks, end as one that was left alone."""

from pathlib import Path

import pytest
from quick_runs import check_result, run_quick

from benchmarks.kill_and_resume import ENVIRONMENT


@pytest.mark.nightly
def test_runs_that_are_killed_and_resumed_end_as_one_that_was_left_alone(tmp_path: Path) -> None:
    result, _ = run_quick("kill_and_resume", tmp_path / "result.json")
    check_result(result, "kill_and_resume")
    assert [(row["signal"], row["mode"], row["ranks"], row["kills"]) for row in result["rows"]] == [
        ("SIGKILL", "april", 1, 1),
        ("SIGKILL", ENVIRONMENT, 1, 1),
        ("SIGTERM", "synchronous", 2, 1),
    ]
    assert all(row["equal"] == row["runs"] > 0 for row in result["rows"])
    assert all(row["wrong"] == 0 for row in result["rows"])
