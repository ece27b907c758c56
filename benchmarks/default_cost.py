"""Cost of a change to the default: the synchronous demo of this tree and of another checkout, in alternation.

``BEFORE=FOLDER python -m benchmarks.default_cost`` takes the other checkout from the environment; a quick form compares
this tree with itself. Each run is the demo's first updates by the command line, on one core and one thread, without
validation; the order within a pair changes from pair to pair. What counts is the CPU time of a run and the median of
its steps, as the median over pairs of the ratio of this tree to the other; both runs of a pair see the same machine.
"""

from __future__ import annotations

import csv
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options

ARGUMENTS = ("--trainer.limit_val_batches", "0", "--trainer.enable_progress_bar", "false", "--run.name", "run")
SKIPPED = 3
"""Steps at the beginning that are left out."""


def main(options: Options) -> int:
    """Run pairs."""
    before = ROOT if options.quick else Path(os.environ.get("BEFORE", ""))
    if not (before / "lit_grpo").is_dir():
        note(f"BEFORE is {str(before)!r}, which is no checkout; set it to the folder of one.")
        return 2
    num_pairs, num_updates = (1, 2) if options.quick else (7, 40)
    pairs: list[tuple[Row, Row]] = []
    for number in range(num_pairs):
        if number % 2:
            other, one = _run(before, num_updates), _run(ROOT, num_updates)
        else:
            one, other = _run(ROOT, num_updates), _run(before, num_updates)
        pairs.append((one, other))
        note(f"here {one}, before {other}")
    rows: list[Row] = [
        {
            "pair": number,
            **{f"here_{name}": value for name, value in one.items()},
            **{f"before_{name}": value for name, value in other.items()},
        }
        for number, (one, other) in enumerate(pairs)
    ]
    claims = [
        Claim(f"{text}, here over before", _ratio(pairs, name), "<=", 1.02)
        for name, text in (("cpu_s", "CPU seconds of a run"), ("step_s", "median seconds of a step"))
    ]
    settings: Row = {"before": _commit(before), "updates": num_updates, "pairs": num_pairs, "threads": 1}
    return finish("default_cost", options, settings, rows, claims)


def _ratio(pairs: list[tuple[Row, Row]], name: str) -> float:
    return statistics.median(float(one[name]) / float(other[name]) for one, other in pairs)


def _run(tree: Path, num_updates: int) -> Row:
    """Run the demo of a checkout; return its CPU time and its median step."""
    command = [sys.executable, "-m", "lit_grpo", "fit", "--config", str(tree / "configs" / "arithmetic.yaml")]
    command += ["--trainer.max_steps", str(num_updates), *ARGUMENTS]
    with tempfile.TemporaryDirectory() as folder:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        with (Path(folder) / "runs" / "run" / "metrics.csv").open(newline="") as file:
            steps = [float(row["time/step_s"]) for row in csv.DictReader(file) if row.get("time/step_s")]
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return {"cpu_s": round(cpu_s, 2), "step_s": round(statistics.median(steps[min(SKIPPED, len(steps) - 1) :]), 4)}


def _commit(tree: Path) -> str:
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(git, cwd=tree, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
