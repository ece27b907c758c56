"""Groups of difficulty: their weights by the formulas in float64, and divisions against every other one."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from lit_grpo.budgets.history import Outcome, Record
from lit_grpo.methods.gdro import PromptGDRO, RolloutGDRO, bin_of
from lit_grpo.types import Prompt

PROMPT = Prompt("a", (1,), "")


def visited(*rates: float) -> Record:
    recent = tuple(Outcome(version, rate) for version, rate in enumerate(rates))
    return Record(len(rates), last_pass_rate=rates[-1], pass_rate=rates[-1], recent=recent)


def by_formula(losses: list[dict[int, list[float]]], rule: PromptGDRO) -> list[float]:
    """The q of each group after batches with these losses, by eq. 12 to 15."""
    scores: dict[int, float] = {}
    for batch in losses:
        for group, its in batch.items():
            mean = math.fsum(its) / len(its)
            scores[group] = (1 - rule.smoothing) * scores[group] + rule.smoothing * mean if group in scores else mean
    weights = [math.exp(rule.sharpness * scores[group]) if group in scores else 1.0 for group in range(rule.bins)]
    total = math.fsum(weights)
    return [(1 - rule.exploration) * weight / total + rule.exploration / rule.bins for weight in weights]


@pytest.mark.parametrize("seed", range(20))
def test_weights_are_exponential_in_mean_losses(seed: int) -> None:
    rng = random.Random(seed)
    rule = PromptGDRO(rng.randint(2, 6), rng.uniform(0.1, 5), rng.uniform(0.05, 1), rng.uniform(0.01, 0.9))
    state, losses = rule.prompt_state([]), []
    for _ in range(rng.randint(0, 8)):
        batch: dict[int, list[float]] = {}
        records = []
        for _ in range(rng.randint(1, 5)):
            earlier = [rng.choice([0.0, 0.5]) for _ in range(rng.randint(1, 6))]
            passed = rng.random()
            records.append(visited(*earlier, passed))
            share = sum(rate > 0 for rate in earlier) / len(earlier)
            batch.setdefault(min(math.floor(share * rule.bins), rule.bins - 1), []).append(1 - passed)
        state = rule.prompt_state([], records, state)
        losses.append(batch)
    expected = by_formula(losses, rule)
    assert rule.shares(state) == pytest.approx(expected, abs=1e-12)
    for rates in ((0.0,), (0.0, 0.5), (0.5, 0.5)):
        record = visited(*rates)
        assert rule.prompt_chance(PROMPT, record, state) == pytest.approx(
            expected[bin_of(record, rule.bins)] / max(expected)
        )


def noise(rates: list[float], counts: tuple[int, ...] | list[int], bins: int) -> float:
    """``sum of v / n`` over prompts, each with the variance of its group's mean rate."""
    groups = [min(math.floor(rate * bins), bins - 1) for rate in rates]
    total = 0.0
    for group, count in zip(groups, counts, strict=True):
        its = [rate for rate, other in zip(rates, groups, strict=True) if other == group]
        mean = math.fsum(its) / len(its)
        total += mean * (1 - mean) / count
    return total


@pytest.mark.parametrize("seed", range(25))
def test_a_division_has_the_least_noise_of_all(seed: int) -> None:
    rng = random.Random(seed)
    rates = [rng.choice([0.0, 1.0, 0.5, rng.random(), rng.random()]) for _ in range(rng.randint(1, 5))]
    least, most, bins = 2, rng.randint(3, 8), rng.choice([1, 3, 10])
    budget = rng.randint(least * len(rates), (most + 1) * len(rates))
    records = [Record(1, num_completions=8, pass_rate=rate) for rate in rates]
    counts = RolloutGDRO(budget=budget, least=least, most=most, bins=bins).first_round(records, 8)
    assert sum(counts) == min(budget, most * len(rates))
    divisions = (
        each for each in itertools.product(range(least, most + 1), repeat=len(rates)) if sum(each) == sum(counts)
    )
    best = min(noise(rates, each, bins) for each in divisions)
    assert noise(rates, counts, bins) == pytest.approx(best, rel=1e-9, abs=1e-12)
