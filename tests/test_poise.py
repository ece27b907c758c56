"""POISE: unbiased against the exact gradient of a small policy, what it predicts, and where it is the estimator's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import table_rows
from hand_made import Unshaped, alone, learning_batch
from test_learner import make_learner, ragged_groups

from lit_grpo.methods import make_plugins
from lit_grpo.methods.poise import VALUE, CrossRolloutBaseline
from lit_grpo.plugins import GroupBatch, RunFacts, fresh
from lit_grpo.rollout.generator import Observation, StepEvents
from lit_grpo.types import Completion, Key, PassRule, Prompt, Request, Rollout, RolloutGroup, SamplingParams

AT = 4
RULE = PassRule()
LOGITS = np.array([[1.0, 0.5, 0.0, -1.0], [-1.0, 0.0, 0.5, 1.0]])  # of four answers to two prompts
REWARDS = np.array([0.0, 0.0, 1.0, 1.0])  # of the answers
CHANCES = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)


def group(name: str, rewards: Sequence[float]) -> RolloutGroup:
    """A group of rollouts of one token."""
    prompt = Prompt(name, (1,), "")
    requests = [Request(prompt, (path,), SamplingParams(max_tokens=9)) for path in range(len(rewards))]
    return RolloutGroup(
        prompt,
        [
            Rollout(prompt, Completion(request, [1], [-0.5], [0], "stop"), {"right": reward}, reward)
            for request, reward in zip(requests, rewards, strict=True)
        ],
    )


def features(answers: np.ndarray) -> np.ndarray:
    """What the policy shows of its answers, shape (n, 6): which one it is, and two scalars."""
    return np.column_stack([np.eye(4)[answers], np.zeros((len(answers), 2))]).astype(np.float32)


def show(worker: CrossRolloutBaseline, groups: Sequence[RolloutGroup], shown: np.ndarray) -> None:
    """Let a worker hear of a rollout in which each completion showed a row of ``shown``; NaN of one that ended."""
    keys: list[Key] = [each.completion.request.key for members in groups for each in members.rollouts]
    worker.on_rollout_start(None)  # pyrefly: ignore[bad-argument-type]
    here = [not math.isnan(row.sum()) for row in shown]
    chosen = [key for key, is_here in zip(keys, here, strict=True) if is_here]
    elsewhere = Observation(chosen, AT + 1, np.zeros_like(shown[here]))
    worker.on_step(StepEvents(observations=[elsewhere, Observation(chosen, AT, shown[here])]))


def draw(rng: np.random.Generator, prompts: np.ndarray, members: int = 2) -> tuple[list[RolloutGroup], np.ndarray]:
    """Groups of answers to the numbers of prompts, and the answers, shape (groups, members)."""
    answers = np.array([rng.choice(4, members, p=CHANCES[prompt]) for prompt in prompts])
    return [group(str(n), REWARDS[its].tolist()) for n, its in enumerate(answers)], answers


def trained_on(seed: int, batches: int = 20) -> CrossRolloutBaseline:
    """A worker that has trained on batches of both prompts."""
    rng, worker = np.random.default_rng(seed), fresh(CrossRolloutBaseline(AT))
    for _ in range(batches):
        groups, answers = draw(rng, rng.integers(0, 2, 64))
        show(worker, groups, features(answers.reshape(-1)))
        worker.on_update_end(GroupBatch(groups, 0, RULE, alone))
    return worker


def shape(groups: Sequence[RolloutGroup]) -> np.ndarray:
    """What the rule makes of groups of one size."""
    shaped(groups, [0.0] * len(groups[0].rollouts))
    return np.array([[rollout.advantage for rollout in each.rollouts] for each in groups])


def shaped(groups: Sequence[RolloutGroup], advantages: Sequence[float]) -> None:
    """Let the rule shape these advantages of each group."""
    for each in groups:
        for rollout, advantage in zip(each.rollouts, advantages, strict=True):
            rollout.advantage = advantage
    rule = CrossRolloutBaseline(AT)
    rule.on_batch(learning_batch(groups).of(rule))


@pytest.mark.parametrize("prompt", table_rows([0, 1], [0]))
def test_the_gradient_is_unbiased_and_with_a_baseline_from_the_rollout_itself_it_is_not(prompt: int) -> None:
    """10,000 groups of two, by the score function; a mean counts as off at 4 of its standard errors."""
    chances = CHANCES[prompt]
    scores = np.eye(4) - chances  # of answers: the gradient of each one's log-probability
    exact = (chances * REWARDS) @ scores
    worker = trained_on(seed=0)
    groups, answers = draw(np.random.default_rng(1), np.full(10_000, prompt))
    show(worker, groups, features(answers.reshape(-1)))
    worker.add_members(GroupBatch(groups, 1, RULE, alone))
    own = np.array([[each.extra[VALUE] for each in members.rollouts] for members in groups])
    assert own.std() > 0.05  # what is predicted depends on the answer

    def gradients(advantages: np.ndarray) -> np.ndarray:
        return (advantages[..., None] * scores[answers]).mean(1)

    def errors(draws: np.ndarray) -> np.ndarray:
        return np.abs(draws.mean(0) - exact) / (draws.std(0, ddof=1) / math.sqrt(len(draws)))

    rewards = REWARDS[answers]
    across, by_itself, without, leave_one_out = (
        gradients(advantages) for advantages in (shape(groups), rewards - own, rewards, rewards - rewards[:, ::-1])
    )
    assert errors(across).max() < 4 and errors(without).max() < 4
    assert errors(by_itself).max() > 8
    assert across.var(0).sum() < 0.65 * without.var(0).sum()
    assert across.var(0).sum() < 0.5 * leave_one_out.var(0).sum()  # the other one's reward is noise of its own


def test_it_predicts_what_another_rollout_earns_and_not_the_luck_of_the_one_that_is_seen() -> None:
    """Features that tell the answer, of one prompt: the answer says nothing of what others earn."""
    rng, worker, groups = np.random.default_rng(0), fresh(CrossRolloutBaseline(AT)), list[RolloutGroup]()
    for _ in range(30):
        groups, answers = draw(rng, np.zeros(64, dtype=np.int64), members=4)
        show(worker, groups, features(answers.reshape(-1)))
        worker.add_members(GroupBatch(groups, 0, RULE, alone))
        worker.on_update_end(GroupBatch(groups, 0, RULE, alone))
    predicted = np.array([each.extra[VALUE] for members in groups for each in members.rollouts])
    expected = float(CHANCES[0] @ REWARDS)
    assert np.abs(predicted - expected).max() < 0.05


def test_a_group_in_which_all_earn_the_same_is_trained_on() -> None:
    groups = ragged_groups()
    for members in groups:
        for rollout in members.rollouts:
            rollout.reward, rollout.extra[VALUE] = 1.0, 0.25
    learner, steps = make_learner(plugins=[CrossRolloutBaseline(AT)])
    learner.learn(groups)
    assert steps.gradients[0].norm() > 0
    assert {rollout.advantage for members in groups for rollout in members.rollouts} == {0.75}


def test_before_it_has_learned_it_is_the_estimators_rule() -> None:
    """Bit for bit; and a rollout without another one has what the estimator gives it."""
    gradients = []
    for rule in (CrossRolloutBaseline(AT), Unshaped()):
        groups = ragged_groups()
        fresh(CrossRolloutBaseline(AT)).add_members(GroupBatch(groups, 0, RULE, alone))
        learner, steps = make_learner(plugins=[rule])
        learner.learn(groups)
        gradients.append(steps.gradients[0])
    assert torch.equal(*gradients) and gradients[0].norm() > 0
    single = group("a", [1.0])
    single.rollouts[0].extra[VALUE] = 0.5
    shaped([single], [0.125])
    assert single.rollouts[0].advantage == 0.125


def test_rollouts_that_ended_before_are_predicted_by_what_such_ones_had_beside_them() -> None:
    worker = fresh(CrossRolloutBaseline(AT))
    groups = [group("a", [1.0, 0.0, 1.0, 1.0]), group("b", [0.0, 0.0, 0.0, 1.0])]
    shown = features(np.array([0, 1, 2, 3, 0, 1, 2, 3]))
    shown[0] = shown[4] = np.nan  # beside them, others earned 2/3 and 1/3
    show(worker, groups, shown)
    worker.on_update_end(GroupBatch(groups, 0, RULE, alone))
    show(worker, groups, np.full_like(shown, np.nan))
    worker.add_members(GroupBatch(groups, 0, RULE, alone))
    assert [each.extra[VALUE] for each in groups[0].rollouts] == pytest.approx([0.5] * 4)


def test_two_ranks_learn_what_one_would_have_learned() -> None:
    rng = np.random.default_rng(0)
    groups, answers = draw(rng, rng.integers(0, 2, 16))
    one, ranks = fresh(CrossRolloutBaseline(AT)), [fresh(CrossRolloutBaseline(AT)), fresh(CrossRolloutBaseline(AT))]
    show(one, groups, features(answers.reshape(-1)))
    expected = one.on_update_end(GroupBatch(groups, 0, RULE, alone))
    parts: list[Any] = []
    for worker, own in zip(ranks, (groups[:8], groups[8:]), strict=True):
        mine = answers[:8] if own[0] is groups[0] else answers[8:]
        show(worker, own, features(mine.reshape(-1)))
        worker.on_update_end(GroupBatch(own, 0, RULE, lambda value: parts.append(value) or []))
    for worker in ranks:
        show(worker, [], np.empty((0, 6)))
        figures = worker.on_update_end(GroupBatch([], 0, RULE, lambda value: parts))
        assert figures == pytest.approx(expected, nan_ok=True)
        assert worker.state_dict()["ridge"] == one.state_dict()["ridge"]


@pytest.mark.parametrize(
    ("generations", "at", "sentence"),
    [
        (1, 4, "it needs another rollout of each prompt, and num_generations is 1; set 2 or more"),
        (2, 16, "at is 16, and sampling.max_tokens is 16: no completion goes on after it; give at most 15"),
    ],
)
def test_a_run_that_it_does_not_fit_is_refused(generations: int, at: int, sentence: str) -> None:
    plugin = make_plugins([f"poise:at={at}"])["poise"]
    with pytest.raises(ValueError, match=sentence):
        plugin.check(RunFacts(4, generations, 16, 1))
