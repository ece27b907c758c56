"""The baseline of least variance: its formula, what it minimizes, and its approximation of a gradient's norm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import make_micro_batch, random_groups
from test_learner import make_learner, ragged_groups

from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.advantages.functions import least_variance_advantages
from lit_grpo.update.logprobs.measurements import logprobs_and_scores

NAN = math.nan


def test_advantages_are_rewards_less_the_weighted_mean_of_their_group() -> None:
    rewards, weights = [1.0, 0.0, 0.5, NAN, 2.0, 0.0, 0.7, 0.7], [0.1, 3.0, 2.0, 9.0, 1.0, 1.0, 0.3, 4.0]
    groups = [0, 0, 0, 0, 1, 1, 2, 2]
    expected = []
    for reward, group in zip(rewards, groups, strict=True):
        of = [(r, w) for r, w, g in zip(rewards, weights, groups, strict=True) if g == group and r == r]
        expected.append(reward - sum(r * w for r, w in of) / sum(w for _, w in of))
    for shift in (0.0, 3000.0, -3000.0):  # weights whose exponentials do not exist
        logs_R = torch.tensor(weights, dtype=torch.float64).log() + shift
        actual_R = least_variance_advantages(torch.tensor(rewards), torch.tensor(groups), logs_R, "none")
        assert actual_R.tolist() == pytest.approx(expected, rel=1e-5, nan_ok=True)
        assert actual_R[6:].tolist() == [0.0, 0.0]  # equal rewards teach nothing, whatever they weigh


@pytest.mark.parametrize("shares_prefix", [True, False])
def test_scores_are_the_gradients_of_the_last_hidden_states(shares_prefix: bool) -> None:
    policy: Any = random_policy().double().train()
    rollouts = [rollout for group in random_groups(random_policy(), [[0.0] * 3] * 2) for rollout in group.rollouts]
    micro_batch = make_micro_batch(rollouts, [0.0] * 6, shares_prefix)
    logprobs_N, squares_N = logprobs_and_scores(policy, micro_batch, 0.7).unbind(1)
    assert all(parameter.grad is None for parameter in policy.parameters())
    head_VD = policy.get_output_embeddings().weight.detach()
    order = [rollouts[row] for row in micro_batch.rows]
    for rollout, own_T, scores_T in zip(
        order,
        logprobs_N.split(micro_batch.lengths_C.tolist()),
        squares_N.split(micro_batch.lengths_C.tolist()),
        strict=True,
    ):
        prompt, tokens_T = rollout.prompt.token_ids, rollout.completion.token_ids_T
        with torch.no_grad():
            logits_TV = policy(input_ids=torch.cat([torch.tensor(prompt), tokens_T])[None], use_cache=False).logits
        logprobs_TV = (logits_TV[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        for t, token in enumerate(tokens_T.tolist()):
            slope_D = head_VD[token] - logprobs_TV[t].exp() @ head_VD
            assert float(own_T[t]) == pytest.approx(float(logprobs_TV[t, token]), rel=1e-9)
            assert float(scores_T[t]) == pytest.approx(float((slope_D / 0.7).square().sum()), rel=1e-6)


def test_a_learner_weighs_members_by_its_policy_before_the_first_step() -> None:
    groups = ragged_groups()
    learner, _ = make_learner(advantages=Advantages("least_variance", "none"), num_minibatches=2)
    micro = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts if rollout.completion.num_trained):
        micro[id(rollout)] = logprobs_and_scores(learner.policy, make_micro_batch([rollout], [0.0]), 1.0)
    learner.learn(groups)
    for group in groups[:2]:
        total = value = 0.0
        for rollout in group.rollouts:
            if rollout.completion.num_trained:
                logprobs_T, squares_T = micro[id(rollout)].unbind(1)
                sampled_T = rollout.completion.logprobs_T[rollout.completion.trained_T]
                weight = math.exp(2 * float((logprobs_T - sampled_T).sum())) * float(squares_T.sum())
                total, value = total + weight, value + weight * rollout.reward
        for rollout in group.rollouts:
            assert rollout.advantage == pytest.approx(rollout.reward - value / total, abs=1e-5)
