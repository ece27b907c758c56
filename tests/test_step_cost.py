"""What a decode step costs."""

from __future__ import annotations

import numpy as np
import pytest

from lit_grpo.tools.simulation.step_cost import StepCost


def test_a_fit_recovers_the_cost_of_steps_without_error() -> None:
    rng = np.random.default_rng(0)
    rows, tokens = rng.integers(1, 65, 50), rng.integers(10, 50_000, 50)
    fitted = StepCost.fit(rows, tokens, 0.02 + 0.001 * rows + 3e-7 * tokens)
    assert (fitted.step_s, fitted.row_s, fitted.token_s) == pytest.approx((0.02, 0.001, 3e-7))


def test_a_fit_is_the_best_of_all_that_are_not_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows, tokens = rng.integers(1, 9, 12), rng.integers(1, 100, 12)
        seconds = rng.random(12) * 5
        fitted = StepCost.fit(rows, tokens, seconds)
        columns = np.stack([np.ones(12), rows, tokens], axis=1)
        least = np.square(columns @ [fitted.step_s, fitted.row_s, fitted.token_s] - seconds).sum()
        others = rng.random((500, 3)) * [3.0, 0.6, 0.06]
        assert least <= np.square(others @ columns.T - seconds).sum(axis=1).min() + 1e-9


def test_a_negative_cost_and_no_steps_are_told_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^The cost of a step is \(1\.0, -2\.0, 0\.0\) in s: give three times"):
        StepCost(1.0, -2.0, 0.0)
    with pytest.raises(ValueError, match=r"^There are 0 measured steps"):
        StepCost.fit(np.array([]), np.array([]), np.array([]))
