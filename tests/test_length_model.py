"""Regression that forgets, on rows in groups."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lit_grpo.scheduling.lengths import Ridge


def teach(model: Ridge, x: np.ndarray, y: np.ndarray, groups: np.ndarray | None = None) -> None:
    alone = np.arange(len(y)) if groups is None else groups
    model.learn(x, y, alone)


def model_of() -> Ridge:
    return Ridge(between=1e9)


def batch(rng: np.random.Generator, slopes: list[float], noise: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    x = rng.normal(size=(64, len(slopes)))
    return x, 3 + x @ np.array(slopes) + noise * rng.normal(size=64)


def test_a_linear_relation_is_learned() -> None:
    rng, model = np.random.default_rng(0), model_of()
    for _ in range(10):
        teach(model, *batch(rng, [1.0, 2.0, -1.0]))
    predicted = model.predict(np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 2.0]]))
    assert predicted == pytest.approx([3.0, 6.0, 1.0], abs=0.35)


def test_columns_that_differ_between_groups_for_other_reasons_still_count_within() -> None:
    rng = np.random.default_rng(0)
    groups, own = np.repeat(np.arange(64), 16), rng.normal(size=1024)
    clear = own + rng.normal(0, 0.3, 1024) + 3 * rng.normal(size=64)[groups]  # but for the part of its group
    vague = own + rng.normal(0, 1.0, 1024)
    shares = []
    for between in (1, 1e9):
        model = Ridge(between)
        for _ in range(3):
            teach(model, np.column_stack([clear, vague]), own, groups)
        nothing, of_clear, of_vague = model.predict(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
        shares.append((of_clear - nothing) / (of_vague - nothing))
    assert shares[0] > 1
    assert shares[1] < 0.5


def test_slopes_that_were_wrong_of_late_are_trusted_less() -> None:
    rng = np.random.default_rng(0)
    swings = []
    for second in (1.0, -1.0):
        model = model_of()
        for sign in (1.0, second):
            x = rng.normal(size=(256, 1))
            teach(model, x, sign * x[:, 0])
        teach(model, x, x[:, 0])
        low, high = model.predict(np.array([[-1.0], [1.0]]))
        swings.append(high - low)
    assert swings[0] == pytest.approx(2, rel=0.1)
    assert 0 < swings[1] < 0.5 * swings[0] / 3  # a third is what is left of the slopes themselves


def test_the_state_brings_back_predictions() -> None:
    first, second = model_of(), model_of()
    teach(first, *batch(np.random.default_rng(0), [1.0, 2.0], noise=0.5))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    x = np.random.default_rng(1).normal(size=(5, 2))
    assert second.predict(x).tolist() == first.predict(x).tolist()
