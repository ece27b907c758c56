"""Figures on predictions."""

from __future__ import annotations

import numpy as np
import pytest

from lit_grpo.scheduling.lengths import spearman, within_correlation


def test_rank_correlation_of_known_examples() -> None:
    iq = np.array([106, 100, 86, 101, 99, 103, 97, 113, 112, 110])
    tv = np.array([7, 27, 2, 50, 28, 29, 20, 12, 6, 17])
    assert spearman(iq, tv) == pytest.approx(-29 / 165)  # the textbook example without ties
    assert spearman(np.array([1, 2, 2, 3]), np.array([1, 3, 2, 4])) == pytest.approx(0.9486832980505138)
    assert spearman(np.array([1, 2, 3]), np.array([10, 100, 1000])) == pytest.approx(1.0)
    assert spearman(np.array([1, 2, 3]), np.array([5, 5, 5])) == 0.0


def test_what_differs_between_groups_does_not_count_within() -> None:
    groups = np.repeat([0, 1], 4)
    actual = np.array([10.0, 20, 30, 40, 1000, 2000, 3000, 4000])
    assert spearman(np.repeat([1.0, 2.0], 4), actual) > 0.8
    assert within_correlation(np.repeat([1.0, 2.0], 4), actual, groups) == 0.0
    assert within_correlation(actual[::-1], actual, groups) == pytest.approx(-1.0)
    swapped = np.concatenate([actual[4:], actual[:4]])  # in order within groups, and the wrong way round between
    assert within_correlation(swapped, actual, groups) == pytest.approx(1.0)
