"""Metrics for a page to draw: a limited number of points, however long the run is."""

from __future__ import annotations

from typing import Any

import numpy as np

MAX_POINTS = 500  # of a metric; each point has a mean, a smallest and a largest value
AXES = {"num_tokens": "tokens of prompts and completions", "time/total_s": "time in steps"}
"""Metrics that may be the axis of a chart in place of the update."""


def axis(steps: np.ndarray, columns: dict[str, np.ndarray], most: int = MAX_POINTS) -> dict[str, Any]:
    """Return the axis: the updates of at most ``most`` points, and the values there of other axes, (rows,) each."""
    first, last = _bounds(len(steps), most)
    others = {name: _filled(columns[name]) for name in AXES if name in columns}
    return {
        "first": steps[first].tolist(),
        "last": steps[last].tolist(),
        "rows_per_point": int((last - first + 1).max(initial=1)),
        "others": {name: _rounded(values[last], 7) for name, values in others.items()},
    }


def points(values: np.ndarray, most: int = MAX_POINTS) -> dict[str, Any]:
    """Return the mean of each point's rows, and if it has several, the smallest and largest; null without values."""
    first, last = _bounds(len(values), most)
    if (first == last).all():
        return {"mean": _rounded(values)}
    there = np.isfinite(values)
    counts = np.add.reduceat(there, first)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(there, values, 0.0), first) / counts
    least = np.minimum.reduceat(np.where(there, values, np.inf), first)
    greatest = np.maximum.reduceat(np.where(there, values, -np.inf), first)
    return {"mean": _rounded(mean), "min": _rounded(least), "max": _rounded(greatest)}


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float | None:
    """Return Spearman's correlation; ties share their mean rank. None if one is constant or has fewer than 3 values."""
    if len(one) < 3 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _bounds(num_rows: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last row of each point."""
    edges = np.linspace(0, num_rows, min(num_rows, most) + 1).round().astype(np.int64)
    return edges[:-1], edges[1:] - 1


def _filled(values: np.ndarray) -> np.ndarray:
    """Replace a missing value by the last one before it, and by 0 at the beginning."""
    there = np.where(np.isfinite(values), np.arange(len(values)), -1)
    latest = np.maximum.accumulate(there)
    return np.where(latest >= 0, values[latest], 0.0)


def _rounded(values: np.ndarray, digits: int = 5) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
