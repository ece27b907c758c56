"""What is in work at this moment: the only ledger of it, which plans, forecasts and displays read."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, overload

import numpy as np

from lit_grpo.scheduling.jobs import Job, LearntLengths
from lit_grpo.scheduling.layouts import KVLayout, smallest_budget
from lit_grpo.types import GroupKey, Key, Request, SamplePath, Span

RETRY_STEPS = 8
"""Where memory has refused a job, it is asked for again after so many steps, or once something has left."""
_MOMENTS = 16  # of the future at which memory is added up
_smallest_budget = lru_cache(4096)(smallest_budget)


class _Active(NamedTuple):
    """A job that is decoded: in which slot, since which step, and with how many tokens it began there."""

    request: Request
    job: Job
    slot: int
    begin: int
    had: int


class Flight:
    """The requests in work: those that wait, and those that are active, since when and in which slot.

    A job fits where the KV tokens that all active ones are expected to hold stay within ``kv_tokens`` at every moment
    to come: each grows by a token a step until it reaches its expected length, and prompts are held once a group.

    Args:
        num_slots: Jobs that are active at a time.
        lengths: What is thought of their lengths.
        layout: How keys and values lie in memory.
        kv_tokens: The KV tokens there is memory for; ``None`` for no limit.
    """

    def __init__(self, num_slots: int, lengths: LearntLengths, layout: KVLayout, kv_tokens: int | None) -> None:
        self.num_slots = num_slots
        self.kv_tokens = kv_tokens
        self.step = 0
        self.spans = SpanLog()
        self._lengths, self._layout = lengths, layout
        self._free = list(range(num_slots))[::-1]
        self._waiting: dict[Key, Request] = {}
        self._active: dict[Key, _Active] = {}  # in the order of admission
        self._waiting_of: Counter[GroupKey] = Counter()
        self._most_tokens = 0  # that the active jobs can come to hold
        self._refused_at: int | None = None

    # ---- what is in work --------------------------------------------------------------------------

    def __contains__(self, key: Key) -> bool:
        return key in self._active or key in self._waiting

    @property
    def active(self) -> list[Key]:
        """The keys of active requests, in the order of admission."""
        return list(self._active)

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        return len(self._free)

    @property
    def requests(self) -> list[Request]:
        """All requests in work, those that wait with the prefixes that they go on from."""
        return [*(active.request for active in self._active.values()), *self._waiting.values()]

    def waits(self, group: GroupKey) -> bool:
        """Whether a request of a group waits."""
        return self._waiting_of[group] > 0

    def progress(self) -> dict[Key, int]:
        """Return the tokens that each active job has."""
        return {key: self.step - active.begin + active.had for key, active in self._active.items()}

    # ---- comings and goings -----------------------------------------------------------------------

    def add(self, requests: Iterable[Request]) -> list[Job]:
        """Let requests wait, and return what plans know of them.

        Raises:
            ValueError: One of them is in work already.
        """
        jobs = []
        for request in requests:
            if (key := request.key) in self:
                raise ValueError(f"The request {key} is in work already; give each sample a path of its own.")
            self._waiting[key] = request
            self._waiting_of[request.group] += 1
            self.spans.group(request.group)
            jobs.append(Job(key, len(request.prompt.token_ids), request.sampling.max_tokens))
        return jobs

    def take(self, job: Job) -> bool:
        """Start a waiting job where it fits, else say ``False``. Where nothing is active, any job fits."""
        smallest = _smallest_budget(self._layout, job.prompt_tokens, job.max_tokens)
        request = self._waiting[job.key]
        scarce = self.kv_tokens is not None and self._active and self._most_tokens + smallest > self.kv_tokens
        if scarce and self._forecast(job, request.prefix.num_tokens) > (self.kv_tokens or 0):
            self._refused_at = self.step
            return False
        self._most_tokens += smallest
        del self._waiting[job.key]
        self._waiting_of[job.group] -= 1
        self._active[job.key] = _Active(request, job, self._free.pop(), self.step, request.prefix.num_tokens)
        return True

    def asks_memory_again(self) -> bool:
        """Whether it is time to offer a job again: nothing was refused, something has left, or time has passed."""
        return self._refused_at is None or self.step - self._refused_at >= RETRY_STEPS

    def request(self, key: Key) -> Request:
        """Return an active request."""
        return self._active[key].request

    def leave(self, key: Key) -> Job:
        """An active job is done, or is to stop; return it."""
        _, job, slot, begin, _ = self._active.pop(key)
        self._free.append(slot)
        self._most_tokens -= _smallest_budget(self._layout, job.prompt_tokens, job.max_tokens)
        self._refused_at = None
        if begin < self.step:
            self.spans.add(key, slot, begin, self.step)
        return job

    def wait(self, request: Request) -> Job:
        """An active job stops, and goes on later from its prefix; return it."""
        job = self.leave(request.key)
        self._waiting[job.key] = request
        self._waiting_of[job.group] += 1
        return job

    def drop(self, key: Key) -> Request:
        """A waiting request is wanted no more; return it."""
        request = self._waiting.pop(key)
        self._waiting_of[request.group] -= 1
        return request

    # ---- memory -----------------------------------------------------------------------------------

    def kv_tokens_held(self) -> int:
        """Return the KV tokens that the active jobs hold in the next step, prompts once a group."""
        return sum(self._held().values()) + self._prompts(active.job for active in self._active.values())

    def overflow(self) -> list[Key]:
        """Return those that have to leave for the next step to fit: the youngest; one is always left."""
        if self.kv_tokens is None or self._most_tokens <= self.kv_tokens:
            return []
        held, leaving = self._held(), []
        staying = list(self._active.values())
        total, prompts = sum(held.values()), self._prompts(active.job for active in staying)
        while total + prompts > self.kv_tokens and len(staying) > 1:
            leaving.append(staying.pop().job.key)
            total -= held[leaving[-1]]
            prompts = self._prompts(active.job for active in staying)
        return leaving

    def _held(self) -> dict[Key, int]:
        """What each active completion holds in the next step, which gives it a token more."""
        if not self._active:
            return {}
        jobs = [active.job for active in self._active.values()]
        tokens = np.minimum(np.array(list(self.progress().values())) + 1, _limits(jobs))
        held = self._layout.completion(_prompt_tokens(jobs), tokens, _limits(jobs))
        return dict(zip(self._active, held.tolist(), strict=True))

    def _prompts(self, jobs: Iterable[Job]) -> int:
        return sum({job.group: self._layout.prompt(job.prompt_tokens) for job in jobs}.values())

    def _forecast(self, job: Job, has: int) -> int:
        """Return the most KV tokens that the active jobs and ``job`` are expected to hold at a time."""
        jobs = [*(active.job for active in self._active.values()), job]
        progress = self.progress()
        self._lengths.progress(progress)
        had, limits = np.array([*progress.values(), has]), _limits(jobs)
        remaining = np.clip(np.ceil(self._lengths.estimate(jobs)), had + 1, limits) - had
        moments = np.unique(np.quantile(remaining, np.linspace(0, 1, _MOMENTS), method="nearest"))
        tokens = np.minimum(had + moments[:, None], limits).astype(np.int64)  # moments x jobs
        rooms = self._layout.completion(_prompt_tokens(jobs), np.maximum(tokens, 1), limits)
        held = np.where(remaining >= moments[:, None], rooms, 0).sum(1).max()
        return int(held) + self._prompts(jobs)


def _limits(jobs: Sequence[Job]) -> np.ndarray:
    return np.array([job.max_tokens for job in jobs])


def _prompt_tokens(jobs: Sequence[Job]) -> np.ndarray:
    return np.array([job.prompt_tokens for job in jobs])


class SpanLog(Sequence[tuple[Key, Span]]):
    """The spans of a rollout, in steps, with the completions that they are of; 20 bytes each."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, int] = {}  # numbered in the order in which they came
        self._paths: dict[SamplePath, int] = {}
        self._columns = [array("i") for _ in range(5)]

    def group(self, group: GroupKey) -> int:
        """Return the number of a group; a new one gets the next."""
        return self._groups.setdefault(group, len(self._groups))

    def add(self, key: Key, slot: int, start: int, end: int) -> None:
        """Note that a slot decoded a completion from step ``start`` to step ``end``."""
        row = (slot, start, end, self.group(key[:2]), self._paths.setdefault(key[2], len(self._paths)))
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, index: int) -> tuple[Key, Span]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[Key, Span]]: ...
    def __getitem__(self, index: int | slice) -> tuple[Key, Span] | list[tuple[Key, Span]]:
        """Return a span and the key of its completion."""
        if isinstance(index, slice):
            return self._spans(range(len(self))[index])
        return self._spans([index])[0]

    def _spans(self, rows: Sequence[int]) -> list[tuple[Key, Span]]:
        groups, paths = list(self._groups), list(self._paths)
        spans = []
        for row in rows:
            slot, start, end, group, path = (column[row] for column in self._columns)
            spans.append(((*groups[group], paths[path]), Span(slot, start, end, group)))
        return spans
