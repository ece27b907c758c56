"""What each rollout mode learns, by samples and by time, on the demo's task and on the harder one.

Modes differ in nothing else: policy, batch, group, learning rate and number of updates are the same, for three seeds
each. A run has one thread and a core of its own, two run at a time, and seeds and modes take turns. Seconds, and CPU
seconds, are those of rollouts and updates, without validations and start. A curve is the mean over the seeds; what a
mode has come to by a moment is its last validation before it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.learning_runs import Curves, LearningRun, kept_runs, mean_curve, run_all, spread
from benchmarks.report import ROOT, Claim, Options, Row, finish, parse_options

PICTURE = ROOT / "docs" / "pictures" / "modes_learning.svg"
SHARE_OF_TIME, SHARE_OF_SAMPLES = 0.7, 0.6
SYNCHRONOUS = "synchronous"


@dataclass(frozen=True)
class Size:
    """Of all runs alike."""

    seeds: tuple[int, ...] = (0, 1, 2)
    updates: int = 40
    validate_every: int = 5
    prompts: int = 8
    group: int = 16
    held_out: int = 128
    arguments: tuple[str, ...] = ()


QUICK = Size((0,), 2, 1, 2, 4, 8, ("--data.train.init_args.num_rows", "16"))
TASKS = {"arithmetic": 128, "knights": 700}
"""Each task's configuration, and the most tokens of a completion."""


def modes(limit: int) -> list[str]:
    """What is compared, for completions of at most ``limit`` tokens."""
    chunk, midway = f"chunked:tokens_per_update={limit // 4}", f"pruned:prune_at={limit // 6}"
    return [SYNCHRONOUS, "april", "sortedrl", "sortedrl_partial", chunk, midway]


def main(options: Options) -> int:
    """Run all, draw them, and judge."""
    size = QUICK if options.quick else Size()
    tasks = dict(list(TASKS.items())[:1]) if options.quick else TASKS
    compared = {task: modes(limit)[: 3 if options.quick else None] for task, limit in tasks.items()}
    cases = [(task, mode, seed) for seed in size.seeds for task in tasks for mode in compared[task]]
    runs = {case: _run(*case, size) for case in cases}
    with kept_runs("modes_learning", options) as folder:
        curves = run_all(list(runs.values()), folder)
    found = {
        (task, mode): [curves[runs[task, mode, seed].name] for seed in size.seeds]
        for task in tasks
        for mode in compared[task]
    }
    rows = [_row(task, mode, found[task, mode], found[task, SYNCHRONOUS]) for task, mode in found]
    if options.output is not None or not options.quick:  # a quick run leaves the docs' picture as it is
        draw(found, PICTURE if options.output is None else options.output.with_suffix(".svg"))
    settings: Row = {
        **{name: value for name, value in vars(size).items() if isinstance(value, int)},
        "seeds": len(size.seeds),
        "threads": 1,
    }
    return finish("modes_learning", options, settings, rows, _claims(rows))


def _run(task: str, mode: str, seed: int, size: Size) -> LearningRun:
    arguments = {
        "--rollout_scheduler.mode": mode,
        "--seed_everything": seed,
        "--trainer.max_steps": size.updates,
        "--trainer.val_check_interval": size.validate_every,
        "--model.num_generations": size.group,
        "--model.lr_scheduler.init_args.total_iters": size.updates,
        "--data.batch_size": size.prompts,
        "--data.validation.init_args.num_rows": size.held_out,
    }
    words = tuple(str(word) for pair in arguments.items() for word in pair)
    return LearningRun(f"{task}-{mode.partition(':')[0]}-{seed}", task, (*words, *size.arguments))


def _row(task: str, mode: str, seeds: Sequence[Curves], synchronous: Sequence[Curves]) -> Row:
    exact_U, until = mean_curve(seeds, "exact_U"), ~np.isnan(mean_curve(seeds, "exact_U"))
    wall_s_U, samples_U = mean_curve(seeds, "wall_s_U"), mean_curve(seeds, "samples_U")

    def by(axis_U: np.ndarray, moment: float) -> float:
        return float(exact_U[until & (axis_U <= moment)][-1])

    return {
        "task": task,
        "mode": mode,
        "start": float(exact_U[0]),
        **spread([float(each.exact_U[-1]) for each in seeds], "final"),
        "best": float(exact_U[until].max()),
        "by_time": by(wall_s_U, SHARE_OF_TIME * float(mean_curve(synchronous, "wall_s_U")[-1])),
        "by_samples": by(samples_U, SHARE_OF_SAMPLES * float(mean_curve(synchronous, "samples_U")[-1])),
        "wall_s": float(wall_s_U[-1]),
        "cpu_s": float(mean_curve(seeds, "cpu_s_U")[-1]),
        "samples": float(samples_U[-1]),
        "tokens": float(mean_curve(seeds, "tokens_U")[-1]),
        "staleness": float(np.nanmean(mean_curve(seeds, "staleness_U")[1:])),
    }


def _claims(rows: Sequence[Row]) -> list[Claim]:
    claims = []
    for task in dict.fromkeys(str(row["task"]) for row in rows):
        by_mode = {str(row["mode"]).partition(":")[0]: row for row in rows if row["task"] == task}
        end = float(by_mode.pop(SYNCHRONOUS)["final"])
        best = max(by_mode.values(), key=lambda row: float(row["by_time"]))
        text = f"{task}: the best mode ({best['mode']}) by {SHARE_OF_TIME} of the synchronous seconds, over its end"
        claims.append(Claim(text, float(best["by_time"]) - end, ">=", 0.0))
        text = f"{task}: sortedrl by {SHARE_OF_SAMPLES} of the synchronous samples, over its end"
        claims.append(Claim(text, float(by_mode["sortedrl"]["by_samples"]) - end, ">=", 0.0))
    return claims


def draw(found: dict[tuple[str, str], list[Curves]], path: Path) -> None:
    """Draw held-out exact match by samples and by seconds, a column for each task, the range of the seeds behind."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(task for task, _ in found))
    figure = Figure(figsize=(5.5 * len(tasks), 7), layout="constrained")
    axes = figure.subplots(2, len(tasks), sharey="col", squeeze=False)
    for (task, mode), seeds in found.items():
        column = tasks.index(task)
        measured_U = ~np.isnan(mean_curve(seeds, "exact_U"))
        exact_SU = np.array([each.exact_U[measured_U] for each in seeds])
        for axis, name in zip(axes[:, column], ("samples_U", "wall_s_U"), strict=True):
            x_U = mean_curve(seeds, name)[measured_U]
            (line,) = axis.plot(x_U, exact_SU.mean(0), label=mode.partition(":")[0], marker=".")
            axis.fill_between(x_U, exact_SU.min(0), exact_SU.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
        axes[0, column].set(title=task, xlabel="completions learnt from", ylabel="held-out exact match")
        axes[1, column].set(xlabel="seconds of rollouts and updates", ylabel="held-out exact match")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    axes[0, 0].legend(loc="lower right")
    figure.savefig(path)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
