"""Estimates that stand in a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_grpo.scheduling.jobs import FittedLengths, Job, NoLengths
from lit_grpo.tools.simulation.traces import Trace, noisy


class KnownLengths(NoLengths):
    """Length estimates that are given beforehand and do not change.

    Args:
        jobs: All jobs that will be asked for.
        estimates: Tokens expected of each, shape (jobs,); what exceeds a job's limit, or is NaN, counts as the limit.
        informative: Whether plans should follow them.
    """

    def __init__(self, jobs: Sequence[Job], estimates: np.ndarray, informative: bool = True) -> None:
        limits = np.array([job.max_tokens for job in jobs])
        values = np.where(np.isnan(estimates), limits, np.clip(estimates, 1.0, limits)).tolist()
        self._estimates = {job.key: value for job, value in zip(jobs, values, strict=True)}
        self.informative = informative

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        """Return the estimates, float64, shape (jobs,)."""
        return np.array([self._estimates[job.key] for job in jobs], dtype=np.float64)


def lengths_of(trace: Trace, noise: float | None, seed: int = 0) -> FittedLengths:
    """Return a trace's lengths with errors.

    Args:
        trace: The trace with the true lengths.
        noise: Spread of the errors' logarithm; 0 for the true lengths, None where nothing is to be known.
        seed: Seed of the errors.
    """
    return NoLengths() if noise is None else KnownLengths(trace.jobs, noisy(trace.lengths, noise, seed))
