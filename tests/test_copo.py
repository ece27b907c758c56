"""COPO: its formula in float64, what it makes of groups that agree, and where it is the estimator's rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hand_made import Unshaped, learning_batch
from test_learner import make_learner, ragged_groups

from lit_grpo.methods.copo import Blended
from lit_grpo.plugins import GroupBatch, Plugin, RunFacts, fresh
from lit_grpo.types import Completion, PassRule, Prompt, Request, Rollout, RolloutGroup, SamplingParams, alone
from lit_grpo.update.advantages.functions import group_advantages

INF = math.inf


def group(name: str, texts: Sequence[str], rewards: Sequence[float]) -> RolloutGroup:
    prompt = Prompt(name, (1,), "")
    requests = [Request(prompt, (path,), SamplingParams()) for path in range(len(texts))]
    members = [
        Rollout(prompt, Completion(request, [1], [0.0], [0], "stop", text), {"right": reward}, reward)
        for request, text, reward in zip(requests, texts, rewards, strict=True)
    ]
    return RolloutGroup(prompt, members)


def shape(rule: Plugin, groups: Sequence[RolloutGroup], others: Sequence[float] = ()) -> list[list[float]]:
    """What a rule makes of groups with advantages as plain GRPO's; another rank's groups have these mean rewards."""
    for members in groups:
        rewards_R = torch.tensor([each.reward for each in members.rollouts], dtype=torch.float64)
        advantages_R = group_advantages(rewards_R, torch.zeros(len(rewards_R)).long())
        for rollout, advantage in zip(members.rollouts, advantages_R.tolist(), strict=True):
            rollout.advantage = advantage
    batch = replace(learning_batch(groups), all_gather=lambda value: [value, list(others)])
    rule.on_batch(batch.of(rule))
    return [[rollout.advantage for rollout in members.rollouts] for members in groups]


def test_groups_that_agree_grow_where_they_are_right_and_shrink_where_they_are_wrong() -> None:
    right, wrong = group("a", ["1"] * 8, [1.0] * 8), group("b", ["2"] * 8, [0.0] * 8)
    mixed = group("c", list("abcdefgh"), [1.0, 0.0] * 4)  # of 3 bits, above rho
    first, second, third = shape(Blended(), [right, wrong, mixed])
    assert first == pytest.approx([0.5 / (0.5 + 1e-4)] * 8) and second == pytest.approx([-value for value in first])
    assert third == pytest.approx(shape(Unshaped(), [mixed])[0], rel=1e-4)
    assert shape(Unshaped(), [right, wrong]) == [[0.0] * 8] * 2  # plain GRPO learns nothing from them


def test_one_group_alone_or_without_rewards_has_nothing_to_be_compared_with() -> None:
    assert shape(Blended(), [group("a", ["1"] * 4, [1.0] * 4)]) == [[0.0] * 4]
    nothing = group("b", ["1"] * 2, [math.nan] * 2)
    first, second, third = shape(
        Blended(), [group("a", ["1"] * 2, [1.0] * 2), nothing, RolloutGroup(nothing.prompt, [])]
    )
    assert first == [0.0, 0.0] and all(map(math.isnan, second)) and third == []
    assert shape(Blended(), [RolloutGroup(nothing.prompt, [])]) == [[]]


def test_without_a_global_part_it_is_the_estimators_rule() -> None:
    """Bit for bit."""
    gradients = []
    for rule in (Blended(rho=-INF), Unshaped()):
        learner, steps = make_learner(plugins=[rule])
        learner.learn(ragged_groups())
        gradients.append(steps.gradients[0])
    assert torch.equal(*gradients) and gradients[0].norm() > 0


def test_flat_groups_are_trained_on() -> None:
    groups = ragged_groups()
    for number, members in enumerate(groups):
        for rollout in members.rollouts:
            rollout.reward = float(number == 0)
    learner, steps = make_learner(plugins=[Blended()])
    logs = learner.learn(groups)
    assert steps.gradients[0].norm() > 0 and logs["advantages/max_abs"] == pytest.approx(0.5 / math.sqrt(0.5), rel=1e-3)


def test_how_much_is_local_is_logged() -> None:
    worker: Any = fresh(Blended(rho=1.0))
    assert math.isnan(worker.metrics(alone)["copo/local"])
    groups = [group("a", ["1", "2"], [0.0] * 2), group("b", ["1"] * 2, [0.0] * 2)]
    worker.add_members(GroupBatch(groups, 0, PassRule(), list))
    assert worker.metrics(alone)["copo/local"] == pytest.approx(0.25, abs=1e-5)


def test_a_middle_that_no_group_can_reach_is_refused() -> None:
    """Above it all weights of groups' own advantages are next to 0: 5e-5 for 2 different answers at the default."""
    assert Blended().local(group("a", ["1", "2"], [1.0, 0.0])) < 1e-4
    facts = RunFacts(num_prompts=4, num_generations=2, max_tokens=9, updates_per_batch=1)
    with pytest.raises(
        ValueError, match=r"^rho is 1\.5 bits, .*num_generations 2 completions .* at most 1 bits.* such as 0\.5, or"
    ):
        Blended().check(facts)
    for rho in (1.0, 0.5, INF, -INF):
        Blended(rho=rho).check(facts)
