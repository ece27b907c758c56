"""Learning curves of systems that train on the same task: ``python -m benchmarks.learning STUDY``.

The studies are in :mod:`benchmarks.learning_studies`. All runs of a task have the same policy, settings and number of
updates; systems differ in what the study says and in nothing else. A run has one thread and a core of its own, two run
at a time, and seeds and systems take turns; a run with a vLLM server is alone, the server on one core and training on
the other. Seconds, and CPU seconds (a server's not among them), are those of rollouts and updates, without validations
and start. A figure is the mean over the seeds. What a system has come to by a moment is its last validation before it.

``--task`` and ``--system`` measure a part, beside the study's baseline, without claims and picture.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning_runs import Curves, LearningRun, kept_runs, mean_curve, run_all, spread
from benchmarks.learning_studies import AXES, QUICK, SHARE_OF_SAMPLES, SHARE_OF_TIME, STUDIES, Bound, Study, Task
from benchmarks.lines import distinct
from benchmarks.report import ROOT, Claim, Options, Row, finish, options_parser

LAST = 5
"""Updates that a reward is the mean of."""
Found = dict[tuple[str, str], list[Curves]]
"""The curves of each seed, by task and system."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study, or a part of it."""
    parser = options_parser(__doc__ or "")
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--task", nargs="+", help="by default all")
    parser.add_argument("--system", nargs="+", help="beside the baseline; by default all")
    asked = parser.parse_args(arguments)
    options = Options(asked.quick, asked.device, asked.policy, asked.output)
    study, is_part = STUDIES[asked.study], bool(asked.task or asked.system)
    study = quick_form(study) if options.quick else study
    study = part_of(study, asked.task, asked.system) if is_part else study
    return measure(asked.study, study, options, f"learning {asked.study}", judges=not is_part)


def measure(result: str, study: Study, options: Options, program: str, judges: bool = True) -> int:
    """Run all systems of a study, write its result, and return the exit code.

    Args:
        result: Its name.
        study: What is compared.
        options: Of the command line.
        program: The module that measures it, with its arguments.
        judges: Whether there are claims and a picture.
    """
    found = _measure(result, study, options)
    rows = [_row(study, task, system, found) for task, system in found]
    if study.picture and judges and (options.output is not None or not options.quick):
        path = ROOT / "docs" / "pictures" / f"{result}.svg"  # which a quick run leaves as it is
        draw(study, found, path if options.output is None else options.output.with_suffix(".svg"))
    settings: Row = {"seeds": len(study.seeds), "threads": 1}
    for field, value in study.fields.items():  # a path would name a place on this machine
        is_path = isinstance(value, str) and Path(value).is_absolute()
        settings[field] = Path(value).name if is_path else value if isinstance(value, int | float) else str(value)
    for name, task in study.tasks.items():
        settings |= {f"{field}, {name}": str(value) for field, value in task.fields.items()}
    claims = [claim for bound in study.bounds for claim in _claims(bound, rows)] if judges else []
    return finish(result, options, settings, rows, claims, program)


def quick_form(study: Study) -> Study:
    """A few updates of some systems in the first task, with one seed."""
    name, task = next(iter(study.tasks.items()))
    names = study.quick or tuple(task.systems)[:2]
    lengths = ("trainer.max_steps", "trainer.val_check_interval")
    systems = {
        each: replace(of, fields={field: value for field, value in of.fields.items() if field not in lengths})
        for each, of in task.systems.items()
        if each in names
    }
    task = replace(task, fields=task.fields | QUICK, systems=systems)
    fields = {field: value for field, value in study.fields.items() if field not in QUICK}
    bounds = tuple(each for each in study.bounds if "_to_" not in each.column)  # it may never come there
    return replace(study, tasks={name: task}, seeds=study.seeds[:1], fields=fields, bounds=bounds)


def part_of(study: Study, tasks: Sequence[str] | None, systems: Sequence[str] | None) -> Study:
    """Some tasks with some systems and the baseline."""
    return replace(
        study,
        tasks={
            name: replace(
                task,
                systems={
                    each: of
                    for each, of in task.systems.items()
                    if systems is None or each in systems or each == study.baseline
                },
            )
            for name, task in study.tasks.items()
            if tasks is None or name in tasks
        },
    )


def _measure(name: str, study: Study, options: Options) -> Found:
    runs = {
        (task, system, seed): _run(study, task, system, seed)
        for seed in study.seeds
        for task, each in study.tasks.items()
        for system in each.systems
    }
    with kept_runs(name, options) as folder:
        curves = run_all(list(runs.values()), folder)
    cases = [(task, system) for task, each in study.tasks.items() for system in each.systems]
    return {
        (task, system): [
            later(curves[runs[task, system, seed].name], *study.tasks[task].systems[system].before)
            for seed in study.seeds
        ]
        for task, system in cases
    }


def later(curves: Curves, tokens: int, seconds: float) -> Curves:
    """Curves of a run that so many sampled tokens and seconds went before."""
    return replace(
        curves, tokens_U=curves.tokens_U + tokens, wall_s_U=curves.wall_s_U + seconds, cpu_s_U=curves.cpu_s_U + seconds
    )


def _run(study: Study, task_name: str, name: str, seed: int) -> LearningRun:
    task: Task = study.tasks[task_name]
    system = task.systems[name]
    fields = {"seed_everything": seed} | study.fields | task.fields | system.fields
    words = [word for config in system.configs for word in ("--config", str(ROOT / "configs" / f"{config}.yaml"))]
    words += [word for field, value in fields.items() for word in (f"--{field}", str(value))]
    label = "".join(each if each.isalnum() else " " for each in f"{task_name} {name} {seed}")
    config = system.config or task.config
    return LearningRun("-".join(label.split()), config, tuple(words), system.callbacks, system.alone)


def _row(study: Study, task: str, name: str, found: Found) -> Row:
    seeds = found[task, name]
    row: Row = {"task": task, "system": name}
    exact_U, reward_U = mean_curve(seeds, "exact_U"), mean_curve(seeds, "reward_U")[1:]
    if not np.isnan(exact_U).all():
        row |= {"start": float(exact_U[0]), **spread([float(each.exact_U[-1]) for each in seeds], "final")}
        row |= {"gain": float(row["final"]) - float(row["start"]), "best": float(np.nanmax(exact_U))}
    else:  # a study of rewards
        last = min(LAST, len(reward_U))
        smooth_U = np.convolve(reward_U, np.ones(last) / last, mode="valid")
        row |= {"reward_best": float(np.nanmax(smooth_U)), "reward_final": float(smooth_U[-1])}
        row["reward_fall"] = float(row["reward_best"]) - float(row["reward_final"])
    row["reward"] = math.nan if np.isnan(reward_U).all() else float(np.nanmean(reward_U))
    for column in ("wall_s", "cpu_s", "samples", "tokens"):
        row[column] = float(mean_curve(seeds, f"{column}_U")[-1])
    row["staleness"] = float(mean_curve(seeds, "staleness_U")[-1])
    for column, (metric, how) in study.logged.items():
        row[column] = float(np.mean([_summary(each, metric, how) for each in seeds]))
    if study.level is not None:
        row |= to_level(study.level, seeds)
    return row | _beside(study, seeds, found[task, study.baseline]) if study.baseline else row


def _summary(curves: Curves, metric: str, how: str) -> float:
    """One figure of a metric that a run has logged; 0 where it has logged none."""
    values = curves.logged.get(metric, np.zeros(0))
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0
    if how == "per completion":
        return float(values.sum() / curves.samples_U[-1])
    return float({"mean": np.mean, "largest": np.max, "least": np.min}[how](values))


def to_level(level: float, seeds: Sequence[Curves]) -> Row:
    """Where seeds first come to a held-out exact match, as mean, least and most; the mean is NaN if one does not."""
    reached = [(each, int(where[0])) for each in seeds if len(where := np.flatnonzero(each.exact_U >= level))]
    row: Row = {f"seeds_to_{level:g}": len(reached)}
    values = {
        "updates": [float(update) for _, update in reached],
        "tokens": [float(each.tokens_U[update]) for each, update in reached],
        "cpu_s": [float(each.cpu_s_U[update]) for each, update in reached],
    }
    for column, of_seeds in values.items():
        row |= spread(of_seeds or [math.nan], f"{column}_to_{level:g}")
        if len(reached) < len(seeds):
            row[f"{column}_to_{level:g}"] = math.nan
    return row


def _beside(study: Study, seeds: Sequence[Curves], baseline: Sequence[Curves]) -> Row:
    """Where the mean curve is by a share of what the baseline takes, and what it takes to the baseline's end."""
    exact_U, level = mean_curve(seeds, "exact_U"), float(mean_curve(baseline, "exact_U")[-1])
    reached = np.flatnonzero(exact_U >= level)
    row: Row = {}
    for column, share in (("wall_s", SHARE_OF_TIME), ("samples", SHARE_OF_SAMPLES), ("tokens", 1.0)):
        axis_U, moment = mean_curve(seeds, f"{column}_U"), share * float(mean_curve(baseline, f"{column}_U")[-1])
        row[f"by_{column}"] = float(exact_U[~np.isnan(exact_U) & (axis_U <= moment)][-1])
        row[f"{column}_to_level"] = float(axis_U[reached[0]]) if len(reached) else math.nan
    return row


def _claims(bound: Bound, rows: Sequence[Row]) -> list[Claim]:
    """The claims of a bound: one for each task and each system that it is of."""
    claims, other = [], bound.of_other or bound.column
    over = (bound.over,) if isinstance(bound.over, str) else bound.over or ()
    for task in dict.fromkeys(str(row["task"]) for row in rows):
        by_system = {str(row["system"]): row for row in rows if row["task"] == task}
        names = [name for name in bound.of or by_system if name in by_system and name not in (bound.less, *over)]
        if bound.best and names:
            names = [_best(names, bound, by_system)]
        for name in names:
            value = float(by_system[name][bound.column])
            if bound.less is not None:
                value -= float(by_system[bound.less][other])
            if over:
                value /= float(by_system[_best(over, replace(bound, column=other), by_system)][other]) or math.nan
            claims.append(Claim(f"{task}, {name}: {bound.text}", value, bound.relation, bound.limit))
    return claims


def _best(names: Sequence[str], bound: Bound, by_system: Mapping[str, Row]) -> str:
    """The system whose column is the best, by the bound's relation; one with NaN is the worst."""
    sign = 1 if bound.relation == "<=" else -1
    return min(
        (name for name in names if name in by_system),
        key=lambda name: _or_worst(sign * float(by_system[name][bound.column])),
    )


def _or_worst(value: float) -> float:
    return math.inf if math.isnan(value) else value


def draw(study: Study, found: Mapping[tuple[str, str], Sequence[Curves]], path: Path) -> None:
    """Draw what the study shows by each of its axes, a column for each task and group, with the seeds' range."""
    from matplotlib.figure import Figure

    groups = {
        (task, title): [name for name in (study.baseline, *names) if name and (task, name) in found]
        for task, each in study.tasks.items()
        for title, names in (study.groups or {"": tuple(n for n in each.systems if n != study.baseline)}).items()
    }
    figure = Figure(figsize=(5 * len(groups), 3.6 * len(study.picture)), layout="constrained")
    grid = figure.subplots(len(study.picture), len(groups), squeeze=False)
    for ((task, title), names), axes in zip(groups.items(), grid.T, strict=True):
        for axis, kind in zip(axes, study.picture, strict=True):
            column, unit, label, shown = AXES[kind]
            distinct(axis)
            for name in names:
                _draw(axis, name, found[task, name], column, unit, shown)
            axis.set(xlabel=label, ylabel="mean reward" if shown == "reward_U" else "held-out exact match")
            axis.grid(alpha=0.3)
        axes[0].set(title=f"{task}: {title}" if title else task)
        axes[-1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize="small")
    figure.savefig(path)


def _draw(axis: Any, name: str, seeds: Sequence[Curves], column: str, unit: int, shown: str) -> None:
    """Draw the mean curve of a system, and the range of its seeds as a band."""
    measured_U = ~np.isnan(mean_curve(seeds, shown))
    values_SU = np.array([getattr(each, shown)[measured_U] for each in seeds])
    x_U = np.arange(len(measured_U)) if column == "update" else mean_curve(seeds, column) / unit
    (line,) = axis.plot(x_U[measured_U], values_SU.mean(0), label=name, markersize=4)
    axis.fill_between(x_U[measured_U], values_SU.min(0), values_SU.max(0), color=line.get_color(), alpha=0.15)


if __name__ == "__main__":
    sys.exit(main())
