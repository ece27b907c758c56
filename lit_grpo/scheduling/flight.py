"""What is in work at this moment: the only ledger of it, which plans, forecasts and displays read."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

import numpy as np

from lit_grpo.scheduling.jobs import Job, LearntLengths
from lit_grpo.scheduling.layouts import KVLayout, smallest_budget
from lit_grpo.types import Completion, GroupKey, Key, Request, SamplePath, Span

RETRY_STEPS = 8
"""Where memory has refused a job, it is asked for again every so many steps, and once something has left."""
_MOMENTS = 16  # of the future at which memory is added up


class _Active(NamedTuple):
    """A job that is decoded: in which slot, since which step, and from which prefix."""

    request: Request
    job: Job
    slot: int
    begin: int
    had: int  # tokens of its prefix, of which it observed some
    observed: int


class _Table(NamedTuple):
    """Columns of the active jobs, int64.

    They are the tokens of each less the step, those of its prompt, the most that it can have, and those it observed.
    """

    offsets: np.ndarray
    prompt_tokens: np.ndarray
    limits: np.ndarray
    observed: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[_Active]) -> _Table:
        """Make it."""
        columns = [(row.had - row.begin, row.job.prompt_tokens, row.job.room, row.observed) for row in rows]
        offsets, prompt_tokens, limits, observed = np.array(columns, dtype=np.int64).reshape(-1, 4).T
        return cls(offsets=offsets, prompt_tokens=prompt_tokens, limits=limits, observed=observed)


class Flight:
    """The requests in work: those that wait, those that are active, since when and in which slot, and those away.

    A request that is *away* has sampled a turn and waits for what it is to observe, such as a tool's answer: it has no
    slot, and no plan knows it.

    A job fits where the KV tokens that all active ones are expected to hold stay within ``kv_tokens`` at every moment
    to come: each grows by a token a step until it reaches its expected length, and prompts are held once a group.

    Args:
        num_slots: Jobs that are active at a time.
        lengths: What is thought of their lengths.
        layout: How keys and values lie in memory.
        kv_tokens: The KV tokens there is memory for; ``None`` for no limit.
        forks: Whether further requests may begin within those in work.
    """

    def __init__(
        self, num_slots: int, lengths: LearntLengths, layout: KVLayout, kv_tokens: int | None, forks: bool = False
    ) -> None:
        self.num_slots, self.forks = num_slots, forks
        self.kv_tokens = kv_tokens
        self.step = 0
        self.spans = SpanLog()
        self._lengths, self._layout = lengths, layout
        self._free = list(range(num_slots))[::-1]
        self._waiting: dict[Key, Request] = {}
        self._active: dict[Key, _Active] = {}  # in the order of admission
        self._away: dict[Key, Request] = {}
        self._away_since: dict[Key, float] = {}  # seconds of a clock
        self._waiting_of: Counter[GroupKey] = Counter()
        self._active_of: Counter[GroupKey] = Counter()
        self._away_of: Counter[GroupKey] = Counter()
        self._table: _Table | None = None  # of the active jobs; None where they have changed
        self._prompt_tokens = 0  # KV tokens of the prompts of active jobs
        self._most_tokens = 0  # that the active jobs can come to hold
        self._refused = False

    # ---- what is in work --------------------------------------------------------------------------

    def __contains__(self, key: Key) -> bool:
        return key in self._active or key in self._waiting or key in self._away

    @property
    def active(self) -> list[Key]:
        """The keys of active requests, in the order of admission."""
        return list(self._active)

    @property
    def num_active(self) -> int:
        """How many requests are active."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def away(self) -> list[Request]:
        """The requests that are away, with what they have come to."""
        return list(self._away.values())

    def away_request(self, key: Key) -> Request:
        """Return a request that is away."""
        return self._away[key]

    @property
    def num_away(self) -> int:
        """How many requests are away."""
        return len(self._away)

    @property
    def longest_away_s(self) -> float:
        """Seconds for which a request has been away in this rollout, the longest of all that are."""
        return time.monotonic() - min(self._away_since.values()) if self._away_since else 0.0

    def is_active(self, key: Key) -> bool:
        """Whether a request is active."""
        return key in self._active

    def is_away(self, key: Key) -> bool:
        """Whether a request is away."""
        return key in self._away

    @property
    def requests(self) -> list[Request]:
        """All requests in work, those that are not active with what they have come to."""
        active = [active.request for active in self._active.values()]
        return [*active, *self._waiting.values(), *self._away.values()]

    def in_order(self, completions: Sequence[Completion]) -> Sequence[Completion]:
        """Sort completions of active requests in the order of their admission."""
        if len(completions) < 2:
            return completions
        ranks = {key: rank for rank, key in enumerate(self._active)}
        return sorted(completions, key=lambda completion: ranks[completion.request.key])

    def waits(self, group: GroupKey) -> bool:
        """Whether a request of a group waits for a slot, or may do so later, since it is away."""
        return self._waiting_of[group] + self._away_of[group] > 0

    def num_of(self, group: GroupKey) -> int:
        """How many requests of a group are in work."""
        return self._waiting_of[group] + self._active_of[group] + self._away_of[group]

    def progress(self) -> dict[Key, int]:
        """Return the tokens that have been sampled of each active job."""
        return {key: self.step - each.begin + each.had - each.observed for key, each in self._active.items()}

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
            jobs.append(job_of(request))
        return jobs

    def add_away(self, requests: Iterable[Request]) -> None:
        """Take requests that were away when the last rollout ended."""
        for request in requests:
            self._away[request.key] = request
            self._away_since[request.key] = time.monotonic()
            self._away_of[request.group] += 1
            self.spans.group(request.group)

    def take(self, job: Job) -> bool:
        """Start a waiting job where it fits, else say ``False``. Where nothing is active, any job fits."""
        smallest = smallest_budget(self._layout, job.prompt_tokens, job.room)
        request = self._waiting[job.key]
        scarce = self.kv_tokens is not None and self._active and self._most_tokens + smallest > self.kv_tokens
        prefix = request.prefix
        if scarce and self._forecast(job, prefix.num_tokens, prefix.num_observed) > (self.kv_tokens or 0):
            self._refused = True
            return False
        self._most_tokens += smallest
        del self._waiting[job.key]
        self._waiting_of[job.group] -= 1
        self._active[job.key] = _Active(
            request, job, self._free.pop(), self.step, had=prefix.num_tokens, observed=prefix.num_observed
        )
        self._count(job, 1)
        return True

    def asks_memory_again(self) -> bool:
        """Whether it is time to offer a job again: nothing was refused, something has left, or time has passed."""
        return not self._refused or self.step % RETRY_STEPS == 0

    def request(self, key: Key) -> Request:
        """Return an active request."""
        return self._active[key].request

    def leave(self, key: Key) -> Job:
        """An active job is done, or is to stop; return it."""
        active = self._active.pop(key)
        job = active.job
        self._free.append(active.slot)
        self._most_tokens -= smallest_budget(self._layout, job.prompt_tokens, job.room)
        self._refused = False
        self._count(job, -1)
        if active.begin < self.step:
            self.spans.add(key, active.slot, active.begin, self.step)
        return job

    def wait(self, request: Request) -> Job:
        """An active job stops, and goes on later from its prefix; return it."""
        job = self.leave(request.key)
        self._waiting[job.key] = request
        self._waiting_of[job.group] += 1
        return job

    def send_away(self, request: Request) -> Job:
        """An active job has sampled a turn, and waits for what it is to observe; return it."""
        job = self.leave(request.key)
        self.add_away([request])
        return job

    def come_back(self, request: Request) -> Job:
        """A job that was away waits for a slot, to go on from the prefix of ``request``; return it."""
        self.drop(request.key)
        self._waiting[request.key] = request
        self._waiting_of[request.group] += 1
        return job_of(request)

    def drop(self, key: Key) -> Request:
        """A request that waits or is away is wanted no more; return it."""
        requests, counts = (self._away, self._away_of) if key in self._away else (self._waiting, self._waiting_of)
        request = requests.pop(key)
        self._away_since.pop(key, None)
        counts[request.group] -= 1
        return request

    # ---- memory -----------------------------------------------------------------------------------

    def _count(self, job: Job, change: int) -> None:
        """Note that a job has become active, or is no longer."""
        self._table = None
        self._active_of[job.group] += change
        if self._active_of[job.group] == max(change, 0):  # the first of its group, or none is left
            self._prompt_tokens += change * self._layout.prompt(job.prompt_tokens)

    @property
    def _rows(self) -> _Table:
        if self._table is None:
            self._table = _Table.of(list(self._active.values()))
        return self._table

    def kv_tokens_held(self, ahead: int = 1) -> int:
        """Return the KV tokens that the active jobs hold in the next step, or in one ``ahead`` of the last."""
        return int(self._held(ahead).sum()) + self._prompt_tokens

    def overflow(self) -> list[Key]:
        """Return those that have to leave for the next step to fit: the youngest; one is always left."""
        if self.kv_tokens is None or self._most_tokens <= self.kv_tokens:
            return []
        held, staying, leaving = self._held(), list(self._active.values()), []
        members, prompts = self._active_of.copy(), self._prompt_tokens
        total = int(held.sum())
        while total + prompts > self.kv_tokens and len(staying) > 1:
            job = staying.pop().job
            leaving.append(job.key)
            total -= int(held[len(staying)])
            members[job.group] -= 1
            prompts -= 0 if members[job.group] else self._layout.prompt(job.prompt_tokens)
        return leaving

    def _held(self, ahead: int = 1) -> np.ndarray:
        """What each active completion holds in a step, which gives it a token more; shape (active,)."""
        rows = self._rows
        if not len(rows.limits):
            return rows.limits
        tokens = np.minimum(self.step + rows.offsets + ahead, rows.limits)
        return self._layout.completion(rows.prompt_tokens, tokens, rows.limits)

    def _forecast(self, job: Job, has: int, observed: int) -> int:
        """Return the most KV tokens that the active jobs and ``job`` are expected to hold at a time.

        What may yet be observed is not foreseen: jobs are taken out of their slots where it does not fit.
        """
        self._lengths.progress(self.progress())
        jobs, rows = [*(active.job for active in self._active.values()), job], self._rows
        had, limits = np.append(self.step + rows.offsets, has), np.append(rows.limits, job.room)
        totals = np.ceil(self._lengths.estimate(jobs)) + np.append(rows.observed, observed)
        remaining = np.clip(totals, had + 1, limits) - had
        moments = np.unique(np.quantile(remaining, np.linspace(0, 1, _MOMENTS), method="nearest"))
        tokens = np.minimum(had + moments[:, None], limits).astype(np.int64)  # moments x jobs
        prompt_tokens = np.append(rows.prompt_tokens, job.prompt_tokens)
        rooms = self._layout.completion(prompt_tokens, np.maximum(tokens, 1), limits)
        held = np.where(remaining >= moments[:, None], rooms, 0).sum(1).max()
        own = 0 if self._active_of[job.group] else self._layout.prompt(job.prompt_tokens)
        return int(held) + self._prompt_tokens + own


def job_of(request: Request) -> Job:
    """Return what plans and lengths know of a request."""
    sampling = request.sampling
    return Job(request.key, len(request.prompt.token_ids), sampling.max_tokens, sampling.max_observed)


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
