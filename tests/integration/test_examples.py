"""The examples run as they stand."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import forks
import pytest
from conftest import table_rows

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "train": "The trained policy, metrics and samples are in",
    "loop": "update 2: reward",
    "own_trainer": "update 2: reward",
    "galore": "Metrics of two updates by GaLore are in",
    "own_loss": "Rewards, the loss and its metrics are in",
    "two_roles": "What each role earned is in",
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)
    assert len((ROOT / "examples/loop.py").read_text().splitlines()) <= 60  # the page to read first


@pytest.mark.parametrize("name", table_rows(EXAMPLES, ("loop", "own_trainer", "own_loss")))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / f"{name}.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = forks.run([sys.executable, str(path)], 300, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert EXAMPLES[name] in done.stdout
