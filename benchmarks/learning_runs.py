"""Whole runs of a shipped configuration, side by side: each on a core and a thread of its own, in an empty folder.

What has been run stays in ``runs/BENCHMARK/COMMIT``, so that a benchmark which was cut off goes on where it was.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING

import numpy as np
import yaml

from benchmarks.learning_callbacks import CLOCK, Clock
from benchmarks.report import ROOT, Options, Row, note

if TYPE_CHECKING:
    from collections.abc import Iterator

EXACT, REWARD = "val/pass@1", "reward"
CLOCKED = {"trainer": {"callbacks": [{"class_path": f"{Clock.__module__}.{Clock.__name__}"}]}}
"""The configuration that a run gets beside its own."""


@dataclass(frozen=True)
class LearningRun:
    """One run: ``config`` is a name of ``configs/``, ``arguments`` stand behind it."""

    name: str
    config: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Curves:
    """What a run has come to, by update from 0 on; NaN where it was not measured.

    ``exact_U`` is held-out exact match, ``reward_U`` the mean reward of the batch that led to the update, ``samples_U``
    and ``tokens_U`` what has been learnt from and decoded so far; seconds are without validations.
    """

    exact_U: np.ndarray
    reward_U: np.ndarray
    samples_U: np.ndarray
    tokens_U: np.ndarray
    wall_s_U: np.ndarray
    cpu_s_U: np.ndarray
    staleness_U: np.ndarray


@contextmanager
def kept_runs(name: str, options: Options) -> Iterator[Path]:
    """The folder that runs of this commit are kept in; a quick form keeps none."""
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        git = ["git", "rev-parse", "--short=12", "HEAD"]
        commit = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
        yield ROOT / "runs" / name / commit


def run_all(runs: Sequence[LearningRun], folder: Path) -> dict[str, Curves]:
    """Run those that have not been run, as many at a time as there are cores, up to two, in the order given."""
    cores: Queue[int | None] = Queue()
    available = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else [None]
    for core in available:
        cores.put(core)

    def one(run: LearningRun) -> Curves:
        if not (folder / run.name / "done").exists():
            core = cores.get()
            try:
                _train(run, folder / run.name, core)
            finally:
                cores.put(core)
        curves = read_curves(folder / run.name)
        note(f"{run.name}: {curves.wall_s_U[-1]:.0f} s, exact match {curves.exact_U[-1]:.3f}")
        return curves

    with ThreadPoolExecutor(len(available)) as pool:
        return dict(zip([run.name for run in runs], pool.map(one, runs), strict=True))


def _train(run: LearningRun, folder: Path, core: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "clocked.yaml").write_text(yaml.safe_dump(CLOCKED))
    command = [sys.executable, "-m", "lit_grpo", "fit", "--config", str(ROOT / "configs" / f"{run.config}.yaml")]
    command += ["--config", "clocked.yaml", "--trainer.enable_progress_bar", "false", *run.arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        if process.wait():
            raise RuntimeError(f"{run.name} failed:\n{(folder / 'output.txt').read_text()[-6000:]}")
    (folder / "done").touch()


def read_curves(folder: Path) -> Curves:
    """Read what a run has left."""
    (metrics,) = folder.glob("runs/*/metrics.csv")
    with metrics.open(newline="") as file:
        logged = {int(float(row["step"])): row for row in csv.DictReader(file)}
    clock = {row["update"]: row for row in map(json.loads, (folder / CLOCK).read_text().splitlines())}

    def column(name: str) -> np.ndarray:
        return np.array([float(logged[update].get(name) or "nan") for update in sorted(logged)])

    def seconds(name: str) -> np.ndarray:
        return np.array([clock[update][name] if update else 0.0 for update in sorted(logged)])

    decoded_U = np.nan_to_num(column("rollout/tokens"))
    samples_U = np.nan_to_num(column("num_completions"))
    return Curves(
        column(EXACT), column(REWARD), samples_U, decoded_U.cumsum(), seconds("wall_s"), seconds("cpu_s"),
        column("staleness/mean"),
    )  # fmt: skip


def mean_curve(curves: Sequence[Curves], name: str) -> np.ndarray:
    """The mean over seeds of one of the fields, by update."""
    return np.mean([getattr(each, name) for each in curves], axis=0)


def spread(values: Sequence[float], name: str) -> Row:
    """Mean, least and most over seeds, as columns."""
    return {name: float(np.mean(values)), f"{name}_least": min(values), f"{name}_most": max(values)}
