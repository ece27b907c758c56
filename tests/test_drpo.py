"""DRPO: against the gradient of its objective in float64, by its properties, and where it is the estimator's rule."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import MAX_TOKENS, Unshaped, full_logprobs, learning_batch, make_rollout
from test_learner import make_learner

from lit_grpo.methods.drpo import DecoupledLength
from lit_grpo.plugins import Plugin
from lit_grpo.types import Completion, PassRule, Rollout, RolloutGroup
from lit_grpo.update.advantages import Advantages
from lit_grpo.update.objective.objective import Objective

INF = math.inf


def member(sample: int, num_tokens: int, reward: float, logprob: float | None = None, prompt: str = "a") -> Rollout:
    """A rollout of so many random tokens, with the policy's own log-probs, or with ``logprob`` for each token."""
    generator = torch.Generator().manual_seed(sample)
    tokens = torch.randint(2, 30, (num_tokens,), generator=generator).tolist()
    rollout = make_rollout((3, 4, 5), tokens, reward, None, prompt, sample)
    exact_T = full_logprobs(random_policy(), rollout) if logprob is None else torch.full((num_tokens,), logprob)
    completion = Completion(rollout.completion.request, tokens, exact_T.float(), [0] * num_tokens, "stop")
    return Rollout(rollout.prompt, completion, {"exact": reward}, reward)


def group(*members: Rollout) -> RolloutGroup:
    return RolloutGroup(members[0].prompt, list(members))


def shape(rule: Plugin, members: RolloutGroup, advantages: Sequence[float]) -> list[float]:
    """What a rule makes of one group with these advantages."""
    for rollout, advantage in zip(members.rollouts, advantages, strict=True):
        rollout.advantage = advantage
    rule.on_batch(replace(learning_batch([members]), pass_rule=PassRule("exact")).of(rule))
    return [rollout.advantage for rollout in members.rollouts]


def objective(groups: Sequence[RolloutGroup], length_temperature: float, temperature: float) -> torch.Tensor:
    """The mean over groups of J, of which groups of one kind have none, with a graph through the policy."""
    policy: Any = OBJECTIVE_POLICY
    total = torch.zeros((), dtype=torch.float64)
    for members in groups:
        scores, right = [], []
        for rollout in members.rollouts:
            prompt, tokens_T = rollout.prompt.token_ids, rollout.completion.token_ids_T
            input_ids = torch.cat([torch.tensor(prompt), tokens_T])[None]
            logits_TV = policy(input_ids=input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            scores.append(logits_TV.log_softmax(-1)[range(len(tokens_T)), tokens_T].mean())
            right.append(rollout.reward == 1)
        lengths = [rollout.completion.num_tokens for rollout in members.rollouts]
        if all(right) or not any(right):
            continue
        weights = [
            math.exp((1 - length / MAX_TOKENS) / length_temperature) if good else 0.0
            for length, good in zip(lengths, right, strict=True)
        ]
        wrong = torch.stack([score for score, good in zip(scores, right, strict=True) if not good])
        negative = temperature * (wrong / temperature).exp().mean().log()
        for weight, score in zip(weights, scores, strict=True):
            total = total + weight / sum(weights) * (score - negative)
    return total / len(groups)


OBJECTIVE_POLICY = random_policy().double()


@pytest.mark.parametrize(("length_temperature", "temperature"), [(0.1, 10.0), (0.02, 0.3), (5.0, 1e6)])
def test_the_first_step_has_the_gradient_of_the_papers_objective(length_temperature: float, temperature: float) -> None:
    lengths = [[3, 7, 2, 9], [5, 5, 1, 8], [4, 6, 2, 3], [2, 3, 4, 5]]
    rewards = [[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0] * 4, [1.0] * 4]
    groups = [
        group(*(member(4 * n + m, lengths[n][m], rewards[n][m], prompt=str(n)) for m in range(4))) for n in range(4)
    ]
    loss = -objective(groups, length_temperature, temperature)
    expected = torch.cat(
        [gradient.flatten() for gradient in torch.autograd.grad(loss, list(OBJECTIVE_POLICY.parameters()))]
    )
    rule = DecoupledLength(length_temperature, temperature)
    learner, steps = make_learner(objective=Objective("grpo"), plugins=[rule])
    learner.learn(groups)
    assert float((steps.gradients[0] - expected).norm() / expected.norm()) < 1e-5


def random_group(seed: int) -> RolloutGroup:
    """Six members, two to four of them right, of random lengths."""
    rng = random.Random(seed)
    num_right = rng.randint(2, 4)
    members = [member(n, rng.randint(1, MAX_TOKENS), float(n < num_right), -rng.random(), str(seed)) for n in range(6)]
    rng.shuffle(members)
    return group(*members)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_without_length_it_is_the_estimators_rule(scale: Any) -> None:
    """Bit for bit, for rewards of 0 and 1."""
    gradients = []
    for rule in (DecoupledLength(length_temperature=INF, totals="estimator"), Unshaped()):
        groups = [random_group(seed) for seed in range(4)]
        learner, steps = make_learner(advantages=Advantages(scale=scale), plugins=[rule])
        learner.learn(groups)
        gradients.append(steps.gradients[0])
    assert torch.equal(*gradients) and gradients[0].norm() > 0


def test_a_group_of_one_kind_is_not_trained_on() -> None:
    for reward in (0.0, 1.0):
        members = group(member(0, 3, reward), member(1, 9, reward))
        assert shape(DecoupledLength(), members, [0.3, -0.3]) == [0.0, 0.0]
        assert shape(DecoupledLength(totals="estimator"), members, [0.0, 0.0]) == [0.0, 0.0]
