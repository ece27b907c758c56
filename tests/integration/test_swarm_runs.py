"""Runs that are processes of their own exchange completions through a folder, whoever else writes to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forks
import pytest
from conftest import read_metrics
from test_swarm import FILES, LINES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.nightly


def begin(folder: Path, seed: int, *words: str) -> subprocess.Popen[str]:
    """Start a run of the demo that exchanges with the others."""
    command = [sys.executable, "-m", "lit_grpo", "fit", "--config", "arithmetic", "--run.name", f"run-{seed}"]
    fields = {"seed_everything": seed, "rollout.plugins": "swarm:folder=exchange,groups=3", "data.batch_size": 4}
    fields |= {"data.train.init_args.num_rows": 16, "data.validation.init_args.num_rows": 8, "data.eval_batch_size": 8}
    fields |= {"model.num_generations": 6, "trainer.enable_progress_bar": "false"}
    command += [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    options: dict[str, Any] = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return forks.Forked([*command, *words], env=os.environ | {"PYTHONPATH": str(ROOT)}, **options)


def wait_for_files(folder: Path, number: int) -> list[Path]:
    began = time.monotonic()
    while len(files := [path for path in folder.glob("*.jsonl") if re.fullmatch(r"[0-9a-f]{16}", path.stem)]) < number:
        assert time.monotonic() - began < 300, "no run has shared anything"
        time.sleep(0.05)
    return files


def test_runs_side_by_side_learn_from_each_other_among_hostile_files_and_after_a_kill(tmp_path: Path) -> None:
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    for name, (content, _) in LINES.items():
        (exchange / f"{name}.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, (make, _) in FILES.items():
        make(exchange / f"{name}.jsonl")
    hostile = {path.name for path in exchange.iterdir()}
    killed = begin(tmp_path, 0, "--trainer.max_steps", "1000", "--trainer.val_check_interval", "1000")
    (left,) = wait_for_files(exchange, 1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = [json.loads(line) for line in left.read_text().splitlines()]  # whole, though its writer was killed
    assert len(before) >= 4
    steps = "--trainer.max_steps", "12", "--trainer.val_check_interval", "6"
    ranks = "--trainer.devices", "2", "--trainer.strategy", "ddp", "--data.batch_size", "2"
    runs = [begin(tmp_path, 1, *steps), begin(tmp_path, 2, *steps), begin(tmp_path, 3, *steps, *ranks)]
    said = [run.communicate(timeout=600)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], said
    assert len(wait_for_files(exchange, 4)) == 4  # one of each run, however many ranks it has
    assert hostile <= {path.name for path in exchange.iterdir()} and not list(tmp_path.rglob("executed"))
    for seed, text in zip((1, 2, 3), said, strict=True):
        table = [row for row in read_metrics(tmp_path / "runs" / f"run-{seed}" / "metrics.csv") if row["swarm/groups"]]
        assert sum(float(row["swarm/groups"]) for row in table) > 0, text
        ratios = [float(row["ratio/mean"] or "nan") for row in table]  # NaN is of an update without tokens
        assert [each for each in ratios if abs(each - 1) >= 1e-4] == []
        assert float(table[-1]["swarm/left_alone"]) == len(hostile)
        for name in hostile - {"unreadable.jsonl"}:
            assert text.count(f"/{name} alone: ") == 1, (name, text)
