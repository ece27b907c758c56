"""Completions where a mean is uncertain, against every division; unlikely right answers, by their formula."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence

import pytest
import torch
from conftest import random_policy
from hand_made import Unshaped, random_groups
from test_learner import HIGH, LOW, make_learner, ragged_groups, reference_gradient
from test_loop import prompts
from test_rounds import PASSES, SAMPLING, Marked, mark

from lit_grpo.budgets.history import Record, Tally
from lit_grpo.methods.xrpo import Novelty, UncertainMore
from lit_grpo.rewards import RewardRunner, load_rewards
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rounds import RoundScheduler
from lit_grpo.types import PassRule, Rollout
from lit_grpo.update.objective.objective import Objective

STUDENT = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 5: 2.57058, 6: 2.44691, 7: 2.36462, 8: 2.306, 9: 2.26216}
"""The two-sided 95% points of Student's t, by degrees of freedom, from printed tables."""


def worth(counts: Sequence[int], rewards: Sequence[Sequence[float]], exploration: float) -> float:
    """By how much a division narrows the intervals, and what it explores: the sum over completions, by printed t."""
    so_far = sum(map(len, rewards))
    total = 0.0
    for count, its in zip(counts, rewards, strict=True):
        widths = [STUDENT[n - 1] * statistics.stdev(its) / math.sqrt(n) for n in range(len(its), len(its) + count + 1)]
        bonus = [math.sqrt(math.log(1 + so_far) / n) for n in range(len(its), len(its) + count)]
        total += widths[0] - widths[-1] + exploration * sum(bonus)
    return total


@pytest.mark.parametrize("seed", range(30))
def test_a_phase_is_the_best_of_all_divisions(seed: int) -> None:
    rng = random.Random(seed)
    number, base = rng.randint(1, 4), rng.randint(2, 4)
    rewards = [[float(rng.random() < rng.choice([0.0, 0.5, 1.0])) for _ in range(base)] for _ in range(number)]
    rule = UncertainMore(phases=2, base=base, exploration=rng.choice([0.0, 0.1, 1.0]))
    num_generations = base + rng.randint(1, 2)
    counts = rule.shared_round([Tally(base, its) for its in rewards], 1, num_generations)
    budget = number * (num_generations - base)
    assert sum(counts) == budget and min(counts) >= 0
    divisions = [each for each in itertools.product(range(budget + 1), repeat=number) if sum(each) == budget]
    divisions = [each for each in divisions if base + max(each) <= 10]
    best = max(worth(each, rewards, rule.exploration) for each in divisions)
    assert worth(counts, rewards, rule.exploration) == pytest.approx(best, rel=1e-5, abs=1e-9)


def test_uncertain_prompts_get_more_than_certain_ones_and_one_without_a_reward_the_first() -> None:
    mixed, solved, unknown = Tally(4, [0.0, 1.0, 0.0, 1.0]), Tally(4, [1.0] * 4), Tally(4, [])
    assert UncertainMore(phases=2, base=4, exploration=0.0).shared_round([solved, mixed], 1, 6) == [0, 4]
    more = UncertainMore(phases=2, base=4, exploration=0.1).shared_round([solved, mixed], 1, 8)
    assert more[1] > more[0] > 0
    assert UncertainMore(phases=2, base=4).shared_round([solved, unknown], 1, 5)[1] == 2


def test_phases_share_what_the_first_leaves_and_end() -> None:
    rule = UncertainMore(phases=4, base=2)
    tallies = [Tally(2, [0.0, 1.0]), Tally(2, [0.0, 0.0])]
    for num_rounds, so_far in ((1, 6), (2, 9), (3, 12)):
        counts = rule.shared_round(tallies, num_rounds, 6)
        rewards = [[*t.rewards, *[0.0] * more] for t, more in zip(tallies, counts, strict=True)]
        tallies = [Tally(len(its), its) for its in rewards]
        assert sum(tally.num_completions for tally in tallies) == so_far
    assert rule.shared_round(tallies, 4, 6) == [0, 0]
    assert UncertainMore().first_round([], 16) == []
    for num_generations, base in ((16, 5), (4, 2), (2, 2)):
        assert UncertainMore()._base(num_generations) == base


def sample(rule: UncertainMore, num_generations: int, slots: int, replaced: str = "") -> dict[str, list[float]]:
    """Sample the prompts a to d; return the rewards of each, in the order of their completions."""
    runner = RewardRunner(load_rewards([mark], 10.0))
    lengths = {name: [1 + (7 * sample) % 11 for sample in range(40)] for name in "abcd" + replaced}
    generator = Marked(slots, lengths)
    further = iter(prompts(*replaced))
    rounds = RoundScheduler(runner, rule, PassRule("mark"), further, num_generations=num_generations)
    loop = RolloutLoop(generator, listeners=[rounds])
    groups, _ = loop.collect(prompts(*"abcd"), rule.first_round([Record()], num_generations)[0], SAMPLING, seed=0)
    runner.close()
    for group in groups:
        paths = [each.completion.request.path for each in group.rollouts]
        assert paths == [(number,) for number in range(len(paths))]
    return {group.prompt.prompt_id: [each.reward for each in group.rollouts] for group in groups}


def test_a_rollout_spends_its_budget_by_phases_whatever_ends_first() -> None:
    rule = UncertainMore(phases=3, base=4, exploration=0.0)
    found = sample(rule, 8, 5)
    expected = {name: [float(each) for each in PASSES[name][:4]] for name in "abcd"}
    for num_rounds in (1, 2):
        counts = rule.shared_round([Tally(len(its), its) for its in expected.values()], num_rounds, 8)
        for (name, its), more in zip(expected.items(), counts, strict=True):
            its += [float(each) for each in PASSES[name][len(its) : len(its) + more]]
    assert found == expected and sum(map(len, found.values())) == 32
    assert len(found["a"]) == len(found["b"]) == 4 < len(found["c"])
    for slots in (1, 3, 40):
        assert sample(rule, 8, slots) == found


# ---- advantages ----------------------------------------------------------------------------------------


def of_formula(rollouts: Sequence[Rollout], advantages: Sequence[float], weight: float, most: float) -> list[float]:
    """Token by token."""
    scores = []
    for rollout in rollouts:
        logprobs = [
            float(p) for p, t in zip(rollout.completion.logprobs_T, rollout.completion.trained_T, strict=True) if t
        ]
        scores.append(sum(logprobs) / len(logprobs))
    mean = sum(scores) / len(scores)
    novel = [math.exp(score) / math.exp(mean) for score in scores]
    return [
        a if a <= 0 else a + min(max(weight * (1 - n), 0.0), most * a) for a, n in zip(advantages, novel, strict=True)
    ]


@pytest.mark.parametrize("name", ["dapo", "grpo"])
def test_the_gradient_is_that_of_the_sharpened_advantages(name: str) -> None:
    groups, rule = random_groups(random_policy(), [[1.0, 0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0]], noise=0.05), Novelty()
    turns: dict[int, float] = {}
    for group in groups:
        rewards = [rollout.reward for rollout in group.rollouts]
        scale = statistics.stdev(rewards) + 1e-4
        advantages = [(reward - statistics.fmean(rewards)) / scale for reward in rewards]
        values = of_formula(group.rollouts, advantages, 2.5, 0.5)
        turns |= {id(rollout): value for rollout, value in zip(group.rollouts, values, strict=True)}
    expected = reference_gradient(groups, name, lambda rollout, advantage, token: turns[id(rollout)])
    learner, steps = make_learner(objective=Objective(name, epsilon=LOW, epsilon_high=HIGH), plugins=[rule])
    learner.learn(groups)
    assert float((steps.gradients[0] - expected).norm() / expected.norm()) < 1e-6
    plain = reference_gradient(groups, name)
    assert float((plain - expected).norm() / expected.norm()) > 1e-3


def test_a_weight_of_zero_is_grpo_to_the_last_bit() -> None:
    gradients = []
    for rule in (Unshaped(), Novelty(weight=0.0), Novelty(most=0.0)):
        learner, steps = make_learner(plugins=[rule])
        learner.learn(ragged_groups())
        gradients.append(steps.gradients[0])
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])
