"""Dealing jobs onto slots."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lit_grpo.scheduling.plans.grouping import balanced_lanes, best_lanes, makespan


def least_makespan(lengths: np.ndarray, num_lanes: int) -> float:
    """Try everything."""
    deals = itertools.product(range(num_lanes), repeat=len(lengths))
    return min(makespan(lengths, np.array(lanes), num_lanes) for lanes in deals)


def test_a_dynamic_program_finds_what_longest_first_misses() -> None:
    lengths = np.array([3.0, 3.0, 2.0, 2.0, 2.0])  # longest first: 3 + 2 + 2; best: 3 + 3 and 2 + 2 + 2
    lanes = balanced_lanes(lengths, 2, epsilon=0.02)
    assert makespan(lengths, lanes, 2) == 6.0
    assert lanes[0] == lanes[1] and len({*lanes[2:].tolist()}) == 1


@pytest.mark.parametrize("num_lanes", [2, 3])
def test_load_vectors_are_within_epsilon_of_the_best(num_lanes: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(25):
        lengths = rng.integers(1, 60, rng.integers(1, 8 if num_lanes == 2 else 7)).astype(float)
        best = least_makespan(lengths, num_lanes)
        for epsilon in (0.01, 0.2):
            lanes = best_lanes(lengths, num_lanes, epsilon, 4 / 3 * best)
            assert lanes is not None
            assert best <= makespan(lengths, lanes, num_lanes) <= (1 + epsilon) * best


def test_many_lanes_fall_back_to_what_is_at_most_as_long_as_longest_first() -> None:
    lengths = np.array([17, 17, 16, 16, 15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 9.0])
    assert best_lanes(lengths, 9, 0.02, 40.0) is None
    lanes = balanced_lanes(lengths, 9, epsilon=0.02)
    assert makespan(lengths, lanes, 9) == 27.0  # longest first alone: 35, Graham's worst case


def test_a_program_that_would_explode_gives_up() -> None:
    lengths = np.random.default_rng(0).integers(1, 10_000, 300).astype(float)
    assert best_lanes(lengths, 4, 0.001, lengths.sum() / 4 * 1.1) is None


def test_every_job_gets_a_lane_that_exists() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        num_lanes = int(rng.integers(1, 12))
        lanes = balanced_lanes(rng.integers(1, 99, 30).astype(float), num_lanes, epsilon=0.05)
        assert lanes.shape == (30,) and lanes.min() >= 0 and lanes.max() < num_lanes
