"""Whether a run learns the same as an earlier commit's, figure by figure, on the tasks that ship.

``BEFORE`` is checked out to a temporary folder. Both take the first updates of each task with each seed, in turn. All
figures that both log are compared, but for times, memory and predicted lengths. Tokens do not depend on the order in
which completions are decoded, but the rounding of their log-probs does, in the seventh digit: where tools and
environments answer (``calculator``, ``catch``), the clock decides the order, in two runs of one commit too. Differences
are relative to the largest value that the figure has in the run.
"""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.earlier_commit import earlier_commit
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options

BEFORE: dict[str, str] = dict.fromkeys(("arithmetic", "knights", "calculator", "catch"), "5c28c954")
SEEDS, UPDATES = 3, 6
MEASURED = ("time/", "perf/", "memory/", "lengths/", "environments/waiting_share", "epoch", "step", "num_tokens")
"""What may differ; ``num_tokens`` counts prompts too since e5a52035."""
ORDER = ("rollout/",)
"""Figures of the order in which completions were decoded, which a length predictor decides."""


def main(options: Options) -> int:
    """Run all of it, and compare."""
    tasks, seeds, updates = (["arithmetic"], 1, 2) if options.quick else ([*BEFORE], SEEDS, UPDATES)
    rows: list[Row] = []
    for task in tasks:
        with earlier_commit(BEFORE[task]) as before:
            if before is None:
                return int(not options.quick)
            for seed in range(seeds):
                then, now = (
                    _run(root, before.parent / name, task, seed, updates)
                    for name, root in (("then", before), ("now", ROOT))
                )
                rows.append({"task": task, "before": BEFORE[task], "seed": seed, **_compared(then, now)})
                note(str(rows[-1]))
    claims = [
        Claim(
            "figures of rewards, lengths and validation that differ",
            sum(int(row["exact_differ"]) for row in rows),
            "<=",
            0,
        ),
        Claim(
            "largest relative difference of the others",
            max(float(row["largest_difference"]) for row in rows),
            "<=",
            1e-2,
        ),
    ]
    return finish("same_curves", options, {"updates": updates}, rows, claims)


EXACT = ("reward", "completions/mean_length", "completions/max_length", "val/", "advantages/", "rewards/")


def _run(root: Path, folder: Path, task: str, seed: int, updates: int) -> dict[str, dict[str, str]]:
    """Run a task; return what each step has logged."""
    name = f"{task}-{seed}"
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "lit_grpo", "fit", "--config", str(root / "configs" / f"{task}.yaml")]
    command += ["--seed_everything", str(seed), "--run.name", name]
    command += ["--trainer.max_steps", str(updates), "--trainer.val_check_interval", str(max(updates // 2, 1))]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    steps: dict[str, dict[str, str]] = {}
    with (folder / "runs" / name / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            steps.setdefault(row["step"], {}).update({key: value for key, value in row.items() if value})
    return steps


def _compared(then: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> Row:
    """Count figures that are the same, and those that are not."""
    same = exact_differ = order_differs = others_differ = 0
    largest, worst = 0.0, ""
    scales: dict[str, float] = {}
    for values in then.values():
        for key, value in values.items():
            scales[key] = max(scales.get(key, 1e-9), abs(float(value)))
    for step, values in then.items():
        for key in values.keys() & now.get(step, {}).keys():
            if key.startswith(MEASURED):
                continue
            one, two = values[key], now[step][key]
            if one == two:
                same += 1
            elif key.startswith(ORDER):
                order_differs += 1
            elif key.startswith(EXACT):
                exact_differ += 1
            else:
                others_differ += 1
                if not key.startswith("sampling/"):  # these are rounding errors themselves
                    gap = abs(float(one) - float(two)) / scales[key]
                    gap = gap if math.isfinite(gap) else math.inf
                    largest, worst = max((largest, worst), (gap, key))
    return {
        "same": same,
        "exact_differ": exact_differ,
        "order_differs": order_differs,
        "others_differ": others_differ,
        "largest_difference": largest,
        "of": worst,
    }


if __name__ == "__main__":
    sys.exit(main(parse_options(__doc__ or "")))
