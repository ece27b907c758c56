"""Turns that are trained on with advantages of their own, against one token after another in float64."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hand_made import learning_batch
from test_learner import HIGH, LOW, make_learner, ragged_groups, reference_gradient

from lit_grpo.plugins import Plugin
from lit_grpo.types import OBSERVED, Rollout, RolloutGroup
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.plugin import Batch


@dataclass
class Alternating(Plugin):
    """The first turn has twice its rollout's advantage, the second ``other``, and so on."""

    writes: ClassVar[frozenset[str]] = frozenset({"turn_advantage"})
    other: float = -0.5

    def on_batch(self, batch: Batch) -> None:
        for rollout in batch.rollouts:
            turns = range(len(rollout.completion.turns))
            batch.set("turn_advantage", rollout, [self.other if turn % 2 else 2 * rollout.advantage for turn in turns])

    def of_token(self, rollout: Rollout, advantage: float, token: int) -> float:
        """Count the turns before a token, one token after another."""
        versions, turn = [OBSERVED, *rollout.completion.versions_T.tolist()], -1
        for place in range(token + 1):
            turn += versions[place] == OBSERVED and versions[place + 1] != OBSERVED
        return self.other if turn % 2 else 2 * advantage


def several_turns() -> list[RolloutGroup]:
    """The groups that have members of one turn, two turns, and of none."""
    groups = ragged_groups()
    turns = {len(rollout.completion.turns) for group in groups for rollout in group.rollouts}
    assert turns == {0, 1, 2}
    return groups


@pytest.mark.parametrize("shares_prefix", [True, False])
@pytest.mark.parametrize("name", ["dapo", "grpo"])
def test_each_turn_is_trained_on_with_its_own(name: str, shares_prefix: bool) -> None:
    groups, credit = several_turns(), Alternating()
    expected = reference_gradient(groups, name, credit.of_token)
    for max_tokens in (20, 10_000):
        learner, steps = make_learner(
            objective=Objective(name, epsilon=LOW, epsilon_high=HIGH),
            plugins=[credit],
            max_tokens_per_micro_batch=max_tokens,
            shares_prefix=shares_prefix,
        )
        learner.learn(groups)
        assert float((steps.gradients[0] - expected).norm() / expected.norm()) < 1e-6


class Falling(Plugin):
    """Each token has ``1 / (1 + its place)`` of its rollout's advantage."""

    writes = frozenset({"token_advantage"})

    def on_batch(self, batch: Batch) -> None:
        for rollout, advantages_N in zip(batch.rollouts, self.advantages(batch), strict=True):
            if advantages_N is not None:
                batch.set("token_advantage", rollout, advantages_N)

    def advantages(self, batch: Batch) -> list[torch.Tensor | None]:
        return [torch.tensor([each.advantage / (1 + place) for place in _places(each)]) for each in batch.rollouts]

    def of_token(self, rollout: Rollout, advantage: float, token: int) -> float:
        return advantage / (1 + token)


def _places(rollout: Rollout) -> list[int]:
    trained: list[bool] = rollout.completion.trained_T.tolist()
    return [place for place, is_trained in enumerate(trained) if is_trained]


@pytest.mark.parametrize("shares_prefix", [True, False])
def test_each_token_is_trained_on_with_its_own(shares_prefix: bool) -> None:
    groups = several_turns()
    expected = reference_gradient(groups, "dapo", Falling().of_token)
    learner, steps = make_learner(
        objective=Objective("dapo", epsilon=LOW, epsilon_high=HIGH),
        plugins=[Falling()],
        max_tokens_per_micro_batch=20,
        shares_prefix=shares_prefix,
    )
    learner.learn(groups)
    assert float((steps.gradients[0] - expected).norm() / expected.norm()) < 1e-6


def test_a_batch_is_whitened_over_its_tokens_on_all_ranks() -> None:
    """A rollout without an advantage, and one whose tokens keep that of their rollout, take no part."""

    class Whitened(Falling):
        def advantages(self, batch: Batch) -> list[torch.Tensor | None]:
            return batch.whitened([None, *super().advantages(batch)[1:]])

    here, there = several_turns(), several_turns()
    for group in (*here, *there):
        for number, rollout in enumerate(group.rollouts):
            rollout.advantage = number - 1.5 if group in here else 4.0 * number
    here[0].rollouts[1].advantage = math.nan
    without = (here[0].rollouts[0], there[0].rollouts[0], here[0].rollouts[1])
    plain = [each for group in (*here, *there) for each in group.rollouts if all(each is not one for one in without)]
    values = [each.advantage / (1 + place) for each in plain for place in _places(each)]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    seen: list[Any] = []
    Whitened().on_batch(replace(learning_batch(there), all_gather=lambda own: seen.append(own) or [own]))
    Whitened().on_batch(replace(learning_batch(here), all_gather=lambda own: [own, *seen]))
    assert len(seen) == 1
    for rollout in (each for group in here for each in group.rollouts):
        if any(rollout is one for one in without):
            assert "token_advantage" not in rollout.columns
            continue
        expected = [(rollout.advantage / (1 + place) - mean) / (deviation + 1e-4) for place in _places(rollout)]
        assert rollout.columns["token_advantage"].tolist() == pytest.approx(expected, abs=1e-6)


def test_turns_are_trained_on_where_their_rollout_has_no_advantage() -> None:
    """Rewards are all equal, so that no rollout has an advantage; the second turns have."""
    groups, credit = several_turns(), Alternating(0.75)
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = 0.5
    learner, steps = make_learner(plugins=[credit])
    learner.learn(groups)
    flat, without = make_learner()
    flat.learn(groups)
    assert steps.gradients[0].norm() > 0 and without.gradients[0].norm() == 0
