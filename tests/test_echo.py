"""ECHO: a small weight on what tools answered."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hand_made import learning_batch, make_rollout
from test_learner import make_learner, ragged_groups

from lit_grpo.compatibility import ONE_TURN, check_together
from lit_grpo.methods.echo import Echo
from lit_grpo.plugins import requirement_of
from lit_grpo.types import OBSERVED, Completion, Rollout, RolloutGroup

pytestmark = pytest.mark.usefixtures("exact_norms")


def weights_of(rollout: Rollout) -> torch.Tensor | None:
    plugin = Echo(weight=0.25)
    plugin.on_batch(learning_batch([RolloutGroup(rollout.prompt, [rollout])]).of(plugin))
    return rollout.columns.get("ce_weight")


def conversation(contexts: list[list[int]] | None = None) -> Rollout:
    """A turn of two tokens, an answer of three, a turn of one."""
    rollout, o = make_rollout((3, 4), [5, 6, 7, 8, 9, 10]), OBSERVED
    was = rollout.completion
    completion = Completion(
        was.request, was.token_ids_T, was.logprobs_T, [0, 0, o, o, o, 0], "stop", contexts=contexts or []
    )
    return Rollout(rollout.prompt, completion)


def test_tokens_that_were_observed_have_the_weight_and_sampled_ones_none() -> None:
    weights_T = weights_of(conversation())
    assert weights_T is not None and weights_T.tolist() == [0, 0, 0.25, 0.25, 0.25, 0]


def test_rollouts_that_observed_nothing_are_not_kept_or_were_rendered_again_have_no_weights() -> None:
    left_out = conversation()
    left_out.kept = False
    for rollout in (make_rollout((3,), [5, 6]), left_out, conversation([[], [7, 8]])):
        assert weights_of(rollout) is None


def test_the_gradient_is_that_of_the_mean_log_prob_of_observed_tokens() -> None:
    groups = ragged_groups()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.reward, rollout.rewards = math.nan, {"exact": None}
    learner, steps = make_learner(plugins=[Echo(weight=0.25)])
    logs = learner.learn(groups)
    policy: Any = make_learner()[0].policy
    total, number = torch.zeros(()), 0
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        if rollout.kept:
            prompt, ids_T = rollout.prompt.token_ids, rollout.completion.token_ids_T
            logits_TV = policy(input_ids=torch.cat([torch.tensor(prompt), ids_T])[None]).logits[0, len(prompt) - 1 : -1]
            observed_T = rollout.completion.versions_T == OBSERVED
            total = total - logits_TV.log_softmax(-1).gather(-1, ids_T[:, None]).squeeze(-1)[observed_T].sum()
            number += int(observed_T.sum())
    (0.25 * total / number).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    assert float((steps.gradients[0] - expected).norm() / expected.norm()) < 1e-10
    assert (logs["ce/tokens"], logs["ce/loss"]) == (number, pytest.approx(0.25 * total.item() / number, rel=1e-9))


def test_a_run_of_one_turn_has_nothing_to_echo() -> None:
    with pytest.raises(ValueError, match="echo needs completions of several turns"):
        check_together([requirement_of(Echo(), "rollout.plugins echo"), ONE_TURN])
