"""Memory over thousands of updates: what a small run on the demo's task holds as it goes on, with all of its callbacks.

``fit`` runs in a process of its own, and what is resident of it is read from the operating system as its version of the
policy rises. A leak of a kilobyte an update is three megabytes after 3,000 of them.
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.report import ROOT, Claim, Options, Row, finish, note, parse_options

UPDATES, EVERY, WARM_UP = 3000, 100, 500
ARGUMENTS = (
    *("fit", "--config", "arithmetic", "--run.name", "long", "--validate_first", "false"),
    *("--trainer.val_check_interval", "500", "--checkpoint.every_n_updates", "200"),
    *("--data.batch_size", "4", "--model.num_generations", "4", "--model.sampling.max_tokens", "32"),
    *("--model.generator.num_slots", "16", "--model.optimizer.lr", "1e-5"),
    *("--data.train.num_rows", "64", "--data.validation.num_rows", "16", "--data.eval_batch_size", "16"),
    *("--rollout_timeline.every_n_updates", "500", "--sample_logger.every_n_updates", "200"),
)


def main(options: Options) -> int:
    """Run, and read what is resident after every so many updates."""
    updates, every = (20, 5) if options.quick else (UPDATES, EVERY)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with (folder / "said").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "lit_grpo", *ARGUMENTS, "--trainer.max_steps", str(updates)],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            resident, began = psutil.Process(process.pid), time.perf_counter()
            while process.poll() is None:
                done = _updates(folder / "runs" / "long" / "metrics.csv")
                if done >= every * (len(rows) + 1):
                    try:
                        mib = resident.memory_info().rss / 2**20
                    except psutil.NoSuchProcess:
                        break
                    rows.append({"update": done, "resident_mib": mib, "seconds": time.perf_counter() - began})
                    note(f"update {done}: {mib:.0f} MiB, {rows[-1]['seconds']:.0f} s")
                time.sleep(0.1)
        if process.wait():
            raise SystemExit((folder / "said").read_text(errors="replace")[-2000:])
    warm_up = 0 if options.quick else WARM_UP
    later = [(float(row["update"]), float(row["resident_mib"])) for row in rows if float(row["update"]) >= warm_up]
    slope = statistics.linear_regression(*zip(*later, strict=True)).slope
    claims = [Claim("MiB that a further thousand updates hold, after the first 500", 1000 * slope, "<=", 5.0)]
    return finish("long_run", options, {"updates": updates, "arguments": " ".join(ARGUMENTS)}, rows, claims)


def _updates(path: Path) -> int:
    """The last update that the run has logged."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        header = file.readline().decode()
        file.seek(max(path.stat().st_size - 20_000, len(header)))
        lines = file.read().decode(errors="replace").splitlines()
    place = next(csv.reader([header])).index("step")
    numbers = [row[place] for row in csv.reader(lines[-20:]) if len(row) > place]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


if __name__ == "__main__":
    sys.exit(main(parse_options(__doc__ or "")))
