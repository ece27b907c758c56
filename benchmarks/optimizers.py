"""Optimizers at an equal budget of generated tokens, each with the same learning rates: the demo of ``methods``.

Runs are as in :mod:`benchmarks.methods`, of plain GRPO, with half of the demo's budget and the betas of its shipped
configuration. MuonAdamW has the same rate for both of its parts. GaLore and DCT keep moments of rank 32 of matrices
whose smaller side is 128. A figure is held-out exact match, as the mean over the run or at the budget's end.
``state_kib`` is what a checkpoint keeps of the optimizer after a step on the policy, projections included.

Each run is in the result file as soon as it has ended, and a later call goes on. ``--optimizer`` and ``--seed`` measure
a part.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning_runs import LearningRun, train_here
from benchmarks.methods import QUICK, Task, run_fields, summary
from benchmarks.report import Options, Row, commit, options_parser, result_path, versions, write
from examples.galore import DCT, GaLore
from lit_grpo.optim import MuonAdamW
from lit_grpo.policy.loading import load_policy
from lit_grpo.policy.weights import TrainedWeights

TASK = Task("arithmetic", 30_000, 5, run_fields(8, 8, 1e-3, 128, 128))
RANK = 32
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "MuonAdamW": (MuonAdamW, {}),
    "GaLore": (GaLore, {"rank": RANK}),
    "DCT": (DCT, {"rank": RANK}),
}
RATES = (3e-4, 1e-3, 3e-3)
SEEDS = (0, 1, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and not there yet."""
    parser = options_parser(__doc__ or "")
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--seed", nargs="+", type=int, default=SEEDS)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task, rates, seeds = (QUICK, RATES[:1], SEEDS[:1]) if asked.quick else (TASK, RATES, asked.seed)
    options = Options(asked.quick, asked.device, asked.policy, asked.output or result_path("optimizers", asked.device))
    if asked.quick and asked.output is None:
        options = replace(options, output=None)
    settings: Row = {"task": shlex.join(task.words()), "rank": RANK}
    rows = _kept(options.output)
    for seed in seeds:
        for name in asked.optimizer:
            for rate in rates:
                if (name, rate, seed) in rows:
                    continue
                kind, fields = OPTIMIZERS[name]
                words = ["--seed_everything", str(seed), *task.words()]
                words += ["--model.optimizer", f"{kind.__module__}.{kind.__qualname__}"]
                for field, value in {"lr": rate, **fields}.items():
                    words += [f"--model.optimizer.{field}", str(value)]
                with tempfile.TemporaryDirectory() as folder:
                    curves = train_here(
                        LearningRun(f"{name}-{rate}-{seed}", task.config, tuple(words)), Path(folder) / "run"
                    )
                row: Row = {"optimizer": name, "lr": rate, "seed": seed} | summary(curves, task.tokens)
                row |= {"state_kib": _state_kib(name), "commit": str(commit()["commit"])}
                rows |= _kept(options.output) | {(name, rate, seed): row}  # another process may have added some
                write("optimizers", options, settings, list(rows.values()), [])
    means = [
        {"optimizer": name, "lr": rate, "seeds": len(of)}
        | {
            column: statistics.fmean(float(row[column]) for row in of)
            for column in ("over_run", "end", "cpu_s", "state_kib")
        }
        for name in OPTIMIZERS
        for rate in RATES
        if (of := [row for (one, lr, _), row in rows.items() if (one, lr) == (name, rate)])
    ]
    for mean in means:
        print(mean)
    return 0


def _kept(path: Path | None) -> dict[tuple[str, float, int], Row]:
    """The rows of a result file by optimizer, rate and seed."""
    if path is None or not path.exists():
        return {}
    result = json.loads(path.read_text())
    if result["versions"] != versions():
        raise SystemExit(f"{path} has figures of {result['versions']}; move it away to begin again with {versions()}.")
    return {(row["optimizer"], row["lr"], row["seed"]): row for row in result["rows"]}


def _state_kib(name: str) -> float:
    """KiB of everything that a checkpoint keeps of an optimizer of the demo's policy after a step."""
    kind, fields = OPTIMIZERS[name]
    weights: Any = TrainedWeights(load_policy("tiny"))
    optimizer = kind(weights, lr=1e-3, **fields)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    states = optimizer.state_dict()["state"].values()
    return sum(value.nbytes for state in states for value in state.values() if torch.is_tensor(value)) / 2**10


if __name__ == "__main__":
    sys.exit(main())
