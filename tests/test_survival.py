"""Conditional expectations from past errors."""

from __future__ import annotations

import numpy as np
import pytest

from lit_grpo.scheduling.lengths import mean_length

NO_LIMIT = 1e9


def constant(value: float, count: int = 1) -> np.ndarray:
    return np.full(count, value)


def test_the_mean_is_over_the_errors_that_have_not_been_outlived() -> None:
    errors = np.log(np.arange(1.0, 21.0))
    mu, scale, limit = constant(0.0, 3), constant(1.0, 3), constant(NO_LIMIT, 3)
    means = mean_length(mu, scale, errors, np.array([0.0, 4.0, 11.5]), limit)
    assert means == pytest.approx([10.5, 12.5, 16.0])


def test_an_exponential_length_is_memoryless() -> None:
    lengths = -np.log(1 - (np.arange(20_000) + 0.5) / 20_000)  # quantiles of the exponential distribution, mean 1
    errors = np.log(lengths)
    lasted = np.array([0.0, 50.0, 100.0, 200.0])
    mu = constant(np.log(100.0), 4)
    rest = mean_length(mu, constant(1.0, 4), errors, lasted, constant(NO_LIMIT, 4)) - lasted
    assert rest == pytest.approx(constant(100.0, 4), rel=0.01)


def test_beyond_all_errors_the_tail_is_that_of_a_pareto_distribution() -> None:
    errors = np.log(np.arange(1.0, 21.0))
    mean = mean_length(constant(0.0), constant(1.0), errors, constant(130.0), constant(NO_LIMIT))
    assert mean == pytest.approx([130 * np.mean(np.arange(13.0, 21.0)) / 13])  # the eight largest, scaled up
