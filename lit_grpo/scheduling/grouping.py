"""Dealing jobs onto slots so that all slots have about as much to do: P||Cmax."""

from __future__ import annotations

import heapq

import numpy as np

from lit_grpo.scheduling.bounds import slot_bound
from lit_grpo.scheduling.load_vectors import best_lanes

MULTIFIT_ROUNDS = 10
MULTIFIT_WORK = 50_000
"""MULTIFIT is tried up to this many jobs x lanes: it costs their product, and with many jobs LPT is as good."""


def balanced_lanes(lengths: np.ndarray, num_lanes: int, epsilon: float) -> np.ndarray:
    """Return a lane for each job, int64, shape (jobs,), so that the largest total length of a lane is small.

    Longest-first is taken where it is within ``1 + epsilon`` of the lower bound. Else the exact dynamic program over
    rounded load vectors (:func:`best_lanes`), within ``1 + epsilon`` of the best, where the lanes are few; else the
    better of longest-first and MULTIFIT (Coffman, Garey, Johnson 1978: at most 13/11 of the best), for which there
    is no such bound: for any number of lanes the problem is strongly NP-hard and has no FPTAS.

    Args:
        lengths: Tokens of each job, whole numbers, shape (jobs,).
        num_lanes: Slots that the jobs are dealt onto.
        epsilon: What the makespan may exceed the best by, relative to it, where that can be had.
    """
    if not len(lengths):
        return np.zeros(0, dtype=np.int64)
    lanes = _longest_first(lengths, num_lanes)
    target = (1.0 + epsilon) * slot_bound(lengths, num_lanes)
    if makespan(lengths, lanes, num_lanes) <= target:
        return lanes
    best = best_lanes(lengths, num_lanes, epsilon, makespan(lengths, lanes, num_lanes))
    if best is not None:
        return min(best, lanes, key=lambda candidate: makespan(lengths, candidate, num_lanes))
    if len(lengths) * num_lanes > MULTIFIT_WORK:
        return lanes
    return _multifit(lengths, num_lanes, lanes)


def makespan(lengths: np.ndarray, lanes: np.ndarray, num_lanes: int) -> float:
    """Return the largest total length of a lane."""
    return float(np.bincount(lanes, weights=lengths, minlength=num_lanes).max())


def _longest_first(lengths: np.ndarray, num_lanes: int) -> np.ndarray:
    """Give each job, the longest first, to the lane with the least so far."""
    lanes = np.zeros(len(lengths), dtype=np.int64)
    loads = [(0.0, lane) for lane in range(num_lanes)]
    values = lengths.tolist()
    for job in np.argsort(-lengths, kind="stable").tolist():
        load, lane = loads[0]
        lanes[job] = lane
        heapq.heapreplace(loads, (load + values[job], lane))
    return lanes


def _multifit(lengths: np.ndarray, num_lanes: int, lanes: np.ndarray) -> np.ndarray:
    """Search for the least capacity with which first-fit decreasing needs no more lanes, below that of ``lanes``."""
    low, high = slot_bound(lengths, num_lanes), makespan(lengths, lanes, num_lanes)
    for _ in range(MULTIFIT_ROUNDS):
        middle = (low + high) / 2
        packed = _first_fit_decreasing(lengths, num_lanes, middle)
        if packed is None:
            low = middle
        else:
            lanes, high = packed, makespan(lengths, packed, num_lanes)
    return lanes


def _first_fit_decreasing(lengths: np.ndarray, num_lanes: int, capacity: float) -> np.ndarray | None:
    loads = [0.0] * num_lanes
    lanes = np.zeros(len(lengths), dtype=np.int64)
    for job in np.argsort(-lengths, kind="stable").tolist():
        length = float(lengths[job])
        lane = next((lane for lane, load in enumerate(loads) if load + length <= capacity), None)
        if lane is None:
            return None
        loads[lane] += length
        lanes[job] = lane
    return lanes
