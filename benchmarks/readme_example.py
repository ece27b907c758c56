"""README.md's example with SmolLM2-135M-Instruct as it is written, with three seeds, then README.md's ``evaluate``."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options

SEEDS = (0, 1, 2)
POLICY = "smollm2"
QUICK = {"max_steps=10": "max_steps=1", "num_generations=8": "num_generations=2", "rows[:64]": "rows[:4]"}


def main(options: Options) -> int:
    """Train and evaluate with each seed."""
    (example,) = re.findall(r"```python\n(import random\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    policy = options.policy or POLICY
    changes = {f'"{POLICY}"': repr(policy), **(QUICK if options.quick else {})}
    for written, changed in changes.items():
        assert written in example, f"README.md's example has no {written}"
        example = example.replace(written, changed)
    rows: list[Row] = []
    for seed in SEEDS[:1] if options.quick else SEEDS:
        rows.append({"seed": seed, **_figures(example.replace("max_steps=", f"seed={seed}, max_steps="), policy)})
        note(str(rows[-1]))
    gained = min(float(row["difference"]) for row in rows)
    claims = [Claim("points that evaluate finds gained, lowest of the seeds", 100 * gained, ">=", 10.0)]
    settings: Row = {"threads": os.environ.get("OMP_NUM_THREADS", "all")}
    return finish("readme_example", options, settings, rows, claims)


def _figures(example: str, policy: str) -> Row:
    """Train and evaluate in a folder of its own; the figures of pass@1 are fractions."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "example.py").write_text(example)
        began, began_cpu = time.monotonic(), _cpu_s()
        _run(folder, "example.py")
        wall_s, cpu_s = time.monotonic() - began, _cpu_s() - began_cpu
        run = Path(folder, "runs", "grpo")
        with (run / "metrics.csv").open(newline="") as file:
            greedy = {row["step"]: float(row["val/pass@1"]) for row in csv.DictReader(file) if row.get("val/pass@1")}
        _run(folder, "-m", "lit_grpo", "evaluate", policy, "runs/grpo")
        found = json.loads((run / "evaluation" / "evaluation.json").read_text())
    before, after = (each["figures"]["sampled"]["pass@1"]["value"] for each in found["policies"])
    gain = found["comparisons"][0]["greedy"]
    return {
        **{f"greedy_{step}": value for step, value in greedy.items()},
        **{name: gain[name] for name in ("difference", "low", "high")},
        "sampled_before": before, "sampled_after": after, "cpu_s": cpu_s, "wall_s": wall_s,
    }  # fmt: skip


def _run(folder: str, *words: str) -> None:
    subprocess.run([sys.executable, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _cpu_s() -> float:
    """Return the CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main(parse_options(__doc__ or "")))
