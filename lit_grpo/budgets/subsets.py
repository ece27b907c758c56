"""Choice of the completions that stay in a group."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import numpy as np

STEPS = 100  # of a chance: finer than anything that predicts one knows it


def nearest_subset(chances: np.ndarray, stays: np.ndarray, size: int, share: float) -> np.ndarray:
    """Choose ``size`` members beside those that stay, so that the mean chance of all is nearest to ``share``.

    Of all subsets of that size it is the best, with chances rounded to hundredths; among equals the one with more
    chances far from a half, which are surer, and then with earlier members.

    Args:
        chances: Of success, shape (n,), of which few differ: time and memory grow with the kinds of them.
        stays: Whether each member stays anyway, shape (n,), bool.
        size: How many of the others go on.
        share: Mean chance that all members together should have, from 0 to 1.

    Returns:
        Who stays then, shape (n,), bool.
    """
    hundredths = np.rint(STEPS * chances).astype(int).tolist()
    others = sorted(
        np.flatnonzero(~stays).tolist(), key=lambda row: (-abs(2 * hundredths[row] - STEPS), hundredths[row], row)
    )
    kinds = [(value, list(rows)) for value, rows in groupby(others, key=hundredths.__getitem__)]
    reach = [[1] + [0] * size]  # of the last kinds, by how many are taken: a bit for each sum that they can have
    for value, rows in reversed(kinds):
        after = reach[-1]
        reach.append([_union(after[n - k] << k * value for k in range(min(n, len(rows)) + 1)) for n in range(size + 1)])
    wanted = STEPS * share * (size + stays.sum()) - sum(hundredths[row] for row in np.flatnonzero(stays))
    sums = [total for total in range(reach[-1][size].bit_length()) if reach[-1][size] >> total & 1]
    total = min(sums, key=lambda total: abs(total - wanted))
    chosen = stays.copy()
    for (value, rows), after in zip(kinds, reach[-2::-1], strict=True):
        most = min(size, len(rows), total // value if value else size)
        count = next(k for k in range(most, -1, -1) if after[size - k] >> (total - k * value) & 1)
        chosen[rows[:count]] = True
        size, total = size - count, total - count * value
    return chosen


def _union(sets: Iterable[int]) -> int:
    union = 0
    for each in sets:
        union |= each
    return union
