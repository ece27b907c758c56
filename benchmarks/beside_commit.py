"""Whether a redesign costs speed, memory or steps: benchmarks of this commit beside the same ones of an earlier commit.

``BEFORE`` is checked out to a temporary folder. Each benchmark of ``BENCHMARKS`` runs whole there and here; those that
measure seconds run there, here, here and there, and the lower of two times counts. Each figure is compared row by row,
of our own systems only. ``1.05`` means that this commit is 5% better: faster, or less memory, or fewer steps. Seconds
are noisy, row by row: the claim is on the median row, and the worst row stands beside it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.earlier_commit import earlier_commit
from benchmarks.report import ROOT, Claim, Options, Row, finish, note, options_parser

BEFORE = "5c28c954"


@dataclass(frozen=True)
class Figure:
    """A column of a benchmark's rows, whether more of it is better, and the lowest ratio that is no loss.

    ``was`` is the column's name in the earlier commit, if that was another.
    """

    column: str
    more_is_better: bool
    least: float
    was: str = ""


@dataclass(frozen=True)
class Benchmark:
    """The columns that name a row, the figures in it, and the systems that are ours.

    ``order`` says in which order the two commits run. ``in_claims`` says that the figures are the claims' values.
    """

    keys: tuple[str, ...]
    figures: tuple[Figure, ...]
    ours: tuple[str, ...] = ()
    order: tuple[str, ...] = ("then", "now", "now", "then")
    in_claims: bool = False


SECONDS, EXACT = 0.95, 0.99
ONCE = ("then", "now")
BENCHMARKS = {
    "plans": Benchmark(
        ("lengths", "predictions"),
        tuple(Figure(plan, False, EXACT) for plan in ("lpt", "short_last", "balanced", "infinite_sampling")),
        order=ONCE,
    ),
    "planner_cost": Benchmark(("text",), (Figure("value", False, SECONDS),), in_claims=True),
    "turns": Benchmark(("system",), (Figure("seconds", False, SECONDS),), ("lit_grpo", "lit_grpo in lock-step")),
    "decode_throughput": Benchmark(
        ("policy", "G", "rows", "system"),
        (Figure("tokens_per_s", True, SECONDS), Figure("steps", False, EXACT)),
        ("default", "default, larger error"),
    ),
    "vllm_plan": Benchmark(
        ("workload", "epoch"), (Figure("our_over_fewest", False, EXACT), Figure("time_ratio", True, SECONDS))
    ),
    "weight_sync": Benchmark(("case",), (Figure("sync_s", False, SECONDS, was="files_s"),)),
    "shared_prefix": Benchmark(
        ("prompt_tokens",), (Figure("shared_s", False, SECONDS), Figure("plain_s", False, SECONDS))
    ),
    "update_memory": Benchmark(("against", "G", "V", "groups"), (Figure("peak_mib", False, EXACT),), order=ONCE),
    "sequence_parallel": Benchmark(
        ("completion tokens", "ranks"), (Figure("peak_mib", False, EXACT), Figure("seconds_a_row", False, SECONDS))
    ),
    "update_vs_trl": Benchmark(
        ("work", "checkpointing", "micro-batch"),
        (Figure("tokens_per_s", True, SECONDS), Figure("above_state_mib", False, EXACT)),
        ("lit_grpo",),
        order=ONCE,  # each run takes its own steps by turns with TRL's
    ),
}


def main(options: Options, names: Sequence[str]) -> int:
    """Run these benchmarks, and compare; what is measured so far is printed as it comes."""
    rows: list[Row] = []
    claims: list[Claim] = []
    with earlier_commit(BEFORE) as before:
        if before is None:
            return int(not options.quick)
        roots = {"then": before, "now": ROOT}
        for name in ("plans",) if options.quick else names:
            benchmark = BENCHMARKS[name]
            runs: dict[str, list[list[Row]]] = {"then": [], "now": []}
            for side in benchmark.order:
                output = before.parent / f"{side}.json"
                runs[side].append(_run(name, roots[side], output, options.quick, benchmark.in_claims))
            for figure in benchmark.figures:
                row = _compared(name, benchmark, figure, runs["then"], runs["now"])
                note(str(row))
                rows.append(row)
                text = f"{name}: {figure.column} of {row['rows']} rows, how much better than {BEFORE}, median row"
                claims.append(Claim(text, float(row["median"]), ">=", figure.least))
    settings: Row = {"before": BEFORE, "benchmarks": " ".join(names)}
    program = "beside_commit" if names == [*BENCHMARKS] else f"beside_commit --only {' '.join(names)}"
    return finish("beside_commit", options, settings, rows, claims, program)


def _run(name: str, root: Path, output: Path, quick: bool, in_claims: bool) -> list[Row]:
    """Run a benchmark in a checkout; return its rows. It may miss claims of its own, which end it with 1."""
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--output", str(output)] + ["--quick"] * quick
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if not output.exists():
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(output.read_text())["claims" if in_claims else "rows"]


def _compared(name: str, benchmark: Benchmark, figure: Figure, then: list[list[Row]], now: list[list[Row]]) -> Row:
    """Say how much better each row's figure is now: the lowest, the median and the highest ratio."""
    best = max if figure.more_is_better else min

    def by_key(runs: list[list[Row]]) -> dict[tuple[str | int | float | None, ...], float]:
        values: dict[tuple[str | int | float | None, ...], list[float]] = {}
        for row in (row for run in runs for row in run):
            value = row.get(figure.column, row.get(figure.was))
            if value and (not benchmark.ours or row.get("system") in benchmark.ours):
                values.setdefault(tuple(row.get(key) for key in benchmark.keys), []).append(float(value))
        return {key: best(repeated) for key, repeated in values.items()}

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
    parser = options_parser(__doc__ or "")
    parser.add_argument(
        "--only", nargs="+", choices=[*BENCHMARKS], default=[*BENCHMARKS], help="which benchmarks to run"
    )
    given = vars(parser.parse_args())
    only = given.pop("only")
    sys.exit(main(Options(**given), only))
