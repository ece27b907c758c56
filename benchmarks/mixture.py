"""Two data sets in one run, with a method of its own for each: ``configs/mixture.yaml``, three seeds.

Held-out exact match of both data sets before and after training on both, and after training on each of them alone for
as many updates with as many prompts of that data set.
"""

from __future__ import annotations

import json
import os
import sys

from benchmarks.demo import train
from benchmarks.report import Claim, Options, Row, finish, note, parse_options

SEEDS = (0, 1, 2)
DATASETS = ("exact", "rough")
BATCH = 32
"""Prompts of an update, half of each data set."""


def main(options: Options) -> int:
    """Run the seeds one after another, each on both data sets and on each alone."""
    seeds, steps = (SEEDS[:1], ["--trainer.max_steps", "2"]) if options.quick else (SEEDS, [])
    batch = 4 if options.quick else BATCH
    rows: list[Row] = []
    for seed in seeds:
        for trained_on in (DATASETS, *((name,) for name in DATASETS)):
            weights = json.dumps({name: float(name in trained_on) for name in DATASETS})
            size = str(batch // 2 * len(trained_on))
            arguments = ["--seed_everything", str(seed), "--data.mixture.weights", weights, "--data.batch_size", size]
            seconds, logged = train(["mixture"], [*arguments, *steps])
            validated = [row for row in logged if row.get("val/datasets/exact/pass@1")]
            row: Row = {"seed": seed, "trained on": " and ".join(trained_on), "minutes": round(seconds / 60, 2)}
            for name in DATASETS:
                for when, values in (("before", validated[0]), ("after", validated[-1])):
                    row[f"{name} {when}"] = float(values[f"val/datasets/{name}/pass@1"])
            rows.append(row)
            note(str(row))
    settings: Row = {"threads": os.environ.get("OMP_NUM_THREADS", "all"), "prompts per update": batch}
    return finish("mixture", options, settings, rows, _claims(rows))


def _claims(rows: list[Row]) -> list[Claim]:
    both = [row for row in rows if row["trained on"] == " and ".join(DATASETS)]
    return [
        Claim(
            f"{name}: gain in held-out exact match by training on both data sets, lowest of the seeds",
            min(float(row[f"{name} after"]) - float(row[f"{name} before"]) for row in both),
            ">=",
            0.1,
        )
        for name in DATASETS
    ]


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
