"""Figures of a policy with their intervals, and the comparison of two policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lit_grpo.metrics import pass_at_k
from lit_grpo.tools.evaluation.answers import majority_correct
from lit_grpo.tools.evaluation.held_out import Scored
from lit_grpo.tools.evaluation.intervals import paired_p, percentile_interval, resampled, wilson

FRACTIONS = ("accuracy", "pass@", "majority@", "truncated")
"""Beginnings of the names of figures that are fractions of rows or completions."""


class Figure(NamedTuple):
    """A figure and the bounds of its 95% interval; all NaN if there is nothing to take the mean of."""

    value: float
    low: float
    high: float

    @classmethod
    def within(cls, value: float, low: float, high: float) -> Figure:
        """Return a figure with an interval that holds it: rounding may have put the value outside of its interval."""
        return cls(value, min(low, value), max(high, value))


@dataclass(frozen=True)
class RowValues:
    """A figure's values by row; the figure is the sum of the values divided by the sum of the counts.

    Args:
        values_R: Sum over the completions of each row, shape (rows,).
        counts_R: Number of completions of each row that have a value, shape (rows,).
    """

    values_R: np.ndarray
    counts_R: np.ndarray

    @property
    def shares_R(self) -> np.ndarray:
        """The mean of each row that has a value."""
        has_value_R = self.counts_R > 0
        return self.values_R[has_value_R] / self.counts_R[has_value_R]


class Pass:
    """The completions of one policy to all rows, in one way of decoding.

    Args:
        completions: All completions of rows that can be graded; those of a row follow each other, and all rows have
            equally many. One that is neither correct nor wrong counts as wrong.
        num_samples: Number of completions per row.
        ks: Values of k for pass@k; of greedy completions none.
    """

    def __init__(self, completions: Sequence[Scored], num_samples: int, ks: Sequence[int]) -> None:
        self.num_samples = num_samples
        self.rows = [completions[start : start + num_samples] for start in range(0, len(completions), num_samples)]
        self.num_correct_R = np.array([sum(bool(one.correct) for one in row) for row in self.rows])
        ones_R, many_R = np.ones(len(self.rows)), np.full(len(self.rows), float(num_samples))
        self.by_row: dict[str, RowValues] = {}
        if not ks:
            self.by_row["accuracy"] = RowValues(self.num_correct_R.astype(float), ones_R)
        for k in ks:
            passed = [pass_at_k(num_samples, int(number), k) for number in self.num_correct_R]
            self.by_row[f"pass@{k}"] = RowValues(np.array(passed), ones_R)
        told_R = np.array([row[0].answer is not None for row in self.rows], float)
        if ks and told_R.any():
            votes = [
                majority_correct([one.answer or "" for one in row], [bool(one.correct) for one in row])
                for row in self.rows
            ]
            self.by_row[f"majority@{num_samples}"] = RowValues(np.array(votes) * told_R, told_R)
        for dataset in sorted({row[0].dataset for row in self.rows} - {""}):
            name = "pass@1" if ks else "accuracy"
            of_dataset_R = np.array([row[0].dataset == dataset for row in self.rows], float)
            self.by_row[f"{name} {dataset}"] = RowValues(self.num_correct_R / num_samples * of_dataset_R, of_dataset_R)
        rewards = [[one.reward for one in row if math.isfinite(one.reward)] for row in self.rows]
        self.by_row["reward"] = RowValues(np.array([*map(sum, rewards)], float), np.array([*map(len, rewards)], float))
        lengths, cut = ([[getattr(one, name) for one in row] for row in self.rows] for name in ("length", "truncated"))
        self.by_row["length"] = RowValues(np.array([*map(sum, lengths)], float), many_R)
        self.by_row["truncated"] = RowValues(np.array([*map(sum, cut)], float), many_R)

    def figures(self) -> dict[str, Figure]:
        """Return the figures with their intervals.

        A fraction of which each row is entirely counted or not at all has Wilson's interval. All other intervals are
        those of the percentile bootstrap over rows.
        """
        columns = [column for each in self.by_row.values() for column in (each.values_R, each.counts_R)]
        sums_SC = resampled(np.column_stack(columns))
        figures: dict[str, Figure] = {}
        for place, (name, row) in enumerate(self.by_row.items()):
            total, count = float(row.values_R.sum()), float(row.counts_R.sum())
            if not count:
                figures[name] = Figure(math.nan, math.nan, math.nan)
            elif name.startswith(FRACTIONS) and np.isin(shares_R := row.shares_R, (0.0, 1.0)).all():
                figures[name] = Figure.within(total / count, *wilson(float(shares_R.sum()), len(shares_R)))
            else:
                figures[name] = Figure.within(total / count, *percentile_interval(_ratio(sums_SC, place)))
        return figures


def _ratio(sums_SC: np.ndarray, place: int) -> np.ndarray:
    """Return the resampled values of one figure; NaN if nothing was drawn that has a value."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums_SC[:, 2 * place] / sums_SC[:, 2 * place + 1]


class PairedComparison(NamedTuple):
    """Share of correct answers of a policy, compared with the first policy on the same rows.

    Args:
        difference: Fraction of correct completions minus that of the first policy.
        low: Lower bound of the 95% interval of the difference, by the paired bootstrap over rows.
        high: Upper bound of the interval.
        p: Two-sided p-value of the exact paired permutation test; of greedy completions it is McNemar's exact test.
        better: Number of rows with more correct completions than the first policy's.
        worse: Number of rows with fewer.
    """

    difference: float
    low: float
    high: float
    p: float
    better: int
    worse: int


def compare(first: Pass, other: Pass) -> PairedComparison:
    """Compare correct completions of two policies to the same rows, in the same way of decoding."""
    differences_R = other.num_correct_R - first.num_correct_R
    means_S = resampled(differences_R[:, None] / first.num_samples)[:, 0] / len(differences_R)
    difference = float(differences_R.mean()) / first.num_samples
    return PairedComparison(
        *Figure.within(difference, *percentile_interval(means_S)),
        p=paired_p(differences_R.tolist()),
        better=int((differences_R > 0).sum()),
        worse=int((differences_R < 0).sum()),
    )
