"""Figures on predictions."""

from __future__ import annotations

import numpy as np
import pytest

from lit_grpo.scheduling.lengths.model import Quality, average_ranks, spearman


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    assert average_ranks(np.array([30.0, 10.0, 20.0, 20.0])).tolist() == [4.0, 1.0, 2.5, 2.5]


def test_rank_correlation_of_known_examples() -> None:
    iq = np.array([106, 100, 86, 101, 99, 103, 97, 113, 112, 110])
    tv = np.array([7, 27, 2, 50, 28, 29, 20, 12, 6, 17])
    assert spearman(iq, tv) == pytest.approx(-29 / 165)  # the textbook example without ties
    assert spearman(np.array([1, 2, 2, 3]), np.array([1, 3, 2, 4])) == pytest.approx(0.9486832980505138)
    assert spearman(np.array([1, 2, 3]), np.array([10, 100, 1000])) == pytest.approx(1.0)
    assert spearman(np.array([1, 2, 3]), np.array([5, 5, 5])) == 0.0


def test_figures_are_of_the_last_predictions() -> None:
    quality = Quality(window=2)
    quality.add(np.array([1.0, 10.0, 40.0]), np.array([900.0, 20.0, 40.0]), np.array([0, 1, 2]))
    assert quality.metrics("_at_8") == pytest.approx(
        {"lengths/spearman_at_8": 1.0, "lengths/log_error_at_8": np.log(2) / 2, "lengths/mae_tokens_at_8": 5.0}
    )
    assert quality.num_groups == 2


def test_there_are_no_figures_without_predictions() -> None:
    assert Quality().metrics() == {}
