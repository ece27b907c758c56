"""Comparison of each method with plain GRPO at an equal budget of generated tokens.

A run is a shipped configuration with the method's plug-ins and fields, and ends when it has generated its task's budget
of tokens, however many updates that is: a method that decodes more for an update takes fewer. All runs of a task have
the same policy, training prompts, held-out prompts and validations after so many updates, and a constant learning rate,
so that no schedule has to know how many updates there will be. Training prompts are few, so that they come again and
there is something to go by. Held-out exact match is compared as the mean over the run (the area under its curve by
generated tokens, over the budget) and at the budget's end, both between validations on a straight line. Gains are over
plain GRPO of the same seed; :mod:`scripts.methods_page` prints them with their intervals.

Runs are one after another in this process, on one thread; those with peers are processes, side by side. Each is in the
result file as soon as it has ended, and a later call goes on: what stands there is not run again, unless its task or
its method has been changed since. For example ``--task demo --method grpo nat --seed 0 1 2``; all by default. A method
that this checkout does not have is passed over with a sentence.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.learning_runs import Curves, LearningRun, run_all, train_here
from benchmarks.report import ROOT, Options, Row, commit, note, options_parser, versions, write
from lit_grpo.methods import shipped
from lit_grpo.tasks import ArithmeticRows
from scripts.methods_page import GRPO, newest, tables

SEEDS, PEER = (0, 1, 2), 100
MOST_UPDATES = 1000
REFUSED = 2
"""The exit code of a command line that is refused; others are of signals."""
Case = tuple[str, str, int]
"""Task, method and seed."""


@dataclass(frozen=True)
class Task:
    """A configuration and what all its runs share.

    ``tokens`` are the budget of a run, ``fields`` are set after the configuration's own, ``plugins`` are those that the
    task itself needs.
    """

    config: str
    tokens: int
    validate_every: int
    fields: Mapping[str, Any]
    plugins: tuple[str | dict[str, Any], ...] = ()

    def words(self) -> list[str]:
        """The command-line arguments of all its runs."""
        stop = {"class_path": "benchmarks.learning_callbacks.TokenBudget", "init_args": {"tokens": self.tokens}}
        length = {"trainer.max_steps": MOST_UPDATES, "trainer.val_check_interval": self.validate_every}
        return _words({**length, "trainer.callbacks+": json.dumps(stop), **self.fields})


def _words(fields: Mapping[str, Any]) -> list[str]:
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]


def run_fields(prompts: int, group: int, learning_rate: float, num_rows: int, held_out: int) -> dict[str, Any]:
    return {
        "data.batch_size": prompts,
        "model.num_generations": group,
        "model.optimizer.init_args.lr": learning_rate,
        "model.lr_scheduler.init_args.end_factor": 1.0,
        "data.train.init_args.num_rows": num_rows,
        "data.validation.init_args.num_rows": held_out,
        "data.eval_batch_size": held_out,
    }


class LongWorkings(ArithmeticRows):
    """Exercises of the demo with at least nine subtractions, of which its policy solves about a tenth."""

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw until a working is long."""
        while (row := super().draw(rng))["num_steps"] < 9:
            pass
        return row


TASKS = {
    "demo": Task("arithmetic", 60_000, 8, run_fields(8, 8, 1e-4, 128, 512)),
    "hard": Task(
        "arithmetic",
        40_000,
        4,
        {
            **run_fields(8, 8, 1e-4, 128, 128),
            "data.train.class_path": "benchmarks.methods.LongWorkings",
            "data.validation.class_path": "benchmarks.methods.LongWorkings",
        },
    ),
    "knights": Task("knights", 200_000, 10, run_fields(8, 8, 2e-4, 64, 256)),
    "word_problems": Task("word_problems", 6_500, 3, run_fields(8, 8, 2e-5, 64, 96)),
    "catch": Task(
        "catch",
        20_000,
        4,
        run_fields(8, 8, 1e-3, 1024, 128),
        ({"environments": {"factory": "lit_grpo.tasks.Catch", "tool_timeout_s": 10}},),
    ),
    "calculator": Task(
        "calculator",
        16_000,
        3,
        run_fields(8, 8, 3e-4, 128, 256),
        (
            {
                "environments": {
                    "tools": ["lit_grpo.tasks.calculator.calculate"],
                    "max_turns": 3,
                    "tool_timeout_s": 10,
                }
            },
        ),
    ),
}
OUTCOMES, TURNS = ("demo", "knights", "word_problems"), ("catch", "calculator")
SHARED = ("demo", "knights")
SHORT = ("word_problems",)
"""A run of these has ten updates."""


@dataclass(frozen=True)
class Method:
    """Settings of a method on top of plain GRPO: its ``rollout.plugins``, other ``fields``, and its tasks.

    A run has as many ``peers``, the same run with other seeds, each in a process and with a budget of its own.
    """

    plugins: tuple[str | dict[str, Any], ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = OUTCOMES
    peers: int = 0

    @property
    def told(self) -> str:
        """The settings of the method, as text."""
        plugins = [f"rollout.plugins {spec}" for spec in self.plugins]
        return ", ".join([*plugins, *(f"{name} {value}" for name, value in self.fields.items())])


FEW_OF_FOUR: dict[str, Any] = {"model.num_generations": 4}
SMALL_GROUPS: dict[str, Any] = {"model.num_generations": 4, "data.batch_size": 16}
TAUGHT = "the policy that the configuration comes to"
"""Stands for the folder of a teacher, which is trained once with the task's configuration; its tokens do not count."""
TEACHER: dict[str, Any] = {"model.teacher.policy": TAUGHT}
JUDGED = {"judge": "lit_grpo.tasks.arithmetic:first_wrong_step", "separator": "="}
DART = ("rlep:members=1,choice=recent,only_failed=true", "knapsack", "d3s_tokens:tokens=0.8", "april")
LOSS_GRPO: dict[str, Any] = {"model.objective.loss": "grpo"}
HALF_THE_PROMPTS: dict[str, Any] = {"data.batch_size": 4}


def _vote(task: str, pattern: str) -> Method:
    """Majorities in place of a task's own reward, which is there for figures alone."""
    unrewarded = [{"function": "exact_match", "name": "correct", "weight": 0, "args": {"pattern": pattern}}]
    return Method(({"majority_vote": {"pattern": pattern}},), {"model.rewards": json.dumps(unrewarded)}, tasks=(task,))


def _beside(method: Method, plugin: str, fields: Mapping[str, Any]) -> Method:
    """A method with one more plug-in and further fields."""
    return replace(method, plugins=(*method.plugins, plugin), fields={**method.fields, **fields})


TWO_ROOTS: dict[str, Any] = {"model.num_generations": 2}
LAST_NUMBER = r"(?:^|=)(\d+)$"
ECHO_TREE = "echo_tree:width=8,top=2,depth=1,low=0.1,high=0.5,rise=0.1,unsure=0.497,hopeless=0.3,doubtful=0.4"
"""For a vocabulary of a few tokens, of which two have almost all probability."""

METHODS = {
    GRPO: Method(tasks=(*OUTCOMES, *TURNS, "hard")),
    "maxrl": Method(fields={"model.advantages.estimator": "maxrl"}, tasks=(*OUTCOMES, "hard")),
    "dps": Method(("dps",)),
    "poise": Method(("poise:at=12",)),
    "poise, groups of 4": Method(("poise:at=12",), SMALL_GROUPS),
    "groups of 4": Method(fields=SMALL_GROUPS),
    "half as many completions": Method(fields=FEW_OF_FOUR, tasks=TURNS),
    "drpo": Method(("drpo",), LOSS_GRPO),
    "drpo, default loss": Method(("drpo",)),
    "loss grpo": Method(fields=LOSS_GRPO),
    "nat": Method(("nat",)),
    "nat_uniform": Method(("nat_uniform",)),
    "spaco": Method(("spaco:chunk=16",)),
    "majority_vote": _vote("demo", LAST_NUMBER),
    "majority_vote, letters": _vote("knights", r"(?:^|\.)([A-Ga-g]+)$"),
    "majority_vote, last number": _vote("word_problems", r"(\d+)\D*$"),
    "xrpo": Method(("xrpo",)),
    "novelty": Method(("novelty",)),
    "prompt_gdro": Method(("prompt_gdro",)),
    "rollout_gdro": Method(("rollout_gdro",)),
    "capo": Method(("capo",)),
    "copo": Method(("copo",)),
    "norm_test": Method(("norm_test:most=32",), tasks=("demo", "knights")),
    "norm_test, early": Method(("norm_test:most=32,warm_up=4",), tasks=SHORT),
    "goodput": Method(("goodput:most=32",), tasks=("demo", "knights")),
    "goodput, early": Method(("goodput:most=32,warm_up=4",), tasks=SHORT),
    "arpo": Method(("arpo:width=8",), FEW_OF_FOUR, tasks=TURNS),
    "arpo, groups of 16": Method(("arpo",), tasks=TURNS),
    "aepo": Method(("aepo:width=8",), FEW_OF_FOUR, tasks=TURNS),
    "aepo, groups of 16": Method(("aepo",), tasks=TURNS),
    "trace": Method(("trace:width=8",), FEW_OF_FOUR, tasks=TURNS),
    "eptree": Method(("eptree",), {"model.num_generations": 2}),
    "eptree, groups of 40": Method(("eptree",)),
    "treepo": Method(("treepo:segment=8,width=8",), {"model.num_generations": 2}),
    "treepo, groups of 16": Method(("treepo:segment=8",)),
    "latr": Method(("latr:width=8,look_ahead=8",), TWO_ROOTS, tasks=("demo",)),
    "latr, more branches": Method(("latr:width=8,look_ahead=8,least=0.05,gap=0.9",), TWO_ROOTS, tasks=("demo",)),
    "echo_tree": Method((ECHO_TREE,), TWO_ROOTS, tasks=("demo",)),
    "echo_tree, majority_vote": _beside(_vote("demo", LAST_NUMBER), ECHO_TREE, TWO_ROOTS),
    "two iterations": Method(fields={"model.num_iterations": 2}, tasks=TURNS),
    "turn_ppo": Method(fields={"model.num_iterations": 2, "model.objective.ratio": "turn"}, tasks=TURNS),
    # who is asked
    "greso": Method(("greso",)),
    "near_half": Method(("near_half",)),
    # how many completions
    "knapsack": Method(("knapsack",)),
    "variance": Method(("variance",)),
    "buckets": Method(("buckets:most=8",)),
    "dars_equal": Method(("dars_equal:most=16",), FEW_OF_FOUR),
    "balanced": Method(("balanced",), FEW_OF_FOUR),
    "replace_flat": Method(("replace_flat:most=8",)),
    # which are trained on
    "pods": Method(("pods:keep=4",)),
    "d3s": Method(("d3s:keep=6,tokens=0.8",)),
    "max_entropy": Method(("max_entropy:keep=4",)),
    "coreset of half": Method(("benchmarks.coresets.Coreset",), tasks=("demo",)),
    "random half": Method(({"benchmarks.coresets.Coreset": {"at_random": True}},), tasks=("demo",)),
    "rlep": Method(("rlep",)),
    "repo": Method(("repo",)),
    # with a teacher
    "scope": Method(({"scope": JUDGED},), TEACHER, tasks=("demo",)),
    "scope, 4 corrected": Method(({"scope": JUDGED | {"members": 4}},), TEACHER, tasks=("demo",)),
    "distill beside rewards": Method(("distill",), TEACHER, tasks=("demo",)),
    "dart": Method(DART, {"model.objective.correction.mode": "token_truncate"}, tasks=("demo", "calculator")),
    # completions of other runs
    "half as many prompts": Method(fields=HALF_THE_PROMPTS, tasks=SHARED),
    "swarm": Method(("swarm:folder=../exchange",), HALF_THE_PROMPTS, SHARED, peers=1),
    "swarm, failures": Method(("swarm:folder=../exchange,failures=true",), HALF_THE_PROMPTS, SHARED, peers=1),
    # when groups leave the buffer
    "april": Method(("april",)),
    "sortedrl": Method(("sortedrl",)),
    # credit of turns
    "gigpo": Method(("gigpo",), tasks=("catch",)),
    "mt_grpo": Method(("mt_grpo",), tasks=("catch",)),
    "return_to_go": Method(("return_to_go",), tasks=("catch",)),
}
"""The compared methods: a line here is a line of the page. A method's file may be absent."""
QUICK = Task("arithmetic", 600, 1, run_fields(2, 4, 3e-4, 4, 8))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and not there yet, in the order given; return 1 where a run was refused."""
    asked, options = _read(arguments)
    torch.set_num_threads(1)
    tasks = {"demo": QUICK} if options.quick else TASKS
    cases = [(t, m, s) for s in asked.seed for t in asked.task for m in _here(asked.method) if t in METHODS[m].tasks]
    path = options.output or newest()
    refused = 0
    for task, method, seed in cases:
        if (task, method, seed) not in kept_rows(path, tasks):
            row = _train(tasks[task], task, method, seed)
            refused += row is None
            rows = kept_rows(path, tasks) | ({} if row is None else {(task, method, seed): row})
            settings: Row = {name: shlex.join(each.words()) for name, each in tasks.items()}
            write("methods", replace(options, output=path), settings, [rows[each] for each in sorted(rows)], [])
    if path.exists():
        print(*tables(json.loads(path.read_text())), sep="\n")
    return int(refused > 0)


def kept_rows(path: Path, tasks: Mapping[str, Task]) -> dict[Case, Row]:
    """The rows of a result file by task, method and seed, but for those whose task or method has been changed.

    Raises:
        SystemExit: They were measured with other versions of packages.
    """
    if not path.exists():
        return {}
    result = json.loads(path.read_text())
    if result["versions"] != versions():
        raise SystemExit(f"{path} has figures of {result['versions']}; move it away to begin again with {versions()}.")
    same = {name for name, task in tasks.items() if result["settings"].get(name) == shlex.join(task.words())}
    return {
        (row["task"], row["method"], row["seed"]): row
        for row in result["rows"]
        if row["task"] in same and row["method"] in METHODS and row["set"] == METHODS[row["method"]].told
    }


def learning_run(task: Task, method: str, seed: int) -> LearningRun:
    """The run of a method with a seed."""
    beside = METHODS[method]
    plugins = json.dumps([*task.plugins, *beside.plugins])
    words = ("--seed_everything", str(seed), *task.words(), *_words(beside.fields), "--rollout.plugins", plugins)
    return LearningRun(f"{method}-{seed}", task.config, words)


def summary(curves: Curves, budget: int) -> Row:
    """Held-out exact match over the run and at the end of the budget, and what the run took.

    The curve is straight between validations, and level after the last one where a run ends before its budget does.
    """
    measured_U = np.isfinite(curves.exact_U)
    tokens_V, exact_V = curves.tokens_U[measured_U], curves.exact_U[measured_U]
    inside_V = tokens_V < budget
    end = float(np.interp(budget, tokens_V, exact_V))
    tokens, exact = np.append(tokens_V[inside_V], budget), np.append(exact_V[inside_V], end)
    updates = min(int(np.searchsorted(curves.tokens_U, budget)), len(curves.tokens_U) - 1)
    late = slice(updates - updates // 4, updates + 1)
    return {
        "over_run": float(np.trapezoid(exact, tokens) / budget),
        "end": end,
        "updates": updates,
        "late_length": float(np.nanmean(curves.length_U[late])),
        "tokens": int(curves.tokens_U[-1]),
        "cpu_s": round(float(curves.cpu_s_U[-1]), 1),
    }


def _read(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Options]:
    assert __doc__ is not None
    parser = options_parser(__doc__)
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS), help="in this order")
    parser.add_argument("--method", nargs="+", choices=METHODS, help="in this order, seed by seed; by default all")
    parser.add_argument("--seed", nargs="+", type=int, default=SEEDS)
    asked = parser.parse_args(arguments)
    options = Options(asked.quick, asked.device, asked.policy, asked.output)
    if asked.method is None:
        asked.method = [GRPO, "pods"] if options.quick else list(METHODS)
    if options.quick:
        asked.task, asked.seed = ["demo"], SEEDS[:2]
    return asked, options


def _here(methods: Sequence[str]) -> list[str]:
    """Those whose plug-ins are in this checkout; say of the others that they are passed over."""
    here = []
    for method in methods:
        names = [
            spec.partition(":")[0] if isinstance(spec, str) else next(iter(spec)) for spec in METHODS[method].plugins
        ]
        missing = [name for name in names if "." not in name and name not in shipped()]
        if missing:
            note(f"{method} is passed over: this checkout has no plug-in {missing[0]}.")
        else:
            here.append(method)
    return here


def _teacher(task: Task) -> str:
    """Train the teacher of a task, if this checkout has none yet; return its folder."""
    run = LearningRun(f"teacher-{task.config}", task.config, ("--trainer.limit_val_batches", "0"))
    folder = ROOT / "runs" / "methods" / run.name
    train_here(run, folder)
    return str(next(folder.glob("runs/*/policy")))


def _train(task: Task, name: str, method: str, seed: int) -> Row | None:
    """Train; return the row, or None after a note where the command line refuses the run."""
    run = learning_run(task, method, seed)
    if TAUGHT in run.arguments:
        run = replace(run, arguments=tuple(_teacher(task) if word == TAUGHT else word for word in run.arguments))
    peers = [learning_run(task, method, seed + PEER * number) for number in range(1, METHODS[method].peers + 1)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            if peers:
                curves = run_all([run, *peers], Path(folder))[run.name]
            else:
                curves = train_here(run, Path(folder) / run.name)
        except SystemExit as end:
            if end.code != REFUSED:
                raise
            said = (Path(folder) / run.name / "output.txt").read_text()
            note(f"{name}, {method}, seed {seed} is refused:\n{said[-2000:]}")
            return None
    case: Row = {"task": name, "method": method, "seed": seed, "set": METHODS[method].told}
    return case | summary(curves, task.tokens) | {"commit": str(commit()["commit"])}


if __name__ == "__main__":
    sys.exit(main())
