"""How many files, functions and classes one update runs through, and in which order: what a reader has to know."""

from __future__ import annotations

import json
import pydoc
import re
from pathlib import Path
from typing import Any

import forks
import pytest

from benchmarks import update_trace
from benchmarks.report import ROOT
from benchmarks.update_trace import traced
from lit_grpo.tasks import ArithmeticRows


def fork(command: list[str], *, timeout: float, **options: Any) -> Any:
    """Run a command as ``subprocess.run`` does that captures text, as a fork of what has imported torch."""
    return forks.run(command, timeout, **{name: options[name] for name in ("cwd", "env")})


def test_an_update_runs_through_no_more_code_than_it_did_and_in_the_order_of_the_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lower these bounds where the code gets lighter; a feature that is off adds nothing to them."""
    monkeypatch.setattr(update_trace.subprocess, "run", fork)
    rows = tmp_path / "train.jsonl"  # those of the config, as a file
    rows.write_text("".join(json.dumps(row) + "\n" for row in ArithmeticRows(num_rows=2048).rows()))
    counts, first_calls = traced("arithmetic", ROOT, data__train=rows, trainer__limit_val_batches=0)
    assert counts["files"] <= 55 and counts["named_functions"] <= 350 and counts["classes"] <= 58, counts
    assert counts["returns"] <= 198, counts  # to a file seen before, in the order of first calls
    table = re.findall(r"^\| (\d+) \| `([\w.]+)` \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in table] == list(range(1, len(table) + 1)) and len(table) > 20
    on_map = [_where_defined(name) for _, name in table]
    assert on_map == sorted(on_map, key=first_calls.index)  # a function that is not called is a ValueError


def _where_defined(name: str) -> str:
    function: Any = pydoc.locate(name)
    return f"{function.__module__}.{function.__qualname__}"


@pytest.mark.nightly
def test_environments_add_few_files_and_classes_to_an_update() -> None:
    without, environments = (traced(name, ROOT)[0] for name in ("arithmetic", "calculator"))
    assert environments["files"] <= without["files"] + 9, environments
    assert environments["classes"] <= without["classes"] + 14, environments  # two are forms of hooks' returns
