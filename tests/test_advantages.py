"""Advantages: golden numbers, missing rewards, and an independent reference."""

from __future__ import annotations

import itertools
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


def test_group_scale_divides_by_the_unbiased_deviation_of_the_group() -> None:
    # deviations: sqrt(1/3) = 0.57735027 (the biased one would be 0.5), and sqrt(2) = 1.41421356
    assert_close(advantages([[1, 0, 0, 1]]), [[0.86587545, -0.86587545, -0.86587545, 0.86587545]])
    assert_close(advantages([[2, 4]]), [[-0.70705682, 0.70705682]])
    assert_close(advantages([[0, 0, 0, 1]]), [[-0.49990001, -0.49990001, -0.49990001, 1.49970003]])


def test_batch_scale_centres_in_the_group_and_divides_by_the_deviation_of_all_rewards() -> None:
    # rewards 0, 2, 4, 8: mean 3.5, squares 35, deviation sqrt(35/3) = 3.41565026
    expected = [[-0.29276145, 0.29276145], [-0.58552290, 0.58552290]]
    assert_close(advantages([[0, 2], [4, 8]], "batch"), expected)


def test_none_scale_only_centres() -> None:
    assert_close(advantages([[0, 2, 4], [5, 5, 8]], "none"), [[-2, 0, 2], [-1, -1, 2]])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [2, 3, 7, 16, 49, 1024])
def test_equal_rewards_give_exactly_zero(scale: Scale, size: int) -> None:
    rewards = [[value] * size for value in (0.1, 1 / 3, -0.7, 1e-6, 123456.7, 0.0)]
    assert advantages(rewards, scale).abs().max() == 0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_uniform_group_beside_a_mixed_one_is_exactly_zero(scale: Scale) -> None:
    result = advantages([[0.1, 0.1, 0.1], [0.0, 1.0, 0.3]], scale)
    assert result[0].tolist() == [0, 0, 0]
    assert result[1].abs().min() > 0


def test_a_missing_reward_takes_no_part_and_stays_missing() -> None:
    assert_close(advantages([[1, NAN, 0, 1, NAN, 0]]), [[0.86587545, NAN, -0.86587545, 0.86587545, NAN, -0.86587545]])
    assert_close(advantages([[1, NAN, 3], [4, 8, NAN]], "none"), [[-1, NAN, 1], [-2, 2, NAN]])
    expected = [[-0.29276145, NAN, 0.29276145], [NAN, -0.58552290, 0.58552290]]
    assert_close(advantages([[0, NAN, 2], [NAN, 4, 8]], "batch"), expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_only_member_with_a_reward_has_advantage_zero(scale: Scale) -> None:
    assert_close(advantages([[NAN, 0.7, NAN]], scale), [[NAN, 0, NAN]], atol=0)
    assert_close(advantages([[0.7]], scale), [[0]], atol=0)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_without_rewards_is_missing_altogether_and_harms_no_other(scale: Scale) -> None:
    alone = advantages([[1, 0, 0.5]], scale)
    beside = advantages([[NAN, NAN, NAN], [1, 0, 0.5]], scale)
    assert beside[0].isnan().all()
    torch.testing.assert_close(beside[1:], alone, rtol=0, atol=0)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_shuffling_members_and_groups_shuffles_the_advantages_and_changes_none(scale: Scale) -> None:
    rewards = [[0.1, 0.9, NAN, 0.4], [1.0, 0.0, 0.0, 0.2], [0.3, 0.3, 0.3, 0.3]]
    expected = advantages(rewards, scale)
    for groups in itertools.permutations(range(3)):
        for members in itertools.permutations(range(4)):
            shuffled = advantages([[rewards[group][member] for member in members] for group in groups], scale)
            original = expected[list(groups)][:, list(members)]
            torch.testing.assert_close(shuffled, original, rtol=1e-6, atol=0, equal_nan=True)


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
