"""Regression that forgets."""

from __future__ import annotations

import numpy as np
import pytest

from lit_grpo.scheduling.lengths.model import OnlineRidge


def batch(rng: np.random.Generator, slopes: list[float], noise: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(64, len(slopes)))
    return x, 3 + x @ np.array(slopes) + noise * rng.normal(size=64)


def test_a_linear_relation_is_learned() -> None:
    rng, ridge = np.random.default_rng(0), OnlineRidge(forgetting=0.95)
    for _ in range(10):
        ridge.learn(*batch(rng, [1.0, 2.0, -1.0]))
    predicted = ridge.predict(np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 2.0]]))
    assert predicted == pytest.approx([3.0, 6.0, 1.0], abs=0.1)


def test_old_relations_are_forgotten() -> None:
    rng, ridge = np.random.default_rng(0), OnlineRidge(forgetting=0.5)
    for slope in [2.0] * 10 + [-2.0] * 10:
        ridge.learn(*batch(rng, [1.0, slope]))
    assert ridge.predict(np.array([[0.0, 1.0]]))[0] == pytest.approx(1.0, abs=0.1)


def test_a_first_column_that_never_varied_is_taken_at_its_word() -> None:
    rng, ridge = np.random.default_rng(0), OnlineRidge(forgetting=0.95)
    ridge.learn(np.zeros((32, 1)), rng.normal(2.0, 0.1, 32))
    high, low = ridge.predict(np.array([[0.2], [0.0]]))
    assert high - low == pytest.approx(0.2)


def test_columns_of_noise_are_left_out() -> None:
    rng, ridge = np.random.default_rng(0), OnlineRidge(forgetting=0.95)
    for _ in range(10):
        x = rng.normal(size=(20, 60))
        ridge.learn(x, x[:, 0] + rng.normal(size=20))
    x = rng.normal(size=(200, 60))
    assert np.square(ridge.predict(x) - x[:, 0]).mean() < 0.1


def test_residuals_are_of_predictions_made_before_learning() -> None:
    rng, ridge = np.random.default_rng(0), OnlineRidge(forgetting=0.95)
    x, y = batch(rng, [1.0, 1.0])
    assert len(ridge.learn(x, y)) == 32  # the second half
    x, y = batch(rng, [1.0, 1.0])
    expected = y - ridge.predict(x)
    assert ridge.learn(x, y) == pytest.approx(expected)


def test_a_prediction_far_from_all_that_was_seen_stays_near() -> None:
    rng, ridge = np.random.default_rng(0), OnlineRidge(forgetting=0.95)
    for _ in range(3):
        ridge.learn(*batch(rng, [1.0, 1.0]))
    assert ridge.predict(np.array([[0.0, 1e6]]))[0] < 3 + 4 * 2


def test_a_single_row_can_be_learned() -> None:
    ridge = OnlineRidge(forgetting=0.95)
    assert ridge.learn(np.array([[0.0]]), np.array([2.0])).tolist() == []
    assert ridge.predict(np.array([[0.0]])).tolist() == [2.0]
