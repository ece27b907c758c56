"""Advantages that a plug-in gives to rollouts, against one token after another in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_learner import HIGH, LOW, make_learner, ragged_groups, reference_gradient

from lit_grpo.plugins import GroupBatch, Plugin
from lit_grpo.types import PassRule, Rollout
from lit_grpo.update.objective.objective import Objective


@dataclass
class ByLength(Plugin):
    """Less for each token that was sampled, and more where something passed."""

    cost: float = 0.25

    def shape_advantages(self, batch: GroupBatch, advantages: Sequence[Sequence[float]]) -> list[list[float]]:
        return [
            [self.of(each, value, batch.pass_rule) for each, value in zip(group.rollouts, values, strict=True)]
            for group, values in zip(batch.groups, advantages, strict=True)
        ]

    def of(self, rollout: Rollout, advantage: float, pass_rule: PassRule) -> float:
        return advantage - self.cost * rollout.completion.num_sampled + float(pass_rule.passes(rollout.rewards))


@pytest.mark.parametrize("name", ["dapo", "grpo"])
def test_each_rollout_is_learnt_from_with_what_it_is_given(name: str) -> None:
    shaping, groups = ByLength(), ragged_groups()
    expected = reference_gradient(
        groups, name, lambda rollout, advantage, token: shaping.of(rollout, advantage, PassRule("exact"))
    )
    learner, steps = make_learner(objective=Objective(name, epsilon=LOW, epsilon_high=HIGH), plugins=[shaping])
    learner.learn(groups)
    assert float((steps.gradients[0] - expected).norm() / expected.norm()) < 1e-6
    for group in groups:
        for rollout in group.rollouts:  # samples show it
            assert rollout.advantage != 0


def test_a_flat_group_is_learnt_from_where_a_rule_says_so() -> None:
    groups = ragged_groups()
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = 0.5
    learner, steps = make_learner(plugins=[ByLength()])
    logs = learner.learn(groups)
    assert steps.gradients[0].norm() > 0 and logs["advantages/max_abs"] > 0.5


def test_a_selection_chooses_by_what_rollouts_are_given() -> None:
    seen: list[torch.Tensor] = []

    @dataclass
    class Noting(Plugin):
        needs = frozenset({"all_ranks"})

        def choose_from_batch(self, batch: Any, advantages_R: torch.Tensor, num_groups: int) -> torch.Tensor:
            seen.append(advantages_R)
            return ~advantages_R.isnan()

    groups = ragged_groups()
    make_learner(plugins=[ByLength(), Noting()])[0].learn(groups)
    given = [rollout.advantage for group in groups for rollout in group.rollouts]
    assert seen[0].tolist() == pytest.approx(given)
