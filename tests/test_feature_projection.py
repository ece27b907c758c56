"""Hidden states brought down to a few columns."""

from __future__ import annotations

import numpy as np
import pytest

from lit_grpo.scheduling.lengths import Projection


def test_few_columns_are_passed_on_as_they_are() -> None:
    features = np.arange(12.0).reshape(2, 6)
    assert Projection(8, 0)(features).tolist() == features.tolist()


def test_many_columns_become_few_and_scalars_stay() -> None:
    features = np.random.default_rng(0).normal(size=(5, 300))
    projected = Projection(16, 2)(features)
    assert projected.shape == (5, 16)
    assert projected[:, -2:] == pytest.approx(features[:, -2:])


def test_a_projection_that_was_loaded_is_the_same() -> None:
    features = np.random.default_rng(0).normal(size=(5, 300))
    first, second = Projection(16, 2), Projection(16, 2)
    expected = first(features)
    second.scale = first.scale
    assert second(features[:1] * 2).tolist() == first(features[:1] * 2).tolist()
    assert second(features).tolist() == expected.tolist()
