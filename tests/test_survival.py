"""Conditional expectations from past residuals."""

from __future__ import annotations

import numpy as np
import pytest

from lit_grpo.scheduling.lengths.model import Residuals

NO_LIMIT = 1e9


def residuals_of(logs: np.ndarray) -> Residuals:
    residuals = Residuals(capacity=100_000)
    residuals.add(logs)
    return residuals


def constant(value: float, count: int = 1) -> np.ndarray:
    return np.full(count, value)


def test_the_mean_is_over_the_residuals_that_have_not_been_outlived() -> None:
    residuals = residuals_of(np.log(np.arange(1.0, 21.0)))
    mu, scale, limit = constant(0.0, 3), constant(1.0, 3), constant(NO_LIMIT, 3)
    means = residuals.mean(mu, scale, np.array([0.0, 4.0, 11.5]), limit)
    assert means == pytest.approx([10.5, 12.5, 16.0])


def test_lengths_beyond_the_limit_count_as_the_limit() -> None:
    residuals = residuals_of(np.log(np.arange(1.0, 21.0)))
    mean = residuals.mean(constant(0.0), constant(1.0), constant(0.0), constant(10.0))
    assert mean == pytest.approx([(sum(range(1, 10)) + 11 * 10) / 20])


def test_an_exponential_length_is_memoryless() -> None:
    lengths = -np.log(1 - (np.arange(20_000) + 0.5) / 20_000)  # quantiles of the exponential distribution, mean 1
    residuals = residuals_of(np.log(lengths))
    lasted = np.array([0.0, 50.0, 100.0, 200.0])
    mu = constant(np.log(100.0), 4)
    rest = residuals.mean(mu, constant(1.0, 4), lasted, constant(NO_LIMIT, 4)) - lasted
    assert rest == pytest.approx(constant(100.0, 4), rel=0.01)


def test_beyond_all_residuals_the_tail_is_that_of_a_pareto_distribution() -> None:
    residuals = residuals_of(np.log(np.arange(1.0, 21.0)))
    mean = residuals.mean(constant(0.0), constant(1.0), constant(130.0), constant(NO_LIMIT))
    assert mean == pytest.approx([130 * np.mean(np.arange(13.0, 21.0)) / 13])  # the eight largest, scaled up


def test_a_smaller_scale_draws_lengths_together() -> None:
    residuals = residuals_of(np.array([-1.0, 0.0, 1.0]))
    args = constant(0.0, 2), np.array([0.5, 1.0]), constant(0.0, 2), constant(NO_LIMIT, 2)
    assert residuals.mean(*args) == pytest.approx([np.exp([-0.5, 0, 0.5]).mean(), np.exp([-1.0, 0, 1.0]).mean()])


def test_only_the_last_residuals_are_kept() -> None:
    residuals = Residuals(capacity=4)
    residuals.add(np.array([9.0, 9.0, 1.0]))
    residuals.add(np.array([2.0, 3.0, 4.0]))
    assert residuals.values.tolist() == [1.0, 2.0, 3.0, 4.0]
