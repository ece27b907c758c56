"""Learning speed compared with TRL 1.16: held-out exact match by updates, tokens, CPU seconds and seconds.

Both sides train the same policy on the same prompts, reward, optimizer and schedule, in float32 on one thread, each
run pinned to a core, ours and TRL's alternately. TRL has its best settings: before the runs, those that are tried
train a few updates, and the fastest is taken. Ours runs twice. On equal terms it has the shipped configuration and as
many updates as TRL; with *settings of its own* it takes what TRL does not have, chosen beforehand on other seeds
(``benchmarks.budgets``), and as many updates as about a quarter of TRL's time allows. Time begins with the first
update: imports and loading are left out on both sides, and so is keeping policies, which are scored afterwards on
held-out rows by one and the same program.

``shapes_vs_trl`` is the same beside a task of pictures, whose vision tower both sides train; it has no settings of its
own. Its memory is the peak above the process at the beginning of training, and above gradients and AdamW's moments.

A time is that in which the mean curve of a side, with straight lines between the kept policies, first comes to where
TRL's ends.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning_callbacks import CLOCK, KeepPolicies
from benchmarks.learning_runs import LearningRun, Run, kept_runs, read_curves, train_all
from benchmarks.lines import distinct
from benchmarks.policy_scores import SCORES, TEMPERATURES, Scoring
from benchmarks.report import ROOT, Claim, Options, Row, finish, need, options_parser
from benchmarks.trl_run import TRLRun

PICTURE = ROOT / "docs" / "pictures" / "learning_per_hour.svg"
OURS, OWN, THEIRS = "lit_grpo", "lit_grpo, settings of its own", "TRL"
FOLDERS = {OURS: "lit_grpo", OWN: "own", THEIRS: "TRL"}
SHARE = 0.25
TIMES = ("cpu_s", "wall_s", "tokens")
T_QUANTILE = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""By the number of seeds: what a 95% interval of a mean takes of its standard error."""


Setting = dict[str, Any]
"""Of TRL, as fields of its run."""


@dataclass(frozen=True)
class Task:
    """A configuration, how long it is trained on, on how many held-out rows its policies are scored, and what is tried.

    Where a few completions are very long ``generate`` takes three times as long as continuous batching, and many rows
    take longer than few, as an earlier run has shown: neither is tried again. ``own`` are arguments of our settings of
    its own, and ``own_updates`` how long these train; 0 if there are none. Of a policy of so many ``parameters`` memory
    is compared too.
    """

    config: str
    updates: int
    held_out: int
    tried: tuple[Setting, ...]
    own: Mapping[str, Any]
    own_updates: int
    parameters: int | None = None


@dataclass(frozen=True)
class Size:
    """Of all runs."""

    seeds: tuple[int, ...]
    prompts: int
    group: int
    tried_updates: int
    """Those in which the settings of TRL are compared; the first is not timed."""


FULL, QUICK = Size(tuple(range(20, 26)), 16, 16, 2), Size((0, 1), 2, 4, 2)
DARS = {"--rollout.plugins": "dars_equal:divided=false", "--model.num_generations": 8}
TASKS = (
    Task(
        "arithmetic",
        60,
        2176,
        (
            {"rows": 32, "continuous": True},
            *({"rows": rows} for rows in (8, 16, 32, 64)),
            {"rows": 16, "gpu_head": False},
        ),
        DARS,
        90,
    ),
    Task("knights", 12, 512, ({"rows": 8, "continuous": True}, {"rows": 16, "continuous": True}), {}, 18),
)
OF_SHAPES = (
    *({"rows": rows} for rows in (16, 32, 64, 128)),
    {"rows": 128, "gpu_head": False},
    {"rows": 128, "bf16": True},
)
"""Continuous batching takes no images."""
SHAPES = Task("shapes", 42, 512, OF_SHAPES, {}, 0, parameters=346_976)
STUDIES: dict[str, tuple[tuple[Task, ...], Size]] = {
    "learning_per_hour": (TASKS, FULL),
    "shapes_vs_trl": ((SHAPES,), Size((20, 21, 22), 16, 8, 3)),
}


@dataclass(frozen=True)
class Scored:
    """Results of one run, by saved policy: shapes (policies,); ``sampled_U`` is NaN between first and last."""

    greedy_U: np.ndarray
    sampled_U: np.ndarray
    updates_U: np.ndarray
    tokens_U: np.ndarray
    cpu_s_U: np.ndarray
    wall_s_U: np.ndarray
    peak_mib_U: np.ndarray


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all, score all, draw, and judge."""
    parser = options_parser(__doc__ or "")
    parser.add_argument("study", nargs="?", choices=STUDIES, default="learning_per_hour")
    asked = parser.parse_args(arguments)
    options, study = Options(asked.quick, asked.device, asked.policy, asked.output), asked.study
    tasks, size = STUDIES[study]
    if options.quick:
        own = DARS | {"--model.num_generations": 2} if tasks[0].own else {}
        size, tasks = QUICK, (replace(tasks[0], updates=2, held_out=16, own=own, own_updates=2 * bool(own)),)
    rows: list[Row] = []
    claims: list[Claim] = []
    settings: Row = {"prompts": size.prompts, "group": size.group, "seeds": len(size.seeds), "threads": 1}
    with kept_runs(study, options) as folder:
        for task in tasks:
            best, seconds = _best_settings(task, task.tried[1:2] if options.quick else task.tried, size, folder)
            settings |= {f"updates, {task.config}": task.updates, f"held out, {task.config}": task.held_out}
            if task.own_updates:
                own = " ".join(map(str, (*chain(*task.own.items()), "--trainer.max_steps", task.own_updates)))
                settings[f"settings of its own, {task.config}"] = own
            settings |= {f"TRL on {task.config}, s an update, {name}": each for name, each in seconds.items()}
            settings[f"TRL on {task.config}"] = _label(best)
            of_task = _train(task, best, size, folder)
            level = float(_mean(of_task[THEIRS], "greedy_U")[-1])
            rows += [row for system, scored in of_task.items() for row in _rows(task, system, scored, level)]
            claims += ([] if options.quick else _time_claims(task, of_task, level)) + _end_claims(task, of_task)
            claims += _cost_claims(task, of_task, folder)
    if study == PICTURE.stem and (options.output is not None or not options.quick):  # a quick run leaves the docs' own
        draw(rows, PICTURE if options.output is None else options.output.with_suffix(".svg"))
    return finish(study, options, settings, rows, claims, f"learning_per_hour {study}".replace(f" {PICTURE.stem}", ""))


def _label(run: TRLRun) -> str:
    decoding, head = "continuous batching" if run.continuous else "generate", "GPU" if run.gpu_head else "CPU"
    return f"{run.rows} rows, {decoding}, head of {head}" + ", bfloat16" * run.bf16


def _best_settings(task: Task, tried: Sequence[Setting], size: Size, folder: Path) -> tuple[TRLRun, dict[str, float]]:
    """Return the setting of TRL that is fastest, and the CPU seconds of an update of each."""
    runs = []
    for setting in tried:
        run = TRLRun("", task.config, 0, size.tried_updates, **setting, prompts=size.prompts, group=size.group)
        runs.append(replace(run, name="-".join(["tried", task.config, *_label(run).replace(",", "").split()])))
    train_all(runs, folder)
    seconds = {}
    for run in runs:
        clock = _clock(folder / run.name)
        seconds[_label(run)] = (clock[-1]["cpu_s"] - clock[0]["cpu_s"]) / (len(clock) - 1)
    return min(runs, key=lambda run: seconds[_label(run)]), seconds


def _train(task: Task, best: TRLRun, size: Size, folder: Path) -> dict[str, list[Scored]]:
    """Train all seeds of both sides, score what they have kept, and read it."""
    runs: list[Run] = []
    scorings: list[Run] = []
    for seed in size.seeds:
        theirs = replace(best, name=_name(task, THEIRS, seed), seed=seed, updates=task.updates)
        of_seed = [theirs, *(_ours(task, system, seed, size) for system in _sides(task))]
        runs += of_seed
        names = tuple(run.name for run in of_seed)
        scorings.append(Scoring(_scores(task, seed), names, task.config, task.held_out))
    train_all(runs, folder)
    train_all(scorings, folder)
    sides = (*_sides(task), THEIRS)
    return {system: [_scored(folder, task, system, seed) for seed in size.seeds] for system in sides}


def _sides(task: Task) -> tuple[str, ...]:
    """Ours."""
    return (OURS, OWN) if task.own_updates else (OURS,)


def _name(task: Task, system: str, seed: int) -> str:
    """The folder of a run."""
    return f"{task.config}-{FOLDERS[system]}-{seed}"


def _scores(task: Task, seed: int) -> str:
    """The folder of the scores of all runs of a seed."""
    return f"{task.config}-scores-{seed}"


def _ours(task: Task, system: str, seed: int, size: Size) -> LearningRun:
    updates = task.own_updates if system == OWN else task.updates
    arguments = {
        "--seed_everything": seed,
        "--trainer.max_steps": updates,
        "--trainer.limit_val_batches": 0,
        "--model.num_generations": size.group,
        "--model.lr_scheduler.init_args.total_iters": updates,
        "--data.batch_size": size.prompts,
    } | (dict(task.own) if system == OWN else {})
    words = tuple(map(str, chain(*arguments.items())))
    return LearningRun(_name(task, system, seed), task.config, words, clock=KeepPolicies)


def _clock(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / CLOCK).read_text().splitlines()]


def _scored(folder: Path, task: Task, system: str, seed: int) -> Scored:
    name = _name(task, system, seed)
    clock = {0: {"wall_s": 0.0, "cpu_s": 0.0, "tokens": 0.0}} | {
        int(line["update"]): line for line in _clock(folder / name)
    }
    of_seed = json.loads((folder / _scores(task, seed) / SCORES).read_text())
    scores = {int(update): score for update, score in of_seed[name].items()}
    updates = sorted(scores)
    tokens_U = [clock[update].get("tokens", 0.0) for update in updates]
    if system != THEIRS:
        tokens_U = read_curves(folder / name).tokens_U[updates]
    greedy_U, sampled_U = ([scores[update].get(kind, math.nan) for update in updates] for kind in TEMPERATURES)
    cpu_s_U, wall_s_U = ([clock[update][kind] for update in updates] for kind in ("cpu_s", "wall_s"))
    peak_mib_U = [_above_state(task, clock[update]) if update else math.nan for update in updates]
    return Scored(*map(np.array, (greedy_U, sampled_U, updates, tokens_U, cpu_s_U, wall_s_U, peak_mib_U)))


def _above_state(task: Task, line: Mapping[str, float]) -> float:
    """MiB of a run's peak above the idle process, gradients and moments."""
    return 1024 * (line["peak_gib"] - line["idle_gib"]) - 12 * (task.parameters or 0) / 2**20


def _time_claims(task: Task, found: dict[str, list[Scored]], level: float) -> list[Claim]:
    """Of the time to where TRL's mean ends, and, on equal terms, where the better end is chance, to the lower end."""
    claims = []
    both = min(level, float(_mean(found[OURS], "greedy_U")[-1]))
    of_own = [(OWN, level, "where TRL's mean ends, settings of its own")]
    for system, where, what in (
        *(of_own if OWN in found else ()),
        (OURS, level, "where TRL's mean ends, equal terms"),
        (OURS, both, "where the lower of both means ends, equal terms"),
    ):
        for name, seconds in (("cpu_s", "CPU seconds"), ("wall_s", "seconds")):
            ours, theirs = (_first(found[side], f"{name}_U", where) for side in (system, THEIRS))
            claims.append(Claim(f"{task.config}: {seconds} to {what}, over TRL's", ours / theirs, "<=", SHARE))
    return claims


def _end_claims(task: Task, found: dict[str, list[Scored]]) -> list[Claim]:
    claims = []
    for kind in TEMPERATURES:
        ends = [[float(getattr(each, f"{kind}_U")[-1]) for each in found[system]] for system in (OURS, THEIRS)]
        difference, interval = _difference(*ends)
        text = f"{task.config}, {kind}: exact match above TRL's at equal updates ({difference:+.4f}), upper end of the"
        claims.append(Claim(f"{text} 95% interval", difference + interval, ">=", 0.0))
    return claims


def _cost_claims(task: Task, found: dict[str, list[Scored]], folder: Path) -> list[Claim]:
    """Of a whole run at equal updates: CPU seconds over TRL's, by seed, and the peak over that of TRL's least."""
    if task.parameters is None:
        return []
    pairs = list(zip(found[OURS], found[THEIRS], strict=True))
    ratios = [float(ours.cpu_s_U[-1] / theirs.cpu_s_U[-1]) for ours, theirs in pairs]
    text = f"{task.config}: CPU seconds of as many updates over TRL's"
    claims = [
        Claim(f"{text}, {kind}", value, "<=", 0.5)
        for kind, value in (("median of the seeds", statistics.median(ratios)), ("highest", max(ratios)))
    ]
    tried = [_above_state(task, _clock(each)[-1]) for each in folder.glob(f"tried-{task.config}-*")]
    ours, theirs = (max(float(each.peak_mib_U[-1]) for each in found[side]) for side in (OURS, THEIRS))
    text = f"{task.config}: peak above state ({ours:.0f} MiB, highest of the seeds) over"
    return [
        *claims,
        Claim(f"{text} that of TRL's fastest setting ({theirs:.0f} MiB)", ours / theirs, "<=", 1.0),
        Claim(f"{text} that of its most frugal one ({min(tried):.0f} MiB)", ours / min(tried), "<=", 1.0),
    ]


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The difference of the means, and half of its 95% interval (Welch's, with the fewest degrees of freedom)."""
    error = sum(statistics.variance(ends) / len(ends) for ends in (ours, theirs)) ** 0.5
    return statistics.fmean(ours) - statistics.fmean(theirs), T_QUANTILE[len(ours)] * error


def _rows(task: Task, system: str, seeds: Sequence[Scored], level: float) -> list[Row]:
    """Return a row for each kept policy, and one for where the mean first comes to ``level``."""
    rows: list[Row] = []
    for place, update in enumerate(seeds[0].updates_U.tolist()):
        row: Row = {"task": task.config, "system": system, "update": update}
        for kind in TEMPERATURES:
            values = [float(getattr(each, f"{kind}_U")[place]) for each in seeds]
            if math.isnan(values[0]):
                continue
            row |= {kind: statistics.fmean(values), f"{kind}_least": min(values), f"{kind}_most": max(values)}
        if task.parameters is not None and update:
            row |= {"above_state_mib": float(_mean(seeds, "peak_mib_U")[place])}
            row |= {f"cpu_s_{kind.__name__}": float(kind(each.cpu_s_U[place] for each in seeds)) for kind in (min, max)}
        rows.append(row | {name: float(_mean(seeds, f"{name}_U")[place]) for name in TIMES})
    there = {name: _first(seeds, f"{name}_U", level) for name in TIMES}
    return [*rows, {"task": task.config, "system": system, "update": "where TRL's ends", "greedy": level, **there}]


def _mean(seeds: Sequence[Scored], name: str) -> np.ndarray:
    return np.mean([getattr(each, name) for each in seeds], axis=0)


def _first(seeds: Sequence[Scored], name: str, level: float) -> float:
    """Where the mean greedy curve first comes to ``level``, by the figure of this name; NaN if it never does."""
    values_U, at_U = _mean(seeds, "greedy_U"), _mean(seeds, name)
    for before, after in zip(range(len(values_U) - 1), range(1, len(values_U)), strict=True):
        if values_U[after] >= level:
            share = (level - values_U[before]) / (values_U[after] - values_U[before])
            return float(at_U[before] + max(share, 0.0) * (at_U[after] - at_U[before]))
    return float("nan")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw greedy exact match by CPU seconds, tokens and updates, a row a task, with the seeds' range as a band."""
    from matplotlib.figure import Figure

    kept = [row for row in rows if not isinstance(row["update"], str)]
    tasks = list(dict.fromkeys(str(row["task"]) for row in kept))
    systems = list(dict.fromkeys(str(row["system"]) for row in kept))
    figure = Figure(figsize=(12, 3.6 * len(tasks)), layout="constrained")
    columns = {"cpu_s": (1, "CPU seconds"), "tokens": (1000, "thousands of generated tokens"), "update": (1, "updates")}
    for task, of_task in zip(tasks, figure.subplots(len(tasks), 3, sharey="row", squeeze=False), strict=True):
        for axis, (name, (unit, label)) in zip(of_task, columns.items(), strict=True):
            distinct(axis)
            for system in systems:
                mine = [row for row in kept if (row["task"], row["system"]) == (task, system)]
                x_U = [float(row[name]) / unit for row in mine]
                low_U, mean_U, high_U = (
                    [float(row[column]) for row in mine] for column in ("greedy_least", "greedy", "greedy_most")
                )
                (line,) = axis.plot(x_U, mean_U, label=system, markersize=4)
                axis.fill_between(x_U, low_U, high_U, color=line.get_color(), alpha=0.15, linewidth=0)
            axis.set(xlabel=label)
            axis.grid(alpha=0.3)
        of_task[0].set(title=task, ylabel="held-out exact match")
        of_task[0].legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    need("trl")
    sys.exit(main())
