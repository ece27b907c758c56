"""Intervals of means over rows, and the exact paired test."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z_95 = 1.959963984540054
"""The 97.5% quantile of the normal distribution."""
RESAMPLES = 10_000
_AT_A_TIME = 500  # resamples


def wilson(num_correct: float, num_rows: int) -> tuple[float, float]:
    """Return the 95% score interval of a proportion (Wilson, 1927), without continuity correction, for 1 row or more.

    The proportion is never outside of its interval, by rounding either.
    """
    share, z2 = num_correct / num_rows, Z_95**2
    center = share + z2 / (2 * num_rows)
    half = Z_95 * math.sqrt(share * (1 - share) / num_rows + z2 / (4 * num_rows**2))
    scale = 1 + z2 / num_rows
    return max(0.0, min(share, (center - half) / scale)), min(1.0, max(share, (center + half) / scale))


def resampled(columns_RC: np.ndarray, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """Return the sums of columns over rows that are drawn with replacement (the bootstrap, Efron 1979).

    The same seed and number of rows draw the same rows, so that sums of two policies on the same rows are paired.

    Args:
        columns_RC: Values of each row, shape (rows, columns).
        seed: Seed of the draws.
        resamples: Number of draws of all rows.

    Returns:
        Sums, shape (resamples, columns).
    """
    random, num_rows = np.random.default_rng(seed), len(columns_RC)
    chances = np.full(num_rows, 1 / num_rows)
    sizes = [min(_AT_A_TIME, resamples - start) for start in range(0, resamples, _AT_A_TIME)]
    return np.concatenate([random.multinomial(num_rows, chances, size) @ columns_RC for size in sizes])


def percentile_interval(values_S: np.ndarray) -> tuple[float, float]:
    """Return the 2.5% and 97.5% quantiles of resampled values; NaN among them are left out."""
    values_S = values_S[np.isfinite(values_S)]
    if not len(values_S):
        return math.nan, math.nan
    low, high = np.quantile(values_S, [0.025, 0.975])
    return float(low), float(high)


def paired_p(differences: Sequence[int]) -> float:
    """Return the two-sided p-value of the exact paired permutation test.

    Without a difference between two policies, each row's difference has either sign with a chance of a half. The
    p-value is the chance that the absolute value of the sum is at least the observed one. All signs are counted, by
    convolution; nothing is drawn. With differences of -1, 0 and 1 this is McNemar's exact test.

    Args:
        differences: For each row, correct completions of the one policy minus correct completions of the other.
    """
    sizes = [abs(one) for one in differences if one]
    chances = np.ones(1)  # of the sums -total, -total + 2, ..., total
    for size in sizes:
        longer = np.zeros(len(chances) + size)
        longer[: len(chances)] += chances / 2
        longer[size:] += chances / 2
        chances = longer
    total, observed = sum(sizes), abs(sum(differences))
    sums = np.arange(-total, total + 1, 2)
    return min(1.0, float(chances[np.abs(sums) >= observed].sum()))
