"""The speed of a run from Python beside ``python -m lit_grpo fit``, on an idle machine and beside one that is busy.

Four ways begin the same run of the tiny policy with the number of threads that torch takes by itself: ``fit``,
``lit_grpo.train``, the same where torch and numpy were imported first, and a Trainer of one's own. They take turns.
*Busy* is one process that never waits for each core. What counts is the tokens per second of a whole run, its first
update aside, as the median over rounds of the ratio to ``fit`` of the same round.
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options

WAYS = ("fit", "train", "torch first", "own Trainer")
FIT = (
    *("--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--run.name", "run"),
    *("--model.rewards", '[{"function": "exact_match"}]', "--model.num_generations", "8"),
    *("--model.sampling.max_tokens", "64", "--data.batch_size", "4"),
    *("--data.train", '{"class_path": "lit_grpo.tasks.ArithmeticRows", "init_args": {"num_rows": 64}}'),
)
THREADS = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")
LEAST = 0.9


def main(options: Options) -> int:
    """Run all ways in turn, idle and busy."""
    num_rounds, num_updates = (1, 2) if options.quick else (5, 12)
    rows: list[Row] = []
    for load in ("idle", "busy"):
        with _busy(load == "busy"):
            for number in range(num_rounds):
                for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                    rows.append({"load": load, "round": number, "way": way, **_run(way, num_updates)})
                    note(str(rows[-1]))
    claims = [
        Claim(f"tokens per second of {way} over those of fit, {load}", _ratio(rows, load, way), ">=", LEAST)
        for load in ("idle", "busy")
        for way in WAYS[1:]
    ]
    settings: Row = {"updates": num_updates, "rounds": num_rounds, "threads": "torch's default"}
    return finish("python_speed", options, settings, rows, claims)


def _ratio(rows: list[Row], load: str, way: str) -> float:
    """The median over rounds of a way's speed over that of ``fit``."""
    speeds = {(row["load"], row["round"], row["way"]): float(row["tokens_per_s"]) for row in rows}
    numbers = sorted({int(row["round"]) for row in rows})
    return statistics.median(speeds[load, number, way] / speeds[load, number, "fit"] for number in numbers)


def _run(way: str, num_updates: int) -> Row:
    """Make a run in a process and a folder of its own; return its speed."""
    command = [sys.executable, "-m", "benchmarks.python_speed_case", way, str(num_updates)]
    if way == "fit":
        command = [sys.executable, "-m", "lit_grpo", "fit", *FIT, "--trainer.max_steps", str(num_updates)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(THREADS)}
    environment["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{way} failed:\n{done.stderr[-2000:]}")
        with (Path(folder) / "runs" / "run" / "metrics.csv").open(newline="") as file:
            steps = [row for row in csv.DictReader(file) if row.get("time/step_s")][1:]
    seconds = [float(row["time/step_s"]) for row in steps]
    tokens = [float(row["time/step_s"]) * float(row["perf/tokens_per_s"]) for row in steps]
    return {"tokens_per_s": round(sum(tokens) / sum(seconds), 1), "longest_step_s": round(max(seconds), 3)}


@contextmanager
def _busy(is_busy: bool) -> Iterator[None]:
    """Keep every core busy for as long as this lasts."""
    cores = len(os.sched_getaffinity(0)) if is_busy else 0
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
