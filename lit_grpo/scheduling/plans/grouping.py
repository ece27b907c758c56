"""The FPTAS for few slots: a dynamic program over the loads that the slots can have."""

from __future__ import annotations

import heapq
import math

import numpy as np

from lit_grpo.scheduling.bounds import slot_bound

MAX_STATES = 100_000
"""Load vectors kept over all jobs before the program gives up: under a tenth of a second of work."""


def best_lanes(lengths: np.ndarray, num_lanes: int, epsilon: float, limit: float) -> np.ndarray | None:
    """Return a lane for each job with a makespan of at most ``1 + epsilon`` times the best, or None.

    Horowitz and Sahni (1976): lengths are rounded down to multiples of ``epsilon x limit / (2 x jobs)``, and for one
    job after another all load vectors that can be reached are listed, each once, lanes in ascending order. Those are
    up to ``(jobs / epsilon) ** (lanes - 1)``, polynomial only where the number of lanes is fixed. None stands for more
    than ``MAX_STATES`` of them.

    Args:
        lengths: Tokens expected of each job, shape (jobs,).
        num_lanes: Slots that the jobs are dealt onto.
        epsilon: What the makespan may exceed the best by, relative to it.
        limit: The makespan of a schedule that is known and at most twice the best; what is worse is not looked at.
    """
    unit = max(epsilon * limit / (2 * len(lengths)), 1e-9)
    if (num_lanes - 1) * math.log2(limit / unit + 1) > 62:  # more than a whole number tells apart
        return None
    order = np.argsort(-lengths, kind="stable")
    sizes = np.floor(lengths[order] / unit).astype(np.int64)
    steps = _reachable(sizes, num_lanes, int(limit / unit))
    return None if steps is None else _trace_back(steps, sizes, order, num_lanes)


Step = tuple[np.ndarray, np.ndarray]
"""For each load vector after a job: the vector that it came from, and the lane that took the job."""


def _reachable(sizes: np.ndarray, num_lanes: int, limit: int) -> list[Step] | None:
    """List the steps to all load vectors up to ``limit``; the last step is that of the best vector alone."""
    loads = np.zeros((1, num_lanes), dtype=np.int64)
    weights = (limit + 1) ** np.arange(num_lanes - 1, dtype=np.int64)
    steps: list[Step] = []
    kept = 0
    for size in sizes:
        parents = np.tile(np.arange(len(loads)), num_lanes)
        chosen = np.repeat(np.arange(num_lanes), len(loads))
        grown = loads[parents]
        grown[np.arange(len(grown)), chosen] += size
        within = np.flatnonzero(grown.max(axis=1) <= limit)
        grown = np.sort(grown[within], axis=1)
        # The last load is the rest of the total, so the others tell vectors apart.
        _, first = np.unique(grown[:, :-1] @ weights, return_index=True)
        loads = grown[first]
        steps.append((parents[within[first]], chosen[within[first]]))
        kept += len(loads)
        if kept > MAX_STATES or not len(loads):
            return None
    best = [int(loads[:, -1].argmin())]
    steps[-1] = (steps[-1][0][best], steps[-1][1][best])
    return steps


def _trace_back(steps: list[Step], sizes: np.ndarray, order: np.ndarray, num_lanes: int) -> np.ndarray:
    """Follow the best vector back to the start, then deal the jobs along the way."""
    state, path = 0, []
    for parents, chosen in reversed(steps):
        path.append(int(chosen[state]))
        state = int(parents[state])
    lanes = np.zeros(len(order), dtype=np.int64)
    sorted_lanes = [(0, lane) for lane in range(num_lanes)]
    for place, job, size in zip(reversed(path), order.tolist(), sizes.tolist(), strict=True):
        load, lane = sorted_lanes[place]
        lanes[job] = lane
        sorted_lanes[place] = (load + size, lane)
        sorted_lanes.sort()
    return lanes


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
