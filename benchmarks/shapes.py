"""Held-out accuracy of the task of pictures, ``--config shapes``, by update: three seeds."""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.learning_runs import LearningRun, kept_runs, run_all
from benchmarks.report import Claim, Options, Row, finish, parse_options

SEEDS, MOST_AT_FIRST, LEAST_AT_LAST = (0, 1, 2), 0.40, 0.85
QUICK = ("--trainer.max_steps", "1", "--trainer.val_check_interval", "1", "--data.validation.init_args.num_rows", "8")


def main(options: Options) -> int:
    """Train with each seed, and judge."""
    seeds = SEEDS[:1] if options.quick else SEEDS
    more = QUICK if options.quick else ()
    runs = [LearningRun(f"seed-{seed}", "shapes", ("--seed_everything", str(seed), *more)) for seed in seeds]
    rows: list[Row] = []
    with kept_runs("shapes", options) as folder:
        for name, curves in run_all(runs, folder).items():
            known = np.flatnonzero(~np.isnan(curves.exact_U))
            row: Row = {f"update {update}": round(float(curves.exact_U[update]), 4) for update in known}
            rows.append({"run": name, **row, "cpu_s": round(float(curves.cpu_s_U[-1]), 1)})
    first = [float(row["update 0"] or 0) for row in rows]
    last = [float([value for name, value in row.items() if name.startswith("update")][-1] or 0) for row in rows]
    claims = [Claim("held-out accuracy before training, highest of the seeds", max(first), "<=", MOST_AT_FIRST)]
    claims += [Claim("held-out accuracy after training, lowest of the seeds", min(last), ">=", LEAST_AT_LAST)]
    settings: Row = {"config": "configs/shapes.yaml", "decoding": "greedy"}
    return finish("shapes", options, settings, rows, [] if options.quick else claims)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
