"""Learning curves of each rollout mode, by samples and by time, on the demo's task and on a harder one.

Modes of a task differ in nothing else: policy, batch, group, learning rate and number of updates are the same, for
three seeds each. A run has one thread and a core of its own, two run at a time, and seeds and modes take turns; a run
with a server is alone, the server on one core and training on the other. Seconds, and CPU seconds (a server's not among
them), are those of rollouts and updates, without validations and start. A curve is the mean over the seeds; what a mode
has come to by a moment is its last validation before it. Where several updates learn from one loading, lengths and
rewards are given by the update within it.

:mod:`benchmarks.sorted_learning` has SortedRL's ablations, :mod:`benchmarks.overlap_learning` the modes of servers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.learning_callbacks import ServersApart, ShortFirst
from benchmarks.learning_runs import Curves, LearningRun, kept_runs, mean_curve, run_all, spread
from benchmarks.lines import distinct
from benchmarks.report import ROOT, Claim, Options, Row, finish, parse_options
from lit_grpo.methods import make_plugins
from lit_grpo.rollout.rules import RolloutMode

PICTURES = ROOT / "docs" / "pictures"
SERVERS = ROOT / "configs" / "generators" / "vllm_servers.yaml"
SHARE_OF_TIME, SHARE_OF_SAMPLES = 0.7, 0.6
SYNCHRONOUS, NO_LOADING, SORTED_AFTERWARDS = "synchronous", "sortedrl:refill=always", "sorted afterwards"
LOADING = 4
"""Batches of a loading."""


@dataclass(frozen=True)
class Size:
    """Of all runs alike."""

    seeds: tuple[int, ...] = (0, 1, 2)
    validate_every: int = 5
    prompts: int = 8
    group: int = 16
    held_out: int = 128
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """A configuration, the modes that are compared with it, the updates of each, and whether a server decodes."""

    config: str
    modes: tuple[str, ...]
    updates: int = 40
    on_server: bool = False


def modes(limit: int) -> tuple[str, ...]:
    """The modes of one device, for completions of at most ``limit`` tokens."""
    chunk, midway = f"chunked:tokens_per_update={limit // 4}", f"arrol:at={limit // 6}"
    return (SYNCHRONOUS, "april", "sortedrl", "sortedrl_partial", chunk, midway)


TASKS = {"arithmetic": Task("arithmetic", modes(128)), "knights": Task("knights", modes(700))}
QUICK = Size((0,), 1, 2, 4, 8, ("--data.train.init_args.num_rows", "16"))


def compare(name: str, tasks: dict[str, Task], options: Options) -> int:
    """Run all, draw them, and judge; the quick form has a few updates in the first modes of the first task."""
    size = Size()
    if options.quick:
        size, (task, first) = QUICK, next(iter(tasks.items()))
        tasks = {task: replace(first, modes=first.modes[:3], updates=LOADING)}
    cases = [(task, mode, seed) for seed in size.seeds for task, each in tasks.items() for mode in each.modes]
    runs = {(task, mode, seed): _run(task, tasks[task], mode, seed, size) for task, mode, seed in cases}
    with kept_runs(name, options) as folder:
        curves = run_all(list(runs.values()), folder)
    found = {
        (task, mode): [curves[runs[task, mode, seed].name] for seed in size.seeds]
        for task, each in tasks.items()
        for mode in each.modes
    }
    rows = [_row(task, mode, found[task, mode], found[task, SYNCHRONOUS]) for task, mode in found]
    if options.output is not None or not options.quick:  # a quick run leaves the docs' picture as it is
        draw(found, PICTURES / f"{name}.svg" if options.output is None else options.output.with_suffix(".svg"))
    settings: Row = {
        **{name: value for name, value in vars(size).items() if isinstance(value, int)},
        **{f"updates, {task}": each.updates for task, each in tasks.items()},
        "seeds": len(size.seeds),
        "threads": 1,
    }
    return finish(name, options, settings, rows, _claims(rows))


def _run(name: str, task: Task, mode: str, seed: int, size: Size) -> LearningRun:
    batches = LOADING if mode == SORTED_AFTERWARDS else 1
    arguments = {
        "--rollout.plugins": "[]" if mode in (SYNCHRONOUS, SORTED_AFTERWARDS) else mode,
        "--seed_everything": seed,
        "--trainer.max_steps": task.updates,
        "--trainer.val_check_interval": max(size.validate_every // batches, 1),
        "--model.num_generations": size.group,
        "--model.num_minibatches": batches,
        "--model.lr_scheduler.init_args.total_iters": task.updates,
        "--data.batch_size": size.prompts * batches,
        "--data.validation.init_args.num_rows": size.held_out,
    }
    words = [str(word) for pair in arguments.items() for word in pair]
    if task.on_server:
        server = {"num_servers": 1, "num_slots": 64}
        words[:0] = ["--config", str(SERVERS)]
        words += [str(word) for field, value in server.items() for word in (f"--model.generator.{field}", value)]
    callbacks = (ShortFirst,) * (mode == SORTED_AFTERWARDS) + (ServersApart,) * task.on_server
    label = "-".join([*name.replace(",", "").split(), *mode.replace(":", " ").replace("=", " ").split(), str(seed)])
    return LearningRun(label, task.config, (*words, *size.arguments), callbacks, task.on_server)


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
        **(_by_update_of_loading(seeds) if _loads(mode) else {}),
    }


def _loads(mode: str) -> bool:
    """Whether several updates learn from batches that were opened together."""
    plugins = [] if mode in (SYNCHRONOUS, SORTED_AFTERWARDS) else make_plugins([mode]).values()
    return any(isinstance(plugin, RolloutMode) and plugin.refill == "when_empty" for plugin in plugins)


def _by_update_of_loading(seeds: Sequence[Curves]) -> Row:
    """Mean lengths and rewards of the first updates of a loading, which ends with one that leaves no prompt open."""
    of: dict[str, list[float]] = {}
    for curves in seeds:
        place = 0
        for update in range(1, len(curves.open_U)):
            place = place + 1 if curves.open_U[update - 1] > 0 else 1
            if place <= LOADING:
                of.setdefault(f"length_{place}", []).append(float(curves.length_U[update]))
                of.setdefault(f"reward_{place}", []).append(float(curves.reward_U[update]))
    return {name: float(np.mean(values)) for name, values in of.items()}


def _claims(rows: Sequence[Row]) -> list[Claim]:
    claims = []
    for task in dict.fromkeys(str(row["task"]) for row in rows):
        by_mode = {_name(str(row["mode"])): row for row in rows if row["task"] == task}
        end = float(by_mode.pop(SYNCHRONOUS)["final"])
        for name in (NO_LOADING, SORTED_AFTERWARDS):
            if name in by_mode:
                text = f"{task}: {name} at its end, over the synchronous end (SortedRL found both below it)"
                claims.append(Claim(text, float(by_mode.pop(name)["final"]) - end, "<=", 0.0))
        best = max(by_mode.values(), key=lambda row: float(row["by_time"]))
        text = f"{task}: the best mode ({best['mode']}) by {SHARE_OF_TIME} of the synchronous seconds, over its end"
        claims.append(Claim(text, float(best["by_time"]) - end, ">=", 0.0))
        if "sortedrl" in by_mode:
            text = f"{task}: sortedrl by {SHARE_OF_SAMPLES} of the synchronous samples, over its end"
            claims.append(Claim(text, float(by_mode["sortedrl"]["by_samples"]) - end, ">=", 0.0))
    return claims


def _name(mode: str) -> str:
    """Without the fields whose values are a matter of the task."""
    return mode if mode == NO_LOADING else mode.partition(":")[0]


def draw(found: dict[tuple[str, str], list[Curves]], path: Path) -> None:
    """Draw held-out exact match by samples and by seconds, a column for each task, with the seeds' range as a band."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(task for task, _ in found))
    figure = Figure(figsize=(5.5 * len(tasks), 7), layout="constrained")
    axes = figure.subplots(2, len(tasks), sharey="col", squeeze=False)
    for axis in axes.flat:
        distinct(axis)
    for (task, mode), seeds in found.items():
        column = tasks.index(task)
        measured_U = ~np.isnan(mean_curve(seeds, "exact_U"))
        exact_SU = np.array([each.exact_U[measured_U] for each in seeds])
        for axis, name in zip(axes[:, column], ("samples_U", "wall_s_U"), strict=True):
            x_U = mean_curve(seeds, name)[measured_U]
            (line,) = axis.plot(x_U, exact_SU.mean(0), label=_name(mode), markersize=4)
            axis.fill_between(x_U, exact_SU.min(0), exact_SU.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
        axes[0, column].set(title=task, xlabel="completions learnt from", ylabel="held-out exact match")
        axes[1, column].set(xlabel="seconds of rollouts and updates", ylabel="held-out exact match")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        if axis in axes[0]:
            axis.legend(loc="lower right", fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(compare("modes_learning", TASKS, parse_options(__doc__)))
