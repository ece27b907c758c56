"""How good predicted lengths are: one figure between groups, and one within."""

from __future__ import annotations

import numpy as np


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return the rank correlation of two arrays of shape (n,), equal values sharing a rank; 0 where one is constant."""
    middle = (len(a) + 1) / 2
    ranks_a, ranks_b = average_ranks(a) - middle, average_ranks(b) - middle
    norm = float(np.sqrt(np.square(ranks_a).sum() * np.square(ranks_b).sum()))
    return float(ranks_a @ ranks_b) / norm if norm else 0.0


def within_correlation(predicted: np.ndarray, actual: np.ndarray, groups: np.ndarray) -> float:
    """Return how well lengths > 0, shape (n,), are ordered within ``groups``, numbers of shape (n,).

    It is the rank correlation of the logs of lengths, each less the mean of its group: what differs between groups does
    not count, groups whose lengths differ much count for more, and no outlier counts for much.
    """
    _, groups, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    centred = [logs - (np.bincount(groups, logs) / sizes)[groups] for logs in (np.log(predicted), np.log(actual))]
    a, b = (np.round(each[sizes[groups] > 1], 9) for each in centred)  # so that what is equal ties
    return spearman(a, b)


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1, shape (n,); equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
