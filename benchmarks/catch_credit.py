"""A game learned by GRPO on the reward of an episode, and beside it by three rules of credit for single turns.

All runs are ``configs/catch.yaml`` with the rule in its list of plug-ins: the same policy at the start, the same games,
as many completions and updates. The rules by turn are told more than ``grpo``: how much nearer each move has brought
the paddle. Each has its own default settings. Compared is the share of held-out games in which the ball was caught, by
sampled play. The game has 25 different beginnings, so a held-out game is new by its seed and its play alone.

All runs are in one process, for to start one takes as long as to learn the game.

A rule is claimed to be above ``grpo``, in the mean of the seeds: held out after the last update, and in training.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from benchmarks.learning_runs import Curves, LearningRun, kept_runs, train_here
from benchmarks.report import Claim, Options, Row, finish, parse_options

GRPO = "grpo"
RULES = (GRPO, "gigpo", "mt_grpo", "return_to_go")
SEEDS = (0, 1, 2)
UPDATES, EVERY = 16, 8
ENVIRONMENT = {"environments": {"factory": "lit_grpo.tasks.Catch", "tool_timeout_s": 10}}
QUICK = ("--data.batch_size", "2", "--data.validation.init_args.num_rows", "8", "--model.num_generations", "4")


def main(options: Options) -> int:
    """Train by every rule with every seed, one after another."""
    torch.set_num_threads(1)
    seeds, updates, every = (SEEDS[:1], 2, 1) if options.quick else (SEEDS, UPDATES, EVERY)
    words = ("--trainer.max_steps", str(updates), "--trainer.val_check_interval", str(every))
    words += ("--model.lr_scheduler.init_args.total_iters", str(updates))
    quick = QUICK if options.quick else ()
    runs = [
        LearningRun(f"{rule}-{seed}", "catch", ("--seed_everything", str(seed), *_plugins(rule), *words, *quick))
        for seed in seeds
        for rule in RULES
    ]
    with kept_runs("catch_credit", options) as folder:
        curves = {run.name: train_here(run, folder / run.name) for run in runs}
    by_rule = {rule: [curves[f"{rule}-{seed}"] for seed in seeds] for rule in RULES}
    rows = [_row(rule, seed, each) for rule in RULES for seed, each in zip(seeds, by_rule[rule], strict=True)]
    settings: Row = {"updates": updates, "seeds": len(seeds)}
    return finish("catch_credit", options, settings, rows, _claims(by_rule))


def _plugins(rule: str) -> tuple[str, str]:
    return "--rollout.plugins", json.dumps([ENVIRONMENT] if rule == GRPO else [ENVIRONMENT, rule])


def _row(rule: str, seed: int, curves: Curves) -> Row:
    validated = {f"at {update}": float(share) for update, share in enumerate(curves.exact_U) if np.isfinite(share)}
    return {
        "rule": rule,
        "seed": seed,
        **validated,
        "in training": float(np.nanmean(curves.reward_U)),
        "tokens": int(curves.tokens_U[-1]),
        "cpu_s": round(float(curves.cpu_s_U[-1]), 1),
    }


def _claims(by_rule: dict[str, list[Curves]]) -> list[Claim]:
    measures = {
        "held-out catches after the last update": lambda curves: float(curves.exact_U[-1]),
        "catches in training, mean of all updates": lambda curves: float(np.nanmean(curves.reward_U)),
    }
    claims: list[Claim] = []
    for what, measure in measures.items():
        of_seeds = {rule: [measure(each) for each in curves] for rule, curves in by_rule.items()}
        mean = float(np.mean(of_seeds[GRPO]))
        for rule in RULES[1:]:
            above = float(np.mean(of_seeds[rule])) - mean
            claims.append(Claim(f"{rule}: {what}, less that of {GRPO}", above, ">=", 0.0))
    return claims


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
