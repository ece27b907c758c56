"""Cost of display and logging of a run: lines, samples, pictures, CSV, TensorBoard and W&B (offline).

Runs of the demo with all of them and with none go alternately, in processes of their own, on the same numbers: each
step does the same work in all of them. Left out are the first two steps, in which libraries that draw are imported
(``at_the_start_s``). Two figures: the seconds in the functions that show and log, as a share of the run with them
(``NAME_ms`` are the milliseconds of each in a step); and each step's seconds with over without, as the median over all
steps. The first is exact but for what threads of their own do; the second holds all, and the machine's noise.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options

NUM_PAIRS, NUM_UPDATES = 3, 60
Steps = list[tuple[float, dict[str, float]]]
"""Of each step, its seconds, and those in each of what shows and logs since the beginning of the run."""


def main(options: Options) -> int:
    """Run the pairs."""
    num_pairs, updates = (1, 4) if options.quick else (NUM_PAIRS, NUM_UPDATES)
    rows: list[Row] = []
    ratios: list[float] = []
    for pair in range(num_pairs):
        with_all, with_none = measure("shown", updates), measure("hidden", updates)
        pairs = zip(with_all[2:], with_none[2:], strict=True)  # before, there are the first picture and table
        ratios += [one / other for (one, _), (other, _) in pairs]
        seconds = sum(step for step, _ in with_all[2:])
        first, last = with_all[1][1], with_all[-1][1]
        each_ms = {name: 1000 * (last[name] - first.get(name, 0.0)) / len(with_all[2:]) for name in last}
        row: Row = {"pair": pair, "seconds": seconds, "at_the_start_s": sum(first.values())}
        row["share"] = (sum(last.values()) - sum(first.values())) / seconds
        rows.append(row | {f"{name}_ms": value for name, value in each_ms.items()})
        note(str(rows[-1]))
    share = statistics.median(float(row["share"]) for row in rows)
    claims = [Claim("share of a step in what shows and logs it, median over runs", share, "<=", 0.01)]
    if not options.quick:
        claims.append(Claim("a step's seconds with over without, median", statistics.median(ratios), "<=", 1.01))
    settings: Row = {"threads": os.environ.get("OMP_NUM_THREADS", "all"), "updates": updates, "steps": len(ratios)}
    return finish("display_cost", options, settings, rows, claims)


def measure(kind: str, updates: int) -> Steps:
    """Run the demo."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "steps.json"
        arguments = ["--trainer.max_steps", str(updates), "--trainer.val_check_interval", str(updates + 1)]
        if kind == "shown":
            arguments += ["--run.wandb", "offline"]
        command = [sys.executable, "-m", "benchmarks.display_cost_case", kind, str(output), *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        return [(step, shown) for step, shown in json.loads(output.read_text())]


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
