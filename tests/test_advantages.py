"""Advantages: golden numbers, missing rewards, and an independent reference."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest
import torch

from lit_grpo.update.advantages.functions import Scale, group_advantages, uniform_groups

NAN = math.nan


def advantages(rewards: list[list[float]], scale: Scale = "group") -> torch.Tensor:
    """Of groups of one size; a row each."""
    rewards_PG = torch.tensor(rewards, dtype=torch.float32)
    groups_R = torch.arange(len(rewards)).repeat_interleave(rewards_PG.shape[1])
    return group_advantages(rewards_PG.flatten(), groups_R, scale).view(rewards_PG.shape)


def assert_close(actual: torch.Tensor, expected: list[list[float]], atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=atol, equal_nan=True)


def reference(rewards: list[list[float]], scale: Scale) -> list[list[float]]:
    """The formula in double precision, with the standard library's statistics."""

    def deviation(values: list[float]) -> float:
        present = [value for value in values if not math.isnan(value)]
        return statistics.stdev(present) if len(present) > 1 else 0.0

    divisors: dict[Scale, Callable[[list[float]], float]] = {
        "group": lambda group: deviation(group) + 1e-4,
        "batch": lambda _: deviation([value for group in rewards for value in group]) + 1e-4,
        "none": lambda _: 1.0,
    }
    result = []
    for group in rewards:
        present = [value for value in group if not math.isnan(value)]
        mean = statistics.fmean(present) if present else NAN
        result.append([(value - mean) / divisors[scale](group) for value in group])
    return result


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("seed", range(10))
def test_random_rewards_agree_with_the_standard_library(scale: Scale, seed: int) -> None:
    rng = random.Random(seed)
    draw = rng.choice([lambda: rng.gauss(0, 3), lambda: float(rng.random() < 0.3), lambda: rng.gauss(1000, 1)])
    size = rng.randint(2, 64)
    rewards = [[draw() if rng.random() < 0.9 else NAN for _ in range(size)] for _ in range(rng.randint(1, 9))]
    rewards = torch.tensor(rewards).tolist()  # as float32 has them
    expected = torch.tensor(reference(rewards, scale))
    torch.testing.assert_close(advantages(rewards, scale), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_group_is_uniform_when_its_rewards_are_equal_or_missing() -> None:
    rewards_R = torch.tensor([1, 1, 1, 0, 1, NAN, 2, 2, NAN, NAN, NAN, 3, 0, NAN, 1])
    groups_R = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 6, 6, 6])  # 5 and 7 have no member
    assert uniform_groups(rewards_R, groups_R, 8).tolist() == [True, False, True, True, True, True, False, True]
