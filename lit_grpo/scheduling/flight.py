"""How many tokens of KV memory a prompt and a completion take, in the pieces that they are stored in."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import overload

import numpy as np

from lit_grpo.scheduling.jobs import Job, LearntLengths
from lit_grpo.types import Key, Span

_FIRST_PIECE = 64
_PROMPT_STEP = 16


def piece_sizes(max_tokens: int) -> list[int]:
    """Return the sizes of a completion's pieces, ``max_tokens`` in all: each twice as long as all before it.

    A completion has as many pieces as its tokens need, so it takes less than three times its tokens, and never more
    than ``max_tokens``; pieces cost operations at each decode step, so there are few.

    Example:
        >>> piece_sizes(400)
        [64, 128, 208]
    """
    sizes, total = [], 0
    while total < max_tokens:
        sizes.append(min(max(_FIRST_PIECE, 2 * total), max_tokens - total))
        total += sizes[-1]
    return sizes


def prompt_room(num_tokens: int) -> int:
    """Return the KV tokens that a prompt takes: its length, rounded up by less than a quarter (or to 16).

    Prompts of equal room are stored and read together.
    """
    step = _PROMPT_STEP
    while num_tokens > 8 * step:
        step *= 2
    return -(-num_tokens // step) * step


class SpanLog(Sequence[tuple[Key, Span]]):
    """The spans of a rollout, in steps, with the completions that they are of; 20 bytes each."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], int] = {}  # numbered in the order in which they came
        self._names: list[tuple[str, int]] = []
        self._columns = [array("i") for _ in range(5)]

    def group(self, group: tuple[str, int]) -> int:
        """Return the number of a group, ``(prompt_id, visit)``; a new one gets the next."""
        number = self._groups.setdefault(group, len(self._names))
        if number == len(self._names):
            self._names.append(group)
        return number

    def add(self, key: Key, slot: int, start: int, end: int) -> None:
        """Note that a slot decoded a completion from step ``start`` to step ``end``."""
        row = (slot, start, end, self.group(key[:2]), key[2][0])
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, index: int) -> tuple[Key, Span]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[Key, Span]]: ...
    def __getitem__(self, index: int | slice) -> tuple[Key, Span] | list[tuple[Key, Span]]:
        """Return a span and the key of its completion, ``(prompt_id, visit, path)``."""
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        slot, start, end, group, sample = (column[index] for column in self._columns)
        return (*self._names[group], (sample,)), Span(slot, start, end, group)


_MOMENTS = 16  # of the future at which memory is added up


class InFlight:
    """The jobs that are active: since when, in which slot, and whether another would fit beside them.

    A job fits where the KV tokens that all of them are expected to hold stay within ``kv_tokens`` at every moment to
    come: each job grows by a token a step until it reaches its expected length, prompts are held once a group.

    Args:
        num_slots: Jobs that are active at a time.
        lengths: What is thought of their lengths.
        kv_tokens: The KV tokens there is memory for; ``None`` for no limit.
    """

    def __init__(self, num_slots: int, lengths: LearntLengths, kv_tokens: int | None) -> None:
        self.kv_tokens = kv_tokens
        self.step = 0
        self.spans = SpanLog()
        self._lengths = lengths
        self._free = list(range(num_slots))[::-1]
        self._active: dict[
            Key, tuple[Job, int, int, int]
        ] = {}  # the job, its slot, the step it began at, its tokens then
        self._most_tokens = 0  # that the active jobs can come to hold
        self._aside: dict[Key, int] = {}
        self._members: Counter[tuple[str, int]] = Counter()

    def __len__(self) -> int:
        return len(self._active)

    def progress(self) -> dict[Key, int]:
        """Return the tokens that each active job has."""
        return {key: self.step - begin + had for key, (_, _, begin, had) in self._active.items()}

    def take(self, job: Job) -> bool:
        """Start a job where it fits, else say ``False``. Where nothing is active, any job fits."""
        most = self._most_tokens + smallest_budget(job.prompt_tokens, job.max_tokens)
        if (
            self.kv_tokens is not None
            and self._active
            and most > self.kv_tokens
            and self._forecast(job) > self.kv_tokens
        ):
            return False
        self._most_tokens = most
        self._active[job.key] = (job, self._free.pop(), self.step, self._aside.pop(job.key, 0))
        self.spans.group(job.group)
        self._members[job.group] += 1
        return True

    def finish(self, key: Key) -> None:
        """A job is done."""
        job, slot, begin, _ = self._active.pop(key)
        self._free.append(slot)
        self._most_tokens -= smallest_budget(job.prompt_tokens, job.max_tokens)
        self._members[job.group] -= 1
        self.spans.add(key, slot, begin, self.step)

    def set_aside(self, key: Key) -> None:
        """A job is stopped, and goes on later with the tokens that it has."""
        _, _, begin, had = self._active[key]
        self._aside[key] = self.step - begin + had
        self.finish(key)

    def _forecast(self, job: Job) -> int:
        """Return the most KV tokens that the active jobs and ``job`` are expected to hold at a time."""
        jobs = [*(active[0] for active in self._active.values()), job]
        progress = self.progress()
        self._lengths.progress(progress)
        has = np.array([*progress.values(), self._aside.get(job.key, 0)])
        limits = np.array([job.max_tokens for job in jobs])
        remaining = np.clip(np.ceil(self._lengths.estimate(jobs)), has + 1, limits) - has
        moments = np.unique(np.quantile(remaining, np.linspace(0, 1, _MOMENTS), method="nearest"))
        tokens = np.minimum(has + moments[:, None], limits)  # moments x jobs
        held = np.where(remaining >= moments[:, None], _rooms(tokens, limits), 0).sum(1).max()
        prompts = {job.group: prompt_room(job.prompt_tokens) for job in jobs}
        return int(held) + sum(prompts.values())


def _rooms(tokens: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """The KV tokens that the pieces of completions take; their limits go along the last axis."""
    rooms = np.empty_like(tokens)
    for limit in np.unique(limits):
        ends = np.cumsum(piece_sizes(int(limit)))
        column = limits == limit
        rooms[:, column] = ends[np.searchsorted(ends, tokens[:, column])]
    return rooms


@cache
def smallest_budget(prompt_tokens: int, max_tokens: int) -> int:
    """Return the fewest KV tokens that one completion can be decoded in."""
    return prompt_room(prompt_tokens) + max_tokens
