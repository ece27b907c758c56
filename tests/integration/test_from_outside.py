"""Every part that may be a user's own, added by its path in a config, from one file outside the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import read_metrics

from lit_grpo.cli.command_line import run

OUTSIDE = """
from dataclasses import dataclass

import torch

from lit_grpo.methods.shared.selection import CompletionSelection
from lit_grpo.plugins import Plugin
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.tasks.drawn import DrawnRows
from lit_grpo.update.advantages.estimator import EstimatorRow
from lit_grpo.update.objective.recipes import Recipe


def squared(log_ratio_N, tokens, *, epsilon):  # an objective
    loss_N = -log_ratio_N.exp() * tokens.advantages_N + log_ratio_N.square() / (2 * epsilon)
    return loss_N, {"mine/squared": log_ratio_N.detach().square()}


LOSS = Recipe(squared, "token", {"epsilon": 0.2}, "this file")
MINUS_A_HALF = EstimatorRow(lambda rewards, given: rewards.rewards_R - 0.5, ("none",))  # an advantage estimator


class Counted(SlotGenerator):  # a generator
    num_rollouts = 0

    def sleep(self) -> dict[str, float]:  # the command line wants the annotations of the Generator protocol
        self.num_rollouts += 1
        return super().sleep() | {"mine/rollouts": float(self.num_rollouts)}


@dataclass
class Longest(Plugin):  # a metric
    def setup(self):
        self.longest = 0

    def on_completion(self, completion):
        self.longest = max(self.longest, completion.num_tokens)

    def metrics(self, all_gather):
        return {"mine/longest": float(self.longest)}


@dataclass
class Shortest(CompletionSelection):  # a choice of what is trained on
    def values(self, rewards_N, rollouts, entropies):
        return -torch.tensor([rollout.completion.num_tokens for rollout in rollouts]).double()


class Sums(DrawnRows):  # a task, with its reward
    def draw(self, rng):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def is_short(completion, answer):
    return float(len(completion) < 8 + len(answer))
"""


def test_a_run_has_everything_from_a_file_outside_the_package(
    tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside.py").write_text(OUTSIDE)
    config = {
        "seed_everything": 7,
        "run": {"name": "outside"},
        "trainer": {"accelerator": "cpu", "max_steps": 2, "enable_progress_bar": False},
        "rollout": {"plugins": ["outside.Longest", {"outside.Shortest": {"keep": 2}}]},
        "model": {
            "policy": str(policy_folder),
            "generator": {"class_path": "outside.Counted", "init_args": {"num_slots": 4}},
            "rewards": [{"function": "outside.py:is_short"}],
            "objective": {"loss": "outside.LOSS", "epsilon": 0.1},
            "advantages": {"estimator": "outside.MINUS_A_HALF"},
            "num_generations": 4,
            "sampling": {"max_tokens": 16},
        },
        "data": {
            "train": {"class_path": "outside.Sums", "init_args": {"num_rows": 8, "split": "train", "seed": 0}},
            "batch_size": 3,
        },
        "rollout_timeline": {"every_n_updates": 0},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    run(["fit", "--config", "config.yaml"])
    rows = [row for row in read_metrics(Path("runs", "outside", "metrics.csv")) if row["reward"]]
    assert len(rows) == 2
    assert [float(row["mine/rollouts"]) for row in rows] == [1.0, 2.0]  # the generator
    assert all(float(row["mine/squared"]) < 1e-6 for row in rows)  # the objective, on-policy
    assert all(float(row["advantages/max_abs"]) == 0.5 for row in rows)  # the estimator
    assert all(float(row["completions/max_length"]) <= float(row["mine/longest"]) <= 16 for row in rows)  # the metric
    for row in rows:  # the task, of which the shortest two of four are trained on
        assert 0 < float(row["reward"]) < 1
        trained, sampled = float(row["update/tokens"]), 3 * 4 * float(row["completions/mean_length"])
        assert 0 < trained < sampled / 2
