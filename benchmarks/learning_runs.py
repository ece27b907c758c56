"""Whole runs of a shipped configuration in empty folders: side by side on a core each, or alone on all cores.

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
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Protocol

import numpy as np
import yaml

from benchmarks.learning_callbacks import CLOCK, Clock
from benchmarks.report import ROOT, Options, Row, note
from lit_grpo.cli.command_line import run as lit_grpo

if TYPE_CHECKING:
    from collections.abc import Iterator

    import lightning.pytorch as pl

EXACT, REWARD = "val/pass@1", "reward"


@dataclass(frozen=True)
class LearningRun:
    """One run: ``config`` is a name of ``configs/``, ``arguments`` stand after it; it takes ``callbacks`` along.

    Of those that are not ``alone`` as many are run at a time as there are cores, up to two.
    """

    name: str
    config: str
    arguments: tuple[str, ...]
    callbacks: tuple[type[pl.Callback], ...] = ()
    alone: bool = False
    clock: type[Clock] = Clock

    def words(self, folder: Path) -> list[str]:
        """The arguments of the Python process in ``folder``."""
        callbacks = [{"class_path": f"{kind.__module__}.{kind.__name__}"} for kind in (self.clock, *self.callbacks)]
        (folder / "clocked.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
        words = ["-m", "lit_grpo", "fit", "--config", str(ROOT / "configs" / f"{self.config}.yaml")]
        return [*words, "--config", "clocked.yaml", "--trainer.enable_progress_bar", "false", *self.arguments]


class Run(Protocol):
    """Anything that is run in a folder of its own."""

    @property
    def name(self) -> str:
        """Its folder."""
        ...

    @property
    def alone(self) -> bool:
        """Whether it has all cores, after the others."""
        ...

    def words(self, folder: Path) -> list[str]:
        """The arguments of the Python process in ``folder``."""
        ...


@dataclass(frozen=True)
class Curves:
    """Curves of a run, by update from 0 on; NaN where they were not measured.

    ``exact_U`` is held-out exact match, ``reward_U`` and ``length_U`` the mean reward and length of the batch that led
    to the update, ``open_U`` the prompts that stayed open after it, ``flat_U`` the share of its groups without a
    difference, ``samples_U`` and ``tokens_U`` what has been trained on and decoded so far; seconds are without
    validations. ``logged`` are all metrics by name.
    """

    exact_U: np.ndarray
    reward_U: np.ndarray
    samples_U: np.ndarray
    tokens_U: np.ndarray
    wall_s_U: np.ndarray
    cpu_s_U: np.ndarray
    staleness_U: np.ndarray
    length_U: np.ndarray
    open_U: np.ndarray
    flat_U: np.ndarray
    logged: Mapping[str, np.ndarray] = field(default_factory=dict)


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
    """Run those that have not been run, and return what each has come to."""
    train_all(runs, folder)
    return {run.name: read_curves(folder / run.name) for run in runs}


def train_all(runs: Sequence[Run], folder: Path) -> None:
    """Run those that have not been run, in the order given, and those that are to be alone after the others."""
    together = [run for run in runs if not run.alone]
    alone = [run for run in runs if run.alone]
    every = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    _run_on([{core} for core in every[:2]] or [set()], together, folder)
    _run_on([set(every)], alone, folder)


def _run_on(places: Sequence[Collection[int]], runs: Sequence[Run], folder: Path) -> None:
    """Run them on so many places, which are sets of cores, at a time."""
    free: Queue[Collection[int]] = Queue()
    for place in places:
        free.put(place)

    def one(run: Run) -> None:
        if not (folder / run.name / "done").exists():
            place = free.get()
            began = time.perf_counter()
            try:
                _run(run, folder / run.name, place)
            finally:
                free.put(place)
            note(f"{run.name}: {time.perf_counter() - began:.0f} s")

    with ThreadPoolExecutor(len(places)) as pool:
        list(pool.map(one, runs))


def _run(run: Run, folder: Path, cores: Collection[int]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, *run.words(folder)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
        if cores:
            os.sched_setaffinity(process.pid, cores)
        if process.wait():
            raise RuntimeError(f"{run.name} failed:\n{(folder / 'output.txt').read_text()[-6000:]}")
    for checkpoints in folder.glob("runs/*/checkpoints"):  # gigabytes each, which nobody goes on from
        shutil.rmtree(checkpoints)
    (folder / "done").touch()


def train_here(run: LearningRun, folder: Path) -> Curves:
    """Train in this process as the command line does, unless it has been done; return what it has come to.

    Where the command line refuses the run, its sentence is in ``output.txt`` of the folder.

    Raises:
        SystemExit: The command line refuses the run.
    """
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.perf_counter()
        with chdir(folder), Path("output.txt").open("w") as output, redirect_stdout(output), redirect_stderr(output):
            lit_grpo(run.words(folder)[2:])
        (folder / "done").touch()
        note(f"{run.name}: {time.perf_counter() - began:.0f} s")
    return read_curves(folder)


def read_curves(folder: Path) -> Curves:
    """Read what a run has left."""
    (metrics,) = folder.glob("runs/*/metrics.csv")
    with metrics.open(newline="") as file:
        logged: dict[int, dict[str, str]] = {0: {}}  # where nothing was validated before the first update
        logged |= {int(float(row["step"])): row for row in csv.DictReader(file)}
    clock = {row["update"]: row for row in map(json.loads, (folder / CLOCK).read_text().splitlines())}

    def column(name: str) -> np.ndarray:
        return np.array([float(logged[update].get(name) or "nan") for update in sorted(logged)])

    def seconds(name: str) -> np.ndarray:
        return np.array([clock[update][name] if update else 0.0 for update in sorted(logged)])

    decoded_U = np.nan_to_num(column("rollout/tokens")) + np.nan_to_num(column("scope/teacher_tokens"))
    samples_U = np.nan_to_num(column("num_completions"))
    return Curves(
        column(EXACT), column(REWARD), samples_U, decoded_U.cumsum(), seconds("wall_s"), seconds("cpu_s"),
        column("staleness/mean"), column("completions/mean_length"), column("rollout/open_prompts"),
        column("frac_reward_zero_std"), {name: column(name) for row in logged.values() for name in row},
    )  # fmt: skip


def mean_curve(curves: Sequence[Curves], name: str) -> np.ndarray:
    """The mean over seeds of one of the fields, by update."""
    return np.mean([getattr(each, name) for each in curves], axis=0)


def spread(values: Sequence[float], name: str) -> Row:
    """Mean, least and most over seeds, as columns."""
    return {name: float(np.mean(values)), f"{name}_least": min(values), f"{name}_most": max(values)}
