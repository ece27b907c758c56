"""Gradient norms with ``capo`` beside plain GRPO at the learning rate of CAPO's paper, 1.5e-5, update by update.

Both runs of a task have the same seed, the same prompts and a constant learning rate. As long as no token is cut, they
are the same run; after a cut they sample different completions. Norms are those before clipping.
"""

from __future__ import annotations

import csv
import math
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.learning_runs import LearningRun, train_here
from benchmarks.report import Claim, Row, finish, parse_options

LEARNING_RATE, UPDATES = 1.5e-5, 12
TASKS = ("arithmetic", "knights")


def main() -> int:
    """Train with and without; compare the norms."""
    assert __doc__ is not None
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    tasks, updates = (TASKS[:1], 2) if options.quick else (TASKS, UPDATES)
    rows: list[Row] = []
    for task in tasks:
        plain, cut = (logged(task, updates, plugins, quick=options.quick) for plugins in ("[]", "[capo]"))
        for update, (without, with_capo) in enumerate(zip(plain, cut, strict=True), start=1):
            kept = float(with_capo["update/kept_share"])
            norms = float(without["grad_norm"]), float(with_capo["grad_norm"])
            rows.append({"task": task, "update": update, "grpo": norms[0], "capo": norms[1], "kept_share": kept})
    uncut = [float(row["capo"]) / float(row["grpo"]) for row in rows if row["kept_share"] == 1]
    claims = [
        Claim("largest |norm with capo / norm without - 1| of updates that cut nothing",
              max((abs(ratio - 1) for ratio in uncut), default=math.nan), "<=", 0.1),
        Claim("least share of tokens that is learnt from (the paper cuts less than 8%)",
              min(float(row["kept_share"]) for row in rows), ">=", 0.92),
    ]  # fmt: skip
    return finish("capo_norms", options, {"learning_rate": LEARNING_RATE, "updates": updates}, rows, claims)


def logged(task: str, updates: int, plugins: str, quick: bool) -> list[dict[str, str]]:
    """Train; return what was logged of each update."""
    fields = {
        "trainer.max_steps": updates,
        "trainer.val_check_interval": updates,
        "data.batch_size": 2 if quick else 8,
        "model.num_generations": 8,
        "model.optimizer.init_args.lr": LEARNING_RATE,
        "model.lr_scheduler.init_args.end_factor": 1.0,
        "data.validation.init_args.num_rows": 8,
        "data.eval_batch_size": 8,
        "rollout.plugins": plugins,
    }
    run = LearningRun("run", task, tuple(word for name, value in fields.items() for word in (f"--{name}", str(value))))
    with tempfile.TemporaryDirectory() as folder:
        train_here(run, Path(folder) / run.name)
        (metrics,) = (Path(folder) / run.name).glob("runs/*/metrics.csv")
        with metrics.open(newline="") as file:
            return [row for row in csv.DictReader(file) if row["grad_norm"]]


if __name__ == "__main__":
    sys.exit(main())
