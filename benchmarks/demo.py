"""The demo, as ``make demo`` runs it: exact match on held-out exercises by update, for three seeds.

All start from the policy that comes with the package, and so from the same score, on any machine. The first seed is
then run once more, for a part of the way, to see whether it gives the same numbers again.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options

SEEDS = (0, 1, 2)
AGAIN = 20  # updates of the run that is repeated
QUICK = ["--trainer.val_check_interval", "2", "--data.train.init_args.num_rows", "64",
         "--data.validation.init_args.num_rows", "8", "--model.num_generations", "4"]  # fmt: skip
MEASURED = ("time/", "perf/", "memory/")
Logged = list[dict[str, str]]


def main(options: Options) -> int:
    """Run the seeds one after another, then the first again."""
    seeds, again = (SEEDS[:1], 2) if options.quick else (SEEDS, AGAIN)
    steps = [*QUICK, "--trainer.max_steps", "2"] if options.quick else []
    rows: list[Row] = []
    runs: dict[int, Logged] = {}
    for seed in seeds:
        seconds, runs[seed] = train(["arithmetic"], ["--seed_everything", str(seed), *steps])
        rows.append({"seed": seed, "minutes": round(seconds / 60, 2), **curve(runs[seed]), **_lengths(runs[seed])})
        note(str(rows[-1]))
    repeat = ["--seed_everything", "0", *(QUICK if options.quick else []), "--trainer.max_steps", str(again)]
    _, repeated = train(["arithmetic"], repeat)
    settings: Row = {"threads": os.environ.get("OMP_NUM_THREADS", "all"), "repeated_updates": again}
    return finish("demo", options, settings, rows, _claims(rows, _differences(runs[0], repeated, again)))


def train(configs: Sequence[str], arguments: Sequence[str]) -> tuple[float, Logged]:
    """Train in an empty folder as the command line does.

    Args:
        configs: Names of the package's configurations, each after the one before it.
        arguments: Further ones.

    Returns:
        Seconds that it took, and the rows of its metrics.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lit_grpo", "fit"]
        command += [word for config in configs for word in ("--config", str(ROOT / "configs" / f"{config}.yaml"))]
        command += ["--trainer.enable_progress_bar", "false", *arguments]
        start = time.perf_counter()
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        (metrics,) = Path(folder).glob("runs/*/metrics.csv")
        with metrics.open(newline="") as file:
            return seconds, list(csv.DictReader(file))


def curve(logged: Logged) -> dict[str, float]:
    """Held-out exact match by update."""
    return {f"at {int(float(row['step']))}": float(row["val/pass@1"]) for row in logged if row.get("val/pass@1")}


def _lengths(logged: Logged) -> dict[str, float]:
    updates = [row for row in logged if row.get("completions/mean_length")]
    means = [float(row["completions/mean_length"]) for row in updates]
    longest = max(float(row["completions/max_length"]) for row in updates)
    return {"mean_length": sum(means) / len(means), "max_length": longest}


def _differences(one: Logged, other: Logged, updates: int) -> int:
    """Return the number of metrics that differ up to an update, without times and memory."""
    pairs = zip(one[: updates + 1], other[: updates + 1], strict=True)
    return sum(a[name] != b.get(name, "") for a, b in pairs for name in a if not name.startswith(MEASURED))


def _claims(rows: list[Row], differences: int) -> list[Claim]:
    starts = [float(row["at 0"]) for row in rows]
    ends = [float(row[max(row, key=_update)]) for row in rows]
    ratios = [float(row["max_length"]) / float(row["mean_length"]) for row in rows]
    return [
        Claim("held-out exact match before training, range over the seeds", max(starts) - min(starts), "<=", 0.0),
        Claim("held-out exact match after training, lowest of the seeds", min(ends), ">=", 0.9),
        Claim("longest completion over the mean, lowest of the seeds", min(ratios), ">=", 4.0),
        Claim("numbers of the first seed that differ when it is run again", differences, "<=", 0.0),
    ]


def _update(column: str) -> int:
    return int(column.removeprefix("at ")) if column.startswith("at ") else -1


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
