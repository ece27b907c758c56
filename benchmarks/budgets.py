"""Learning curves of budget rules by generated tokens and by time, on the demo's task and on a harder one.

All runs of a task have the same policy, learning rate, schedule and number of updates of 16 prompts, and three seeds;
the training prompts are few, so that they come again and there is something to go by. Uniform groups have 16
completions, and so have the others on average where they divide a budget; rules with rounds begin with 8. A run has one
thread and a core of its own, two run at a time, and seeds and rules take turns. Seconds are those of rollouts and
updates, without validations and start. A curve is the mean over the seeds; where it comes to a value is its first
validation at or above it.

One rule decodes the 16 completions of uniform groups in two rounds of 8, and learns the same: what a second round costs
a step. Then the same completions are decoded, without updates, in one round of 16 and in two of 8, in turns.

``--task`` and ``--rule`` measure a part: uniform groups and the rules that are named, without rounds, claims, picture.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.learning_runs import Curves, LearningRun, kept_runs, mean_curve, run_all, spread
from benchmarks.lines import distinct
from benchmarks.report import ROOT, Claim, Options, Row, finish, options_parser
from benchmarks.rollouts import slots
from benchmarks.workloads import arithmetic_prompts, arithmetic_rows, load
from lit_grpo.budgets.allocation import Allocation
from lit_grpo.methods.hints import Reference
from lit_grpo.methods.reinforce_ada import Balanced
from lit_grpo.rewards import ExactMatch, RewardRunner, load_rewards
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rounds import RoundScheduler
from lit_grpo.tasks.arithmetic import Remainder, working
from lit_grpo.types import PassRule, Prompt, SamplingParams

PICTURE = ROOT / "docs" / "pictures" / "budgets.svg"
SHARE_OF_TOKENS, SHARE_OF_STEP = 0.5, 1.1
UNIFORM, TWO_ROUNDS = "uniform", "uniform in two rounds"
TOGETHER = "greso, balanced and PODS (configs/budget.yaml)"


@dataclass
class Working(Reference):
    """The beginning of an exercise's working."""

    def text(self, prompt: Prompt, share: float) -> str:
        """The whole working."""
        number, divisor = prompt.text.rstrip("=").split("%")
        return working(Remainder(int(number), int(divisor)))


@dataclass(frozen=True)
class Rule:
    """Settings of a budget rule: prompt selection, completions per prompt, size of the first round, and selection.

    ``plugins`` are those of ``rollout.plugins``.
    """

    plugins: tuple[str, ...] = ()
    first: int = 16

    def arguments(self) -> dict[str, Any]:
        """The arguments after the config."""
        return {
            "--rollout.plugins": json.dumps(self.plugins),
            "--model.num_generations": self.first,
        }


BALANCED_FEW = "pods:keep=4,statistics=group"

RULES = {
    UNIFORM: Rule(),
    TWO_ROUNDS: Rule(("balanced:rounds=2,passed=1000000",), first=8),
    "greso": Rule(("greso",)),
    "near_half": Rule(("near_half",)),
    "phases": Rule(("phases:batches=3",)),
    "knapsack": Rule(("knapsack",)),
    "knapsack of tokens": Rule(("knapsack:tokens={tokens}",)),
    "variance": Rule(("variance",)),
    "buckets": Rule(("buckets:most=16",)),
    "dars_equal": Rule(("dars_equal",), first=8),
    "dars_hardness": Rule(("dars_hardness",), first=8),
    "balanced": Rule(("balanced", BALANCED_FEW), first=8),
    "positive": Rule(("balanced:passed=1,failed=0",), first=8),
    "replace_flat": Rule(("replace_flat:most=16",)),
    "PODS": Rule(("pods:keep=4",)),
    "D3S": Rule(("d3s:keep=8,first_keep=4,tokens=0.8,first_tokens=0.2",)),
    "max_entropy": Rule(("max_entropy:keep=4",)),
    "random": Rule(("random_members:keep=4",)),
    "rlep": Rule(("rlep",)),
    "repo": Rule(("repo",)),
    "reference": Rule(("benchmarks.budgets.Working",)),
    TOGETHER: Rule(("greso", "balanced:rounds=3,passed=2,failed=2", BALANCED_FEW), first=8),
}


KINDS = {
    "who is asked, and with what": ("greso", "near_half", "phases", "reference"),
    "how many, divided": ("knapsack", "knapsack of tokens", "variance", "buckets"),
    "how many, in rounds": (TWO_ROUNDS, "dars_equal", "dars_hardness", "balanced", "positive", "replace_flat"),
    "which are learnt from": ("PODS", "D3S", "max_entropy", "random", "rlep", "repo"),
}
"""The rules of a column of the picture."""
AXES = {"tokens_U": (1000, "thousands of generated tokens"), "wall_s_U": (1, "seconds of rollouts and updates")}


@dataclass(frozen=True)
class Task:
    """A configuration, the training prompts that are used of it, the updates of a run, and the rules compared.

    ``tokens`` is about what uniform groups take in an update.
    """

    config: str
    num_rows: int
    updates: int
    validate_every: int
    tokens: int
    rules: tuple[str, ...] = tuple(RULES)
    seeds: tuple[int, ...] = (0, 1, 2)
    prompts: int = 16
    held_out: int = 256


TASKS = (
    Task("arithmetic", 256, 32, 4, 6000),
    Task("knights", 64, 16, 4, 16_000, tuple(rule for rule in RULES if rule != "reference")),  # it has no working
)
QUICK = Task("arithmetic", 4, 3, 1, 100, (UNIFORM, TWO_ROUNDS, TOGETHER), (0,), 2, 8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, draw them, time two rounds, and judge; or run a part."""
    assert __doc__ is not None
    parser = options_parser(__doc__)
    parser.add_argument("--task", nargs="+", choices=[task.config for task in TASKS], help="by default both")
    parser.add_argument("--rule", nargs="+", choices=RULES, help="beside uniform; by default all")
    asked = parser.parse_args(arguments)
    options = Options(asked.quick, asked.device, asked.policy, asked.output)
    if asked.task or asked.rule:
        rules = (UNIFORM, *(asked.rule or [rule for rule in RULES if rule != UNIFORM]))
        tasks = tuple(
            replace(task, rules=tuple(rule for rule in rules if rule in task.rules))
            for task in TASKS
            if not asked.task or task.config in asked.task
        )
        found = _measure(tasks, options)
        rows = [_row(task, rule, seeds, found[task, UNIFORM]) for (task, rule), seeds in found.items()]
        return finish("budgets", options, _settings(tasks) | {"rules": ", ".join(rules)}, rows, [])
    tasks = (QUICK,) if options.quick else TASKS
    found = _measure(tasks, options)
    rows = [_row(task, rule, seeds, found[task, UNIFORM]) for (task, rule), seeds in found.items()]
    if options.output is not None or not options.quick:  # a quick run leaves the docs' picture as it is
        draw(found, PICTURE if options.output is None else options.output.with_suffix(".svg"))
    rounds = [_two_rounds(num_prompts, options) for num_prompts in ((2,) if options.quick else (16, 64))]
    settings = _settings(tasks)
    text = "seconds of a rollout of two rounds over those of one with the same completions"
    claims = [Claim(f"{text}, {row['rule']}", float(row["ratio"]), "<=", SHARE_OF_STEP) for row in rounds]
    by_rule = {row["rule"]: float(row["wall_s"]) for row in rows if row["task"] == tasks[0].config}
    text = "seconds of the steps of uniform groups in two rounds over those in one"
    claims.append(Claim(text, by_rule[TWO_ROUNDS] / by_rule[UNIFORM], "<=", SHARE_OF_STEP))
    claims += [] if options.quick else _claims(rows)
    return finish("budgets", options, settings, [*rows, *rounds], claims)


def _measure(tasks: Sequence[Task], options: Options) -> dict[tuple[str, str], list[Curves]]:
    """Return the curves of each task and rule, one a seed."""
    found: dict[tuple[str, str], list[Curves]] = {}
    with kept_runs("budgets", options) as folder:
        for task in tasks:
            runs = {(rule, seed): _run(task, rule, seed) for seed in task.seeds for rule in task.rules}
            curves = run_all(list(runs.values()), folder)
            found |= {(task.config, rule): [curves[runs[rule, s].name] for s in task.seeds] for rule in task.rules}
    return found


def _settings(tasks: Sequence[Task]) -> Row:
    settings: Row = {"seeds": len(tasks[0].seeds), "threads": 1, "prompts": tasks[0].prompts}
    settings |= {f"updates, {task.config}": task.updates for task in tasks}
    return settings | {f"training prompts, {task.config}": task.num_rows for task in tasks}


def _run(task: Task, rule: str, seed: int) -> LearningRun:
    arguments = RULES[rule].arguments() | {
        "--seed_everything": seed,
        "--trainer.max_steps": task.updates,
        "--trainer.val_check_interval": task.validate_every,
        "--model.lr_scheduler.init_args.total_iters": task.updates,
        "--data.batch_size": task.prompts,
        "--data.train.init_args.num_rows": task.num_rows,
        "--data.validation.init_args.num_rows": task.held_out,
    }
    words = [str(word).format(tokens=task.tokens) for pair in arguments.items() for word in pair]
    return LearningRun(
        "-".join([task.config, *rule.replace(",", "").partition("(")[0].split(), str(seed)]), task.config, tuple(words)
    )


def _row(task: str, rule: str, seeds: Sequence[Curves], uniform: Sequence[Curves]) -> Row:
    exact_U, tokens_U, wall_s_U = (mean_curve(seeds, name) for name in ("exact_U", "tokens_U", "wall_s_U"))
    level = float(mean_curve(uniform, "exact_U")[-1])
    reached = np.flatnonzero(exact_U >= level)
    first = int(reached[0]) if len(reached) else None
    return {
        "task": task,
        "rule": rule,
        "start": float(exact_U[0]),
        **spread([float(each.exact_U[-1]) for each in seeds], "final"),
        "tokens": float(tokens_U[-1]),
        "completions": float(mean_curve(seeds, "samples_U")[-1]),
        "wall_s": float(wall_s_U[-1]),
        "flat": float(np.nanmean(mean_curve(seeds, "flat_U")[1:])),
        "by_uniform_tokens": _by(exact_U, tokens_U, float(mean_curve(uniform, "tokens_U")[-1])),
        "by_uniform_seconds": _by(exact_U, wall_s_U, float(mean_curve(uniform, "wall_s_U")[-1])),
        "tokens_to_level": float("nan") if first is None else float(tokens_U[first]),
        "seconds_to_level": float("nan") if first is None else float(wall_s_U[first]),
    }


def _by(exact_U: np.ndarray, axis_U: np.ndarray, moment: float) -> float:
    """Return the value of a curve at a point of an axis."""
    return float(exact_U[~np.isnan(exact_U) & (axis_U <= moment)][-1])


def _claims(rows: Sequence[Row]) -> list[Claim]:
    claims = []
    for task in dict.fromkeys(str(row["task"]) for row in rows):
        uniform, *others = [row for row in rows if row["task"] == task]
        for what, column, limit in (
            ("generated tokens", "tokens_to_level", SHARE_OF_TOKENS),
            ("seconds", "seconds_to_level", 1.0),
        ):
            best = min(others, key=lambda row: float(np.nan_to_num(float(row[column]), nan=np.inf)))
            text = f"{task}: {what} of the best rule ({best['rule']}) to where uniform ends, over its own to there"
            claims.append(Claim(text, float(best[column]) / float(uniform[column]), "<=", limit))
    return claims


def _two_rounds(num_prompts: int, options: Options) -> Row:
    """Decode and score the same completions in one round and in two, in turns; return medians and their ratio."""
    torch.set_num_threads(1)
    repeats, size, limit = (1, 4, 16) if options.quick else (7, 16, 128)
    policy, tokenizer = load("tiny", options.device)
    generator = slots(policy, tokenizer, num_slots=64)
    rows = arithmetic_rows(num_prompts).rows()
    prompts = [replace(p, columns=r) for p, r in zip(arithmetic_prompts(tokenizer, num_prompts), rows, strict=True)]
    runner = RewardRunner(load_rewards([ExactMatch(pattern=r"(?:^|=)(\d+)$")], 10.0))
    seconds: dict[str, list[float]] = {"one": [], "two": []}
    steps: dict[str, list[int]] = {"one": [], "two": []}
    for repeat in range(repeats + 1):
        sampled = set()
        for name, first, rule in (("one", size, Allocation()), ("two", size // 2, Balanced(rounds=2, passed=10**6))):
            loop = RolloutLoop(generator, listeners=[RoundScheduler(runner, rule, PassRule("ExactMatch"))])
            groups, stats = loop.collect(prompts, first, SamplingParams(max_tokens=limit), repeat)
            sampled.add(tuple(tuple(r.completion.token_ids_T.tolist()) for group in groups for r in group.rollouts))
            seconds[name].append(stats.rollout_s)
            steps[name].append(stats.num_steps)
        assert len(sampled) == 1, "one and two rounds have sampled other completions"
    runner.close()
    ratios = [two / one for one, two in zip(seconds["one"][1:], seconds["two"][1:], strict=True)]  # the first warms up
    return {
        "task": "rounds",
        "rule": f"{num_prompts} prompts",
        "wall_s": statistics.median(seconds["two"][1:]),
        "one_round_s": statistics.median(seconds["one"][1:]),
        "steps": statistics.median(steps["two"]),
        "one_round_steps": statistics.median(steps["one"]),
        "ratio": statistics.median(ratios),
    }


def draw(found: dict[tuple[str, str], list[Curves]], path: Any) -> None:
    """Draw held-out exact match by generated tokens and by seconds, a column for each kind of rule."""
    from matplotlib.figure import Figure

    columns = {
        (task, kind): [rule for rule in (UNIFORM, TOGETHER, *rules) if (task, rule) in found]
        for task in dict.fromkeys(task for task, _ in found)
        for kind, rules in KINDS.items()
        if any((task, rule) in found for rule in rules)
    }
    figure = Figure(figsize=(4 * len(columns), 8.5), layout="constrained")
    axes = figure.subplots(2, len(columns), squeeze=False)
    for axis in axes.flat:
        distinct(axis)
    for ((task, kind), rules), axes_of_kind in zip(columns.items(), axes.T, strict=True):
        for axis, (name, (_, label)) in zip(axes_of_kind, AXES.items(), strict=True):
            for rule in rules:
                _draw_rule(axis, rule, name, found[task, rule])
            ends = [float(each.exact_U[-1]) for rule in rules for each in found[task, rule]]
            begin = float(found[task, UNIFORM][0].exact_U[0])
            axis.set(title=f"{task}: {kind}", xlabel=label, ylabel="held-out exact match")
            axis.set_ylim(max(begin, 2 * min(ends) - max(ends) - 0.08), max(ends) + 0.01)  # where they differ
            axis.grid(alpha=0.3)
        axes_of_kind[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), fontsize="small")
    figure.savefig(path)


def _draw_rule(axis: Any, rule: str, name: str, seeds: Sequence[Curves]) -> None:
    measured_U = ~np.isnan(mean_curve(seeds, "exact_U"))
    exact_SU = np.array([each.exact_U[measured_U] for each in seeds])
    x_U = mean_curve(seeds, name)[measured_U] / AXES[name][0]
    color = {UNIFORM: "black", TOGETHER: "crimson"}.get(rule)
    axis.plot(x_U, exact_SU.mean(0), label=rule, color=color, linewidth=1 if color is None else 2)
    if color is not None:
        axis.fill_between(x_U, exact_SU.min(0), exact_SU.max(0), color=color, alpha=0.12, linewidth=0)


if __name__ == "__main__":
    sys.exit(main())
