"""`evaluate` beside published figures: the policies before and after training on the demo and on word problems.

Two published runs are made again, with their settings and seed. Then `python -m lit_grpo evaluate` scores base and run,
and its figures are held against the published ones and against what the run itself has logged in its validations.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import RESULTS, ROOT, Claim, Options, Row, finish, note, parse_options

TOLERANCE = 1e-6  # metrics.csv has seven digits


@dataclass(frozen=True)
class Published:
    """A run whose greedy exact match is published.

    Args:
        config: The run's configuration.
        base: The policy before training.
        result: The published result file.
        system: The system of its row; empty if it has one alone.
        names: The row's fields with exact match before and after training.
        words: Arguments of the run beside the configuration.
        updates: Number of updates.
    """

    config: str
    base: str
    result: str
    system: str
    names: tuple[str, str]
    words: tuple[str, ...]
    updates: int

    def figures(self) -> tuple[float, float]:
        """Exact match before and after training with seed 0."""
        rows = json.loads((RESULTS / self.result).read_text())["rows"]
        (row,) = [row for row in rows if row["seed"] == 0 and row.get("system", "") == self.system]
        return row[self.names[0]], row[self.names[1]]


DEMO = Published("arithmetic", "tiny", "demo-2026-11-22.json", "", ("at 0", "at 60"), (), 60)
WORDS = ("--trainer.max_steps", "10", "--model.lr_scheduler.init_args.total_iters", "10")
WORD_PROBLEMS = Published(
    "word_problems", "smollm2", "real_model_learning-2026-11-25.json", "lit_grpo", ("start", "end"), WORDS, 10
)
QUICK = ("--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--data.validation.init_args.num_rows", "16",
         "--model.num_generations", "4")  # fmt: skip


def main(options: Options) -> int:
    """Train, evaluate, and compare."""
    rows: list[Row] = []
    claims: list[Claim] = []
    for run in (DEMO,) if options.quick else (DEMO, WORD_PROBLEMS):
        published = run.figures()
        with tempfile.TemporaryDirectory() as folder:
            words = QUICK if options.quick else run.words
            config = str(ROOT / "configs" / f"{run.config}.yaml")
            _command(folder, "fit", "--config", config, "--trainer.enable_progress_bar", "false", *words)
            logged = _logged(Path(folder, "runs", run.config, "metrics.csv"))
            _command(folder, "evaluate", run.base, f"runs/{run.config}", "--samples", "4")
            found = json.loads(Path(folder, "runs", run.config, "evaluation", "evaluation.json").read_text())
        (comparison,) = found["comparisons"]
        for when, policy, told, own in zip(("before", "after"), found["policies"], published, logged, strict=True):
            greedy, sampled = policy["figures"]["greedy"]["accuracy"], policy["figures"]["sampled"]
            rows.append({
                "run": run.config, "policy": when, "updates": 0 if when == "before" else run.updates,
                "rows": found["conditions"]["num_rows"], "published": told, "validation": own,
                "greedy": greedy["value"], "greedy_low": greedy["low"], "greedy_high": greedy["high"],
                "pass@1": sampled["pass@1"]["value"], "pass@4": sampled["pass@4"]["value"],
                "majority@4": sampled["majority@4"]["value"],
                **({} if when == "before" else {"p_greedy": comparison["greedy"]["p"]}),
            })  # fmt: skip
            note(str(rows[-1]))
            name = f"{run.config} {when} training"
            claims.append(Claim(f"{name}: difference to the validation", abs(greedy["value"] - own), "<=", TOLERANCE))
            if when == "before":
                off, text = abs(greedy["value"] - told), "difference to the published figure"
            else:
                off, text = (
                    max(greedy["low"] - told, told - greedy["high"], 0.0),
                    "published figure outside the interval by",
                )
            claims.append(Claim(f"{name}: {text}", off, "<=", TOLERANCE))
    settings: Row = {"seed": 0, "threads": os.environ.get("OMP_NUM_THREADS", "all")}
    return finish("published_figures", options, settings, rows, claims)


def _command(folder: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "lit_grpo", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _logged(metrics: Path) -> Sequence[float]:
    """Return pass@1 of the first and of the last validation."""
    with metrics.open(newline="") as file:
        values = [float(row["val/pass@1"]) for row in csv.DictReader(file) if row.get("val/pass@1")]
    return values[0], values[-1]


if __name__ == "__main__":
    sys.exit(main(parse_options(__doc__ or "")))
