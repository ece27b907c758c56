"""Whether a redesign costs speed, memory or steps: benchmarks of this commit beside the same ones of an earlier commit.

``BEFORE`` is checked out to a temporary folder. Each benchmark of ``FIGURES`` runs whole there and here, in turn, and
each figure is compared row by row, of our own systems alone. ``1.05`` means that this commit is 5% better: faster, or
less memory, or fewer steps. What is measured in seconds is noisy, row by row: the claim is on the median row, and the
worst row is told beside it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.earlier_commit import earlier_commit
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options

BEFORE = "ad8b6fa"


@dataclass(frozen=True)
class Figure:
    """A column of a benchmark's rows, whether more of it is better, and the least ratio that is no loss."""

    column: str
    more_is_better: bool
    least: float


@dataclass(frozen=True)
class Benchmark:
    """The columns that name a row, the figures in it, and the systems that are ours."""

    keys: tuple[str, ...]
    figures: tuple[Figure, ...]
    ours: tuple[str, ...] = ()


SECONDS, EXACT = 0.95, 0.99
BENCHMARKS = {
    "update_memory": Benchmark(("against", "G", "V", "groups"), (Figure("peak_mib", False, EXACT),)),
    "kv_memory": Benchmark(
        ("lengths", "prompt", "G", "limit"),
        (Figure("rollout_mib", False, EXACT), Figure("kv_mib", False, EXACT)),
        ("lit_grpo",),
    ),
    "plans": Benchmark(
        ("lengths", "predictions"),
        tuple(Figure(plan, False, EXACT) for plan in ("lpt", "short_last", "balanced", "infinite_sampling")),
    ),
    "modes": Benchmark(
        ("system", "mode"),
        (Figure("useful_tokens_per_step", True, EXACT), Figure("useful_tokens_per_cpu_s", True, SECONDS)),
    ),
    "decode_throughput": Benchmark(
        ("policy", "G", "rows", "system"),
        (Figure("tokens_per_s", True, SECONDS), Figure("steps", False, EXACT)),
        ("default", "default, larger error"),
    ),
    "vllm_plan": Benchmark(
        ("workload", "epoch"), (Figure("our_over_fewest", False, EXACT), Figure("time_ratio", True, SECONDS))
    ),
    "update_vs_trl": Benchmark(
        ("work", "checkpointing", "micro-batch"),
        (Figure("tokens_per_s", True, SECONDS), Figure("peak_mib", False, EXACT)),
        ("lit_grpo",),
    ),
}


def main(options: Options) -> int:
    """Run all of it, and compare; what is measured so far is printed as it comes."""
    rows: list[Row] = []
    claims: list[Claim] = []
    with earlier_commit(BEFORE) as before:
        if before is None:
            return int(not options.quick)
        for name in ("plans",) if options.quick else BENCHMARKS:
            then, now = (
                _run(name, root, before.parent / f"{side}.json", options.quick)
                for side, root in (("then", before), ("now", ROOT))
            )
            for figure in BENCHMARKS[name].figures:
                row = _compared(name, BENCHMARKS[name], figure, then, now)
                note(str(row))
                rows.append(row)
                text = f"{name}: {figure.column} of {row['rows']} rows, how much better than {BEFORE}, median row"
                claims.append(Claim(text, float(row["median"]), ">=", figure.least))
    return finish("beside_commit", options, {"before": BEFORE}, rows, claims)


def _run(name: str, root: Path, output: Path, quick: bool) -> list[Row]:
    """Run a benchmark in a checkout; return its rows. It may miss claims of its own, which end it with 1."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--output", str(output)] + ["--quick"] * quick
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if not output.exists():
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(output.read_text())["rows"]


def _compared(name: str, benchmark: Benchmark, figure: Figure, then: list[Row], now: list[Row]) -> Row:
    """Say how much better each row's figure is now: the least, the median and the most."""

    def by_key(rows: list[Row]) -> dict[tuple[str | int | float | None, ...], float]:
        chosen = (row for row in rows if not benchmark.ours or row.get("system") in benchmark.ours)
        return {
            tuple(row.get(key) for key in benchmark.keys): float(row[figure.column])
            for row in chosen
            if row.get(figure.column)
        }

    old, new = by_key(then), by_key(now)
    if old.keys() != new.keys() or not old:
        raise SystemExit(f"{name}: the two commits have rows of different names: {old.keys() ^ new.keys()}.")
    ratios = [new[key] / old[key] if figure.more_is_better else old[key] / new[key] for key in old]
    return {
        "benchmark": name,
        "figure": figure.column,
        "rows": len(ratios),
        "least": min(ratios),
        "median": statistics.median(ratios),
        "most": max(ratios),
    }


if __name__ == "__main__":
    sys.exit(main(parse_options(__doc__ or "")))
