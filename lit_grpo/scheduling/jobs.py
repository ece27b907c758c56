"""Jobs, the completions that plans order, and the lengths that plans use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lit_grpo.types import GroupKey, Key


@dataclass(frozen=True, slots=True)
class Job:
    """A completion to be decoded.

    ``prompt_tokens`` is the length of its prompt, and ``max_tokens`` the most tokens that are sampled of it.
    """

    key: Key
    prompt_tokens: int
    max_tokens: int

    @property
    def group(self) -> GroupKey:
        """``(prompt_id, visit)``: which jobs share a prompt."""
        return self.key[:2]


@dataclass(frozen=True)
class PredictedRollout:
    """Predicted and actual lengths of a rollout's jobs.

    ``said`` has, for each of ``points``, the total tokens predicted when a job had so many, float64, shape (jobs,
    points); NaN where it did not get there or nothing was said. ``totals`` are 0 of jobs that have not ended;
    ``groups`` says which share a prompt. Both are int64, shape (jobs,). ``keys`` are the jobs' own.
    """

    keys: tuple[Key, ...]
    points: tuple[int, ...]
    said: np.ndarray
    totals: np.ndarray
    groups: np.ndarray


class Lengths(Protocol):
    """Predicted lengths of completions."""

    @property
    def revision(self) -> int:
        """It changes when estimates have changed, so that a plan knows when to sort again."""
        ...

    @property
    def informative(self) -> bool:
        """True if they have been worth following; where not, plans fall back to first come."""
        ...

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        """Return the sampled tokens expected of each job in all, float64, shape (jobs,)."""
        ...


class FittedLengths(Lengths, Protocol):
    """Lengths that learn from the rollouts they are asked about.

    All lengths are of sampled tokens; what a completion observes counts in none. ``points`` are the numbers of tokens
    at which they want to see what the policy shows of a completion.
    """

    points: tuple[int, ...]

    def begin(self, jobs: Sequence[Job]) -> None:
        """A rollout of these jobs begins."""
        ...

    def observe(self, keys: Sequence[Key] | Sequence[GroupKey], num_tokens: int, features: np.ndarray) -> None:
        """The policy shows ``features`` (float32, a row a key) of jobs that have come to ``num_tokens``.

        With 0 tokens they are of prompts, and the keys those of groups.
        """
        ...

    def progress(self, num_tokens: Mapping[Key, int]) -> None:
        """Jobs that are active have come to so many tokens."""
        ...

    def finish(self, job: Job, num_tokens: int) -> None:
        """A job has come to its end."""
        ...

    def end(self, commit: bool) -> None:
        """The rollout is over: learn from it if ``commit``, and forget it.

        Until then none of it is learned or in a checkpoint. Commit when the update that used it has been made,
        so that a rollout that is repeated counts once; do not when it was aborted.
        """
        ...


class Followed:
    """Lengths that are followed whatever has been found of them: where each job has been looked at by itself.

    Args:
        lengths: Whose estimates they are.
    """

    informative = True

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths

    @property
    def revision(self) -> int:
        return self._lengths.revision

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        return self._lengths.estimate(jobs)


class NoLengths:
    """Nothing is known of the lengths."""

    points: tuple[int, ...] = ()
    revision = 0
    informative = False

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        """Return each job's limit."""
        return np.array([job.max_tokens for job in jobs], dtype=np.float64)

    def begin(self, jobs: Sequence[Job]) -> None:
        """Nothing is learned."""

    def observe(self, keys: Sequence[Key] | Sequence[GroupKey], num_tokens: int, features: np.ndarray) -> None:
        """Nothing is learned."""

    def progress(self, num_tokens: Mapping[Key, int]) -> None:
        """Nothing is learned."""

    def finish(self, job: Job, num_tokens: int) -> None:
        """Nothing is learned."""

    def end(self, commit: bool) -> None:
        """Nothing is learned."""
