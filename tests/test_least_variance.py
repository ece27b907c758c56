"""The baseline of least variance: its formula, what it minimises, and its approximation of a gradient's norm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import make_micro_batch, random_groups
from test_learner import make_learner, ragged_groups

from lit_grpo.types import Rollout
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


def test_no_other_baseline_has_less_variance() -> None:
    """Of ``w (r - b) g`` over a finite set of completions, whose gradients have mean 0 under the policy."""
    random = torch.Generator().manual_seed(0)
    policy_A, sampler_A = (torch.rand(6, generator=random).double().softmax(0) for _ in range(2))
    rewards_A = torch.randn(6, generator=random).double()
    scores_AD = torch.eye(6).double() - policy_A  # d log pi / d logits
    ratio_A = policy_A / sampler_A

    def variance(baseline: float) -> float:
        estimates_AD = (ratio_A * (rewards_A - baseline))[:, None] * scores_AD
        mean_D = (sampler_A[:, None] * estimates_AD).sum(0)
        return float((sampler_A * (estimates_AD - mean_D).square().sum(1)).sum())

    # As many completions of each kind as the sampler has of them, to a millionth.
    counts_A = (sampler_A * 1e6).round().long()
    logs_A = 2 * ratio_A.log() + scores_AD.square().sum(1).log()
    kinds_R = torch.arange(6).repeat_interleave(counts_A)
    advantages_R = least_variance_advantages(rewards_A[kinds_R], torch.zeros_like(kinds_R), logs_A[kinds_R], "none")
    best = float((rewards_A[kinds_R] - advantages_R)[0])
    assert all(variance(best) < variance(best + step) for step in (-0.1, -0.01, 0.01, 0.1))
    assert abs(best - float((sampler_A * rewards_A).sum())) > 0.02  # and it is not the mean


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


def exact_square(policy: Any, rollout: Rollout) -> float:
    """Of the gradient of a completion's log-prob with respect to all weights."""
    policy.zero_grad()
    prompt, tokens_T = rollout.prompt.token_ids, rollout.completion.token_ids_T
    logits_TV = policy(input_ids=torch.cat([torch.tensor(prompt), tokens_T])[None], use_cache=False).logits
    logprobs_TV = logits_TV[0, len(prompt) - 1 : -1].log_softmax(-1)
    logprobs_TV.gather(-1, tokens_T[:, None]).sum().backward()
    return sum(float(parameter.grad.square().sum()) for parameter in policy.parameters())


def test_the_approximation_beside_exact_gradients_of_every_weight() -> None:
    """Squared norms differ by e^1.1 among completions; the approximation leaves less than half of that."""
    policy: Any = random_policy().double()
    exact, approximate = [], []
    for seed in range(2):
        for group in random_groups(random_policy(), [[0.0] * 16], seed=seed):
            micro_batch = make_micro_batch(group.rollouts, [0.0] * 16)
            scores_N = logprobs_and_scores(policy, micro_batch, 1.0)[:, 1]
            sums = {
                row: float(part.sum())
                for row, part in zip(micro_batch.rows, scores_N.split(micro_batch.lengths_C.tolist()), strict=True)
            }
            approximate += [sums[row] for row in range(16)]
            exact += [exact_square(policy, rollout) for rollout in group.rollouts]
    pair = torch.tensor([exact, approximate], dtype=torch.float64)
    assert float(torch.corrcoef(pair.log())[0, 1]) > 0.8
    assert float((pair[0] / pair[1]).log().std()) < 0.6 * float(pair[0].log().std())


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
