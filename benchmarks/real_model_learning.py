"""A pretrained chat model learns word problems, beside TRL 1.16: held-out accuracy, CPU seconds and memory.

The policy is SmolLM2-135M-Instruct (``lit_grpo smollm2`` makes it), the task ``configs/word_problems.yaml``. Both
sides train on the same prompts with the same reward, optimizer, schedule and sampling, in float32 on one thread, ours
and TRL's alternately. Before the runs TRL's settings are tried for a few updates, and the fastest is taken. Ours has
its configuration as shipped. All kept policies are scored greedily by one program, on rows whose pairs of numbers are
in no training row. Memory is the peak of the resident set above the process with the loaded model, less gradients and
AdamW's moments, which both sides must hold.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.learning_callbacks import CLOCK, KeepPolicies
from benchmarks.learning_runs import LearningRun, Run, kept_runs, train_all
from benchmarks.policy_scores import SCORES, Scoring
from benchmarks.report import Claim, Options, Row, finish, need, parse_options
from benchmarks.shipped_tasks import ShippedTask
from benchmarks.trl_run import TRLRun

CONFIG = "word_problems"
OURS, THEIRS = "lit_grpo", "TRL"
GAIN, CPU_SHARE, MEMORY_SHARE = 0.25, 0.35, 0.6
STATE_BYTES = 12
"""Of a parameter's gradient and AdamW's two moments, in float32."""


@dataclass(frozen=True)
class Size:
    """Of all runs; ``tried`` are rows of TRL's micro-batch and whether it decodes by continuous batching."""

    seeds: tuple[int, ...]
    updates: int
    held_out: int
    tried: tuple[tuple[int, bool], ...]
    tried_updates: int = 1


FULL = Size((0, 1, 2), 10, 96, ((4, False), (8, False), (16, False), (8, True)))
QUICK = Size((0,), 1, 2, ((4, False),))


def main(options: Options) -> int:
    """Train all, score all, and judge."""
    size = QUICK if options.quick else FULL
    with kept_runs("real_model_learning", options) as folder:
        best, tried = _best_settings(size, folder)
        runs: list[Run] = []
        for seed in size.seeds:
            runs += [replace(best, name=f"{THEIRS}-{seed}", seed=seed, updates=size.updates), _ours(seed, size.updates)]
        train_all(runs, folder)
        names = tuple(run.name for run in runs)
        train_all([Scoring("scores", names, CONFIG, size.held_out)], folder)
        scores = json.loads((folder / "scores" / SCORES).read_text())
        rows = [
            _row(folder, system, seed, scores[f"{system}-{seed}"]) for seed in size.seeds for system in (OURS, THEIRS)
        ]
    settings: Row = {"config": CONFIG, "updates": size.updates, "held_out": size.held_out, "threads": 1, **tried}
    settings["TRL's"] = f"{best.rows} rows a micro-batch, {'continuous batching' if best.continuous else 'generate'}"
    return finish("real_model_learning", options, settings, rows, _claims(rows))


def _best_settings(size: Size, folder: Path) -> tuple[TRLRun, Row]:
    """Return the setting of TRL that takes the fewest CPU seconds an update, and those of each that was tried."""
    task = ShippedTask(CONFIG)
    prompts, group = task.settings["data"]["batch_size"], task.model["num_generations"]
    runs = [
        TRLRun(
            f"tried-{rows}-{'continuous' if continuous else 'generate'}",
            CONFIG,
            0,
            size.tried_updates,
            rows,
            continuous,
            prompts=prompts,
            group=group,
        )
        for rows, continuous in size.tried
    ]
    train_all(runs, folder)
    seconds = {run.name: _clock(folder / run.name)[-1]["cpu_s"] / size.tried_updates for run in runs}
    tried: Row = {f"TRL {name}, CPU s an update": round(each, 1) for name, each in seconds.items()}
    return min(runs, key=lambda run: seconds[run.name]), tried


def _ours(seed: int, updates: int) -> LearningRun:
    words = ("--seed_everything", str(seed), "--trainer.max_steps", str(updates), "--trainer.limit_val_batches", "0")
    words += ("--model.lr_scheduler.init_args.total_iters", str(updates))
    return LearningRun(f"{OURS}-{seed}", CONFIG, words, clock=KeepPolicies)


def _clock(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / CLOCK).read_text().splitlines()]


def _row(folder: Path, system: str, seed: int, scores: dict[str, dict[str, float]]) -> Row:
    clock = _clock(folder / f"{system}-{seed}")
    updates = sorted(scores, key=int)
    row: Row = {"system": system, "seed": seed, "cpu_s": clock[-1]["cpu_s"], "wall_s": clock[-1]["wall_s"]}
    row["above_state_gib"] = clock[-1]["peak_gib"] - clock[-1]["idle_gib"] - _num_parameters() * STATE_BYTES / 2**30
    row |= {f"greedy_{update}": scores[update]["greedy"] for update in updates}
    return row | {"start": scores[updates[0]]["greedy"], "end": scores[updates[-1]]["greedy"]}


def _num_parameters() -> int:
    from safetensors import safe_open

    with safe_open(Path(ShippedTask(CONFIG).policy) / "model.safetensors", "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def _claims(rows: list[Row]) -> list[Claim]:
    def of(system: str, name: str) -> list[float]:
        return [float(row[name]) for row in rows if row["system"] == system]

    gains = [end - start for start, end in zip(of(OURS, "start"), of(OURS, "end"), strict=True)]
    ends = {system: of(system, "end") for system in (OURS, THEIRS)}
    noise = (sum(statistics.pvariance(each) for each in ends.values()) or 1e-4) ** 0.5
    behind = statistics.fmean(ends[THEIRS]) - statistics.fmean(ends[OURS])
    cpu, memory = (
        statistics.fmean(of(OURS, name)) / statistics.fmean(of(THEIRS, name)) for name in ("cpu_s", "above_state_gib")
    )
    return [
        Claim("held-out accuracy, end over start, mean of the seeds", statistics.fmean(gains), ">=", GAIN),
        Claim("held-out accuracy, end over start, least of the seeds", min(gains), ">=", GAIN),
        Claim("TRL's end over ours, in standard deviations of a seed", behind / noise, "<=", 1.0),
        Claim("CPU seconds over TRL's", cpu, "<=", CPU_SHARE),
        Claim("memory above weights, gradients and moments over TRL's", memory, "<=", MEMORY_SHARE),
    ]


if __name__ == "__main__":
    assert __doc__ is not None
    need("trl")
    sys.exit(main(parse_options(__doc__)))
