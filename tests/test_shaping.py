"""Advantages that a plug-in gives to rollouts, against one token after another in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from test_learner import HIGH, LOW, make_learner, ragged_groups, reference_gradient

from lit_grpo.plugins import Plugin
from lit_grpo.types import PassRule, Rollout
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.plugin import Batch


@dataclass
class ByLength(Plugin):
    """Less for each token that was sampled, and more where something passed."""

    writes: ClassVar[frozenset[str]] = frozenset({"advantage"})
    cost: float = 0.25

    def on_batch(self, batch: Batch) -> None:
        for rollout in batch.rollouts:
            batch.set("advantage", rollout, self.of(rollout, rollout.advantage, batch.pass_rule))

    def of(self, rollout: Rollout, advantage: float, pass_rule: PassRule) -> float:
        return advantage - self.cost * rollout.completion.num_sampled + float(pass_rule.passes(rollout.rewards))


@pytest.mark.parametrize("name", ["dapo", "grpo"])
def test_each_rollout_is_trained_on_with_what_it_is_given(name: str) -> None:
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


def test_a_flat_group_is_trained_on_where_a_rule_says_so() -> None:
    groups = ragged_groups()
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = 0.5
    learner, steps = make_learner(plugins=[ByLength()])
    logs = learner.learn(groups)
    assert steps.gradients[0].norm() > 0 and logs["advantages/max_abs"] > 0.5


def test_a_selection_chooses_by_what_rollouts_are_given() -> None:
    seen: list[float] = []

    @dataclass
    class Noting(Plugin):
        writes = frozenset({"trained"})
        needs = frozenset({"all_ranks"})

        def on_batch(self, batch: Batch) -> None:
            seen.extend(rollout.advantage for rollout in batch.rollouts)

    groups = ragged_groups()
    make_learner(plugins=[Noting(), ByLength()])[0].learn(groups)
    given = [rollout.advantage for group in groups for rollout in group.rollouts]
    assert seen == pytest.approx(given) and len(seen) == 8
