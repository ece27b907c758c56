"""How many completions each prompt gets, against brute force and the papers' tables."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hand_made import plugin

from lit_grpo.budgets.allocation import greedy, proportional
from lit_grpo.budgets.history import Record
from lit_grpo.methods.dars import HardMore
from lit_grpo.methods.divided import Proportional
from lit_grpo.methods.knapsack import Knapsack, knapsack_value
from lit_grpo.methods.reinforce_ada import Balanced
from lit_grpo.methods.sgpo import Buckets
from lit_grpo.plugins import Plugin, RunFacts
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.update.advantages.estimator import Advantages


def at(*rates: float | None) -> list[Record]:
    """Records of prompts that pass at these rates; None for a new one."""
    return [Record() if rate is None else Record(1, num_completions=8, pass_rate=rate) for rate in rates]


def plain_knapsack(
    rates: list[float], budget: int, least: int, most: int, alpha: float
) -> list[tuple[float, int, tuple[int, ...]]]:
    """Worth of mixed prompts and completions of unsolved and solved ones, in the order of what the rule prefers.

    Of every division that there is: those whose mixed prompts have what they need at most come first.
    """
    mixed = [row for row, rate in enumerate(rates) if 0 < rate < 1]
    needed = sum(
        least + min(math.floor(math.log(1 - alpha) / math.log(max(rates[row], 1 - rates[row]))), most - least)
        for row in mixed
    )
    unsolved = [row for row, rate in enumerate(rates) if rate == 0]
    found = []
    for counts in itertools.product(range(least, most + 1), repeat=len(rates)):
        if sum(counts) != min(budget, most * len(rates)):
            continue
        full = all(counts[row] == most for row in unsolved)
        if unsolved and not full and sum(counts[row] for row in mixed) > needed:
            continue
        worth = math.fsum(knapsack_value(counts[row], rates[row]) for row in mixed)
        found.append((round(worth, 12), sum(counts[row] for row in unsolved), counts))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_knapsack_is_the_best_division_of_all_that_its_rule_allows(seed: int) -> None:
    rng = random.Random(seed)
    rates = [rng.choice([0.0, 1.0, 0.5, rng.random(), rng.random()]) for _ in range(rng.randint(1, 5))]
    least, most, alpha = 2, rng.randint(4, 9), rng.choice([0.5, 0.9, 0.99])
    budget = rng.randint(least * len(rates), (most + 1) * len(rates))
    rule = Knapsack(budget=budget, least=least, most=most, alpha=alpha)
    counts = rule.first_round(at(*rates), 8)
    worth, of_unsolved, _ = max(plain_knapsack(rates, budget, least, most, alpha))
    own = math.fsum(knapsack_value(count, rate) for count, rate in zip(counts, rates, strict=True) if 0 < rate < 1)
    unsolved = [count for count, rate in zip(counts, rates, strict=True) if rate == 0]
    assert own == pytest.approx(worth, abs=1e-9) and sum(unsolved) == of_unsolved
    assert sum(counts) == min(budget, most * len(rates)) and min(counts) >= least and max(counts) <= most
    assert not unsolved or max(unsolved) - min(unsolved) <= 1


@pytest.mark.parametrize("rule", [Knapsack(), Proportional(), Plugin()])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 1.0, None])
def test_prompts_that_are_alike_get_num_generations_each(rule: Plugin, rate: float | None) -> None:
    assert rule.first_round(at(*[rate] * 7), 12) == [12] * 7


@pytest.mark.parametrize("rule", [Knapsack(budget=100), Proportional(budget=100), Knapsack(budget=100, most=30)])
def test_the_budget_is_spent_and_a_new_prompt_gets_an_equal_share(rule: Plugin) -> None:
    counts = rule.first_round(at(0.1, None, 0.5, 1.0, None, 0.9), 4)
    assert sum(counts) == 100 and min(counts) >= 2
    assert counts[1] == 17 and counts[4] == 16
    assert counts[0] > counts[3] and counts[2] > counts[3]


@pytest.mark.parametrize("seed", range(20))
def test_proportional_shares_are_off_by_less_than_one_and_add_up(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights, least, most = rng.random(9) * rng.integers(0, 2, 9), 2, int(rng.integers(6, 40))
    budget = int(rng.integers(18, 100))
    counts = np.array(proportional(weights, np.ones(9), budget, least, most))
    assert counts.sum() == min(budget, 9 * most) and counts.min() >= least and counts.max() <= most
    free = (counts > least) & (counts < most) & (weights > 0)
    if free.sum() > 1:  # those that no bound holds are in proportion
        scale = counts[free].sum() / weights[free].sum()
        assert (np.abs(counts[free] - scale * weights[free]) < 1.5).all()


@pytest.mark.parametrize("seed", range(30))
def test_a_budget_of_tokens_is_worth_as_much_as_the_best_division_but_for_one_completion(seed: int) -> None:
    rng = random.Random(seed)
    rates = [rng.choice([0.0, 1.0, rng.random(), rng.random()]) for _ in range(rng.randint(1, 4))]
    costs, least, most = [rng.uniform(5, 60) for _ in rates], 2, rng.randint(3, 9)
    budget = 2 * sum(costs) + rng.uniform(0, 400)

    def worth(counts: Sequence[int]) -> float:
        return math.fsum(knapsack_value(count, rate) for count, rate in zip(counts, rates, strict=True))

    def price(counts: Sequence[int]) -> float:
        return math.fsum(count * cost for count, cost in zip(counts, costs, strict=True))

    counts = greedy(rates, budget, least, most, knapsack_value, costs=costs)
    every = itertools.product(range(least, most + 1), repeat=len(rates))
    best = max(worth(division) for division in every if price(division) <= budget)
    step = max(knapsack_value(3, rate) - knapsack_value(2, rate) for rate in rates)
    assert best - step <= worth(counts) <= best + 1e-12
    assert price(counts) <= budget and min(counts) >= least and max(counts) <= most
    left = budget - price(counts)
    assert all(cost > left for count, cost in zip(counts, costs, strict=True) if count < most)


def long(*tokens: float, rate: float = 0.5) -> list[Record]:
    """Records of prompts whose completions take so many tokens."""
    return [Record(1, num_completions=8, pass_rate=rate, mean_tokens=each) for each in tokens]


@pytest.mark.parametrize("name", ["uniform", "knapsack", "variance"])
def test_a_budget_of_tokens_is_spent_to_less_than_a_completion(name: str) -> None:
    records = [*long(10, 100, 40), Record(mean_tokens=50)]
    counts = plugin(f"{name}:tokens=2000").first_round(records, 8)
    spent = 10 * counts[0] + 100 * counts[1] + 40 * counts[2] + 50 * counts[3]
    assert 1900 < spent <= 2000 and min(counts) >= 2
    if name == "knapsack":  # equal in all else, the short ones are cheaper
        assert counts[0] > counts[2] > counts[1]
    else:
        assert max(counts) - min(counts) <= 1


def test_tokens_are_counted_from_the_first_length_on_and_each_prompt_gets_the_least() -> None:
    rule = plugin("uniform:tokens=1000")
    assert rule.first_round(at(None, None), 8) == [8, 8]  # nothing is known of any length
    assert rule.first_round(long(400, 900), 8) == [2, 2]
    assert rule.first_round(long(10, 10), 8, 4) == [25, 25]  # of an update of four prompts, half
    assert plugin("uniform:tokens=1000,most=20").first_round(long(10, 10), 8) == [20, 20]
    assert plugin("uniform:budget=12").first_round(at(0.5, None), 8) == [6, 6]


def test_buckets_are_powers_of_two_that_expect_a_pass() -> None:
    rates = (1.0, 0.6, 0.5, 0.4, 0.25, 0.2, 0.1, 0.0, None)
    assert Buckets().first_round(at(*rates), 16) == [2, 2, 2, 4, 4, 8, 8, 8, 16]


DARS = {  # by whether a deviation divides, and how many of 12 pass: what schedule_ET and schedule_HW return
    (False, "equal"): [20, 20, 10, 4, 2, 1, 0],
    (False, "hardness"): [52, 52, 24, 12, 6, 3, 0],
    (True, "equal"): [19, 10, 5, 2, 1, 1, 0],
    (True, "hardness"): [46, 28, 15, 9, 5, 3, 0],
}
"""Printed by the paper's code (yangzhch6/DARS at 9b21b71, ray_dars_trainer.py), N = 12, N_max 32 and 64."""


@pytest.mark.parametrize(
    ("advantages", "more"),
    [
        (Advantages(), 10),
        (Advantages("mc_grpo"), 10),
        (Advantages("gdpo"), 10),
        (Advantages(scale="none"), 20),
        (Advantages(scale="batch"), 20),
        (Advantages("rloo"), 20),
    ],
)
def test_the_schedule_of_dars_goes_by_what_the_run_divides_advantages_by(advantages: Advantages, more: int) -> None:
    session = RolloutSession({"dars_equal": HardMore(most=32)})
    session.check(RunFacts(4, 12, 16, 1, divided_advantages=advantages.divides_groups), [])
    assert session.allocation.next_round(12, 1, 1, 12) == more


def test_a_balanced_prompt_ends_once_both_kinds_are_there_or_rounds_are_over() -> None:
    rule = Balanced(rounds=4, passed=2, failed=2)
    assert [rule.next_round(8, passed, 1, 8) for passed in (0, 1, 2, 6, 7, 8)] == [8, 8, 0, 0, 8, 8]
    assert rule.next_round(24, 1, 3, 8) == 8 and rule.next_round(32, 1, 4, 8) == 0
    positive = plugin("balanced:passed=1,failed=0")
    assert (
        positive.next_round(8, 0, 1, 8) == 8 and positive.next_round(8, 1, 1, 8) == positive.next_round(8, 8, 1, 8) == 0
    )


@dataclass
class Mine(Plugin):
    """A user's own."""

    size: int = 3

    def first_round(self, records: object, num_generations: int, num_prompts: int | None = None) -> list[int]:
        return [self.size] * num_generations


# ---- what a rule does to the gradient ------------------------------------------------------------------

DRAWS = 10_000


@pytest.mark.parametrize("rule", [Knapsack(budget=40), Proportional(budget=40)])
def test_a_budget_is_that_of_an_update_however_many_prompts_are_opened(rule: Plugin) -> None:
    """A mode opens more prompts than a batch has at first, and fewer later."""
    assert rule.first_round(at(*[None] * 8), 16, 4) == [10] * 8
    assert rule.first_round(at(None), 16, 4) == [10]
    assert sum(rule.first_round(at(0.2, 0.5, 0.9), 16, 4)) == 30
    assert rule.first_round([], 16, 4) == []
