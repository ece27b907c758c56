"""How many files, functions and classes one update runs through: what a reader has to know to follow it."""

from __future__ import annotations

import pytest

from benchmarks.report import ROOT
from benchmarks.update_trace import traced


def test_an_update_runs_through_no_more_files_functions_and_classes_than_it_did() -> None:
    """Lower these bounds where the code gets lighter; a feature that is off adds nothing to them."""
    counts = traced("arithmetic", ROOT)
    assert counts["files"] <= 60 and counts["named_functions"] <= 434 and counts["classes"] <= 67, counts


@pytest.mark.nightly
def test_environments_add_few_files_and_classes_to_an_update() -> None:
    without, environments = (traced(name, ROOT) for name in ("arithmetic", "calculator"))
    assert environments["files"] <= without["files"] + 8, environments
    assert environments["classes"] <= without["classes"] + 14, environments  # two are forms of hooks' returns
