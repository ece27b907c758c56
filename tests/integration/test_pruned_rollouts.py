"""Rollouts that stop completions early: real runs, in which members are dropped, and which resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import sgd
from sampled_runs import Trained, check_log_probs, describe, train_on_sums

from lit_grpo.methods.arrol import is_left_whole
from lit_grpo.module import GRPOModule
from lit_grpo.rewards import RewardSpec
from lit_grpo.rollout.slots.generator import SlotGenerator

AT, BATCH, GROUP, UPDATES = 4, 6, 12, 5


def early_sign(completion: str) -> float:
    """A reward that shows at the point at which completions are compared: its last character there."""
    return float(completion[AT - 1 : AT] > "4")


def train(policy_folder: Path, folder: Path, checkpoint: str | None = None) -> tuple[Trained, GRPOModule]:
    own: dict[str, Any] = {"plugins": [f"arrol:at={AT}"], "rewards": [RewardSpec(f"{__file__}:early_sign")]}
    own |= {"generator": SlotGenerator(12), "optimizer": sgd(0.1), "checkpoint": checkpoint}
    sizes: dict[str, Any] = {"num_prompts": 12, "batch_size": BATCH, "max_steps": UPDATES, "num_generations": GROUP}
    module, _, _ = train_on_sums(policy_folder, folder, trained := Trained(), **own, **sizes)
    return trained, module


@pytest.mark.nightly
def test_members_are_dropped_once_the_head_is_proven_and_resuming_is_exact(policy_folder: Path, tmp_path: Path) -> None:
    trained, module = train(policy_folder, tmp_path / "whole")
    check_log_probs(trained)
    first = next(n for n, log in enumerate(trained.logs) if log["pruning/active"]) + 1
    assert 1 < first < UPDATES
    for number, batch in trained.batches.items():
        sizes: dict[tuple[str, int], int] = {}
        for rollout in batch:
            sizes[rollout.completion.request.group] = sizes.get(rollout.completion.request.group, 0) + 1
        assert len(sizes) == BATCH and min(sizes.values()) >= 2
        assert all(size == GROUP for group, size in sizes.items() if number < first or is_left_whole(group))
        log = trained.logs[number]
        assert log["rollout/pruned_completions"] == BATCH * GROUP - len(batch)
        num_trained = sum(rollout.completion.num_tokens for rollout in batch)
        assert log["rollout/tokens"] == num_trained + log["rollout/discarded_tokens"]
        assert log["rollout/probe_tokens"] == AT or number < first
    assert sum(log["rollout/pruned_completions"] for log in trained.logs[first:]) > 0
    for version in (1, 3):
        checkpoint = str(tmp_path / "whole" / f"{version}.ckpt")
        again, resumed = train(policy_folder, tmp_path / f"from-{version}", checkpoint)
        assert list(again.batches) == list(range(version, UPDATES))
        for number, batch in again.batches.items():
            assert describe(batch) == describe(trained.batches[number])
        for one, other in zip(module.policy.parameters(), resumed.policy.parameters(), strict=True):
            assert torch.equal(one, other)
