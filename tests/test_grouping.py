"""Dealing jobs onto slots."""

from __future__ import annotations

import numpy as np
import pytest

from lit_grpo.methods.plans.infinite_sampling import (
    balanced_lanes,
    fptas_lanes,
    longest_first_lanes,
    makespan,
    packed_lanes,
)


def least_makespan(lengths: np.ndarray, num_lanes: int) -> float:
    """Try everything, the longest first, but what is no better than the best so far."""
    best = float(lengths.sum())
    values = sorted(lengths.tolist(), reverse=True)

    def deal(number: int, loads: tuple[float, ...]) -> None:
        nonlocal best
        if number == len(values):
            best = min(best, max(loads))
            return
        for load in {*loads}:
            if load + values[number] < best:
                lane = loads.index(load)
                deal(number + 1, (*loads[:lane], load + values[number], *loads[lane + 1 :]))

    deal(0, (0.0,) * num_lanes)
    return best


def answer(lengths: np.ndarray, num_lanes: int, epsilon: float) -> np.ndarray | None:
    """What the dynamic program says, beginning with the better of longest first and MULTIFIT."""
    known = packed_lanes(lengths, num_lanes, longest_first_lanes(lengths, num_lanes))
    return fptas_lanes(lengths, num_lanes, epsilon, known)


@pytest.mark.parametrize("epsilon", [0.001, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("num_lanes", [2, 3, 4])
def test_an_answer_is_within_epsilon_of_the_best_and_few_jobs_always_get_one(num_lanes: int, epsilon: float) -> None:
    rng = np.random.default_rng(0)
    for longest in (9, 60, 1024):
        for _ in range(8):
            lengths = rng.integers(1, longest + 1, rng.integers(1, 13)).astype(float)
            lanes = answer(lengths, num_lanes, epsilon)
            assert lanes is not None
            best = least_makespan(lengths, num_lanes)
            assert best <= makespan(lengths, lanes, num_lanes) <= (1 + epsilon) * best


@pytest.mark.parametrize("most_loads", [1_000, 20_000, 4_000_000])
def test_an_answer_holds_where_load_vectors_were_cut_and_a_bad_schedule_was_known(
    monkeypatch: pytest.MonkeyPatch, most_loads: int
) -> None:
    monkeypatch.setattr("lit_grpo.methods.plans.infinite_sampling.MOST_LOADS", most_loads)
    rng = np.random.default_rng(1)
    answers = []
    for _ in range(50):
        lengths = rng.integers(1, 60, 10).astype(float)
        lanes = fptas_lanes(lengths, 3, 0.02, known=np.arange(10) % 3)
        answers.append(lanes is not None)
        assert lanes is None or makespan(lengths, lanes, 3) <= 1.02 * least_makespan(lengths, 3)
    assert sum(answers) >= 5
    assert all(answers) == (most_loads == 4_000_000)


def test_without_an_answer_balancing_is_at_most_as_long_as_longest_first() -> None:
    lengths = np.array([17, 17, 16, 16, 15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 9.0])
    lanes = balanced_lanes(lengths, 9, epsilon=0.02)
    assert makespan(lengths, lanes, 9) == 27.0  # longest first alone: 35, Graham's worst case
    lengths = np.random.default_rng(0).integers(1, 10_000, 60).astype(float)
    assert answer(lengths, 20, 0.0001) is None
    assert balanced_lanes(lengths, 20, epsilon=0.0001).shape == (60,)
