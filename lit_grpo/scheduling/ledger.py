"""Every unfinished request of a run: its state, what it has come to, and the memory of those that decode."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast, overload

import numpy as np

from lit_grpo.scheduling.jobs import FittedLengths, Job, NoLengths
from lit_grpo.scheduling.layouts import Blocks, KVLayout, smallest_budget
from lit_grpo.scheduling.plans.plan import Queue
from lit_grpo.types import Completion, GroupKey, Key, Request, SamplePath, Span, StepEvents

State = Literal["queued", "decoding", "awaiting_env", "at_probe"]
RETRY_STEPS = 8
"""Where memory has refused a job, it is asked for again every so many steps, and once something has left."""
_MOMENTS = 16  # of the future at which memory is added up
_PORTIONS = 4  # of a rollout, in which lengths learn what has come; each costs a millisecond or so, whatever it holds


@dataclass(slots=True, eq=False)
class Entry:
    """An unfinished request in a ledger.

    Attributes:
        request: The request, with the tokens that it had when it was admitted or left its slot last.
        job: What plans and lengths know of it.
        state: Whether it waits for a slot, decodes, waits for its environment, or waits at a probe for the others.
        stage: Number of the queue that it waits or decodes in, which is above 0 after a probe; None before it is queued
            for the first time in a rollout.
        sampled_before: Sampled tokens of it that another rollout or another request has counted.
        since: When it began to wait for its environment, in seconds of a clock.
        slot: The slot that decodes it.
        begin: The step at which it was admitted.
        number: How many requests had been admitted in the rollout before it was; -1 before it is for the first time.
    """

    request: Request
    job: Job
    state: State = "queued"
    stage: int | None = None
    sampled_before: int = 0
    since: float = 0.0
    slot: int = 0
    begin: int = 0
    number: int = -1


class RequestLedger:
    """All unfinished requests of a run by their groups, each in one state, from being asked for to their end.

    ``queued``
        Waits for a slot, in the order of the plan. Between two rollouts all requests are, but for the next kind.
    ``decoding``
        Has a slot of the generator.
    ``awaiting_env``
        Has sampled a turn, and waits for what it is to observe, such as a tool's answer. It has no slot.
    ``at_probe``
        Has come to a point where completions wait until all have come as far. It has no slot, and is admitted again in
        the order of the plan.

    A request is admitted where the KV tokens that all decoding ones are expected to hold stay within ``kv_tokens`` at
    every moment to come: each grows by a token a step until it reaches its expected length, and prompts are held once a
    group. Where a step brings a request another number of tokens, its events say so.

    Attributes:
        groups: The unfinished requests of each group by their paths, in the order in which they were asked.
        decoding: Those that decode, in the order of admission.
        awaiting_env: Those that wait for their environments, in the order in which they began to.
        num_slots: Requests that decode at a time.
        kv_tokens: The KV tokens there is memory for; None for no limit.
        forks: Whether further requests may begin within unfinished ones.
        step: Decode steps of this rollout so far.
        spans: Which slot decoded which completion of this rollout when.
        lengths: Tokens that this rollout has sampled of each completion that has left it.
        expected: Tokens that were expected of each completion of this rollout before anything of it was decoded.
    """

    def __init__(self) -> None:
        self.groups: dict[GroupKey, dict[SamplePath, Entry]] = {}
        self.begin(1, NoLengths(), Blocks(), None)

    def begin(
        self,
        num_slots: int,
        lengths: FittedLengths,
        layout: KVLayout,
        kv_tokens: int | None,
        queues: Sequence[Queue] = (),
        points: Sequence[int] = (),
        forks: bool = False,
    ) -> None:
        """Begin a rollout, in which requests decode that :meth:`enter` it.

        Args:
            num_slots: Requests that decode at a time.
            lengths: Says how long they will be, and is told each thing that happens once.
            layout: How keys and values lie in memory.
            kv_tokens: The KV tokens there is memory for; None for no limit.
            queues: What requests wait in: one queue, and one more for each of ``points``. By default first come.
            points: Numbers of tokens, ascending, to each of which all requests decode before any decodes on.
            forks: Whether further requests may begin within unfinished ones.
        """
        self.num_slots, self.kv_tokens, self.forks = num_slots, kv_tokens, forks
        self.points = tuple(points)
        self.step = 0
        self.spans = SpanLog()
        self.lengths: array[int] = array("q")
        self.expected: dict[Key, float] = {}
        self._lengths, self._layout = lengths, layout
        self._queues = list(queues) or [Queue(lengths, num_slots)]
        self._free = list(range(num_slots))[::-1]
        self.decoding: dict[Key, Entry] = {}
        self.awaiting_env: dict[Key, Entry] = {}
        for entries in self.groups.values():
            for entry in entries.values():
                if entry.state == "awaiting_env":
                    self.awaiting_env[entry.job.key] = entry
        self._decoding_of: Counter[GroupKey] = Counter()
        # Of those that decode, in their order: number, tokens less the step, prompt tokens, most tokens, observed ones.
        self._table = np.zeros((5, num_slots), dtype=np.int64)
        self._num_admitted = 0
        self._totals: np.ndarray | None = None  # expected of them in this step; None where that is to be asked again
        self._prompt_tokens = 0  # KV tokens of the prompts of those that decode
        self._most_tokens = 0  # that those that decode can come to hold
        self._fits: tuple[int | None, int] = (None, 0)  # KV tokens in which those that decode fit before that step
        self._refused = False
        self._observed: dict[int, tuple[list[Key], list[np.ndarray]]] = {}  # by number of tokens, not told yet
        self._ended: list[tuple[Job, int]] = []  # likewise, with the tokens that were sampled

    # ---- what is unfinished -------------------------------------------------------------------------

    def num_of(self, group: GroupKey) -> int:
        return len(self.groups.get(group, ()))

    def request(self, key: Key) -> Request:
        """Return an unfinished request with what it has come to; what decodes, as it was admitted."""
        return self.groups[key[:2]][key[2]].request

    @property
    def requests(self) -> list[Request]:
        """All unfinished requests: those that decode in the order of admission, then what waits, then what is away."""
        entries = [entry for group in self.groups.values() for entry in group.values()]
        waiting = (entry for entry in entries if entry.state in ("queued", "at_probe"))
        return [entry.request for entry in (*self.decoding.values(), *waiting, *self.awaiting_env.values())]

    @property
    def num_queued(self) -> int:
        """Number of requests that wait for a slot, those at a probe among them."""
        return sum(map(len, self._queues))

    @property
    def longest_env_wait_s(self) -> float:
        """Seconds for which a request has waited for its environment in this rollout, the longest of all that do."""
        since = [entry.since for entry in self.awaiting_env.values()]
        return time.monotonic() - min(since) if since else 0.0

    def progress(self) -> dict[Key, int]:
        """Return the tokens that have been sampled of each request that decodes."""
        _, offsets, _, _, observed = self._rows
        return dict(zip(self.decoding, (self.step + offsets - observed).tolist(), strict=True))

    def may_admit(self, group: GroupKey) -> bool:
        """Return whether a request of a group waits to be admitted, now or later at a probe or for its turn."""
        entries, last = self.groups.get(group, {}).values(), len(self.points)
        return any(entry.state != "decoding" or (entry.stage or 0) < last for entry in entries)

    def stops_at(self, num_tokens: int) -> bool:
        """Return whether requests with so many tokens wait at a probe now, which others have yet to reach."""
        if num_tokens not in self.points:
            return False
        return any(map(len, self._queues[: self.points.index(num_tokens) + 2]))

    def copy(self) -> RequestLedger:
        """Return the unfinished requests as they are, in a ledger of their own without a rollout."""
        copied = RequestLedger()
        copied.groups = {
            group: {path: Entry(each.request, each.job, each.state) for path, each in entries.items()}
            for group, entries in self.groups.items()
        }
        return copied

    # ---- changes of state ---------------------------------------------------------------------------

    def ask(self, request: Request, away: bool = False) -> None:
        """Note a request that is to decode, or its other prefix where it is no part of the rollout yet.

        Args:
            request: With the tokens that it goes on from.
            away: Whether it waits for its environment first, when the next rollout begins.

        Raises:
            ValueError: It is in work already.
        """
        entries = self.groups.setdefault(request.group, {})
        entry = entries.get(request.path)
        if entry is None:
            num_tokens, sampling = len(request.prompt.token_ids), request.sampling
            job = Job(request.key, num_tokens, sampling.max_tokens)
            entry = entries[request.path] = Entry(request, job)
        elif entry.stage is not None or request.key in self.awaiting_env:
            raise ValueError(_twice(request.key))
        entry.request, entry.state = request, "awaiting_env" if away else "queued"

    def enter(self, requests: Sequence[Request], away: Mapping[Key, Request]) -> None:
        """Let requests that have been asked take part in the rollout.

        Args:
            requests: Those asked; they are queued in this order, but for those away.
            away: Those that wait for their environments first, with what they begin with.
        """
        jobs: list[Job] = []
        for request in (*away.values(), *(request for request in requests if request.key not in away)):
            entry = self.groups[request.group][request.path]
            if entry.stage is not None and request.key not in away:
                raise ValueError(_twice(request.key))
            entry.sampled_before = entry.request.prefix.num_sampled
            if request.key in away:
                self.await_env(request)
            else:
                entry.stage = 0
            jobs.append(entry.job)
            self.spans.group(request.group)
        if jobs:
            self._lengths.begin(jobs)
            totals = self._lengths.estimate(jobs).tolist()
            self.expected |= {job.key: tokens for job, tokens in zip(jobs, totals, strict=True)}
        if len(jobs) > len(away):
            self._queues[0].add(jobs[len(away) :])

    def admit(self, free_slots: int) -> list[Request]:
        """Let queued requests decode, at most so many, in the order of the plan; return them.

        What memory has refused is offered to it again every ``RETRY_STEPS`` steps, and once something has left. Those
        that have passed fewer probes come first.
        """
        admitted: list[Request] = []
        if not free_slots or (self._refused and self.step % RETRY_STEPS):
            return admitted
        for queue in self._queues:
            for job in queue.admit(free_slots - len(admitted), self._admits):
                admitted.append(self.decoding[job.key].request)
            if len(queue):
                break
        return admitted

    def _admits(self, job: Job) -> bool:
        """Let a queued request decode where it fits, else say ``False``. Where nothing decodes, any request fits."""
        group = job.key[:2]
        entry = self.groups[group][job.key[2]]
        prefix = entry.request.prefix
        smallest = smallest_budget(self._layout, job.prompt_tokens, entry.request.sampling.room)
        had, observed = prefix.num_tokens, prefix.num_observed if prefix.num_tokens else 0
        row, totals = (had - self.step, job.prompt_tokens, entry.request.sampling.room, observed), None
        self._table[:, len(self.decoding)] = (self._num_admitted, *row)
        if self.kv_tokens is not None and self.decoding and self._most_tokens + smallest > self.kv_tokens:
            held, totals = self._forecast(job)
            if held > self.kv_tokens:
                self._refused = True
                return False
        self._totals = totals if not had and entry.number < 0 else None  # what has begun expects more by what it has
        self._fits = (None, 0)
        entry.state, entry.slot, entry.begin, entry.number = "decoding", self._free.pop(), self.step, self._num_admitted
        self._num_admitted += 1
        self.decoding[job.key] = entry
        self._most_tokens += smallest
        self._decoding_of[group] += 1
        if self._decoding_of[group] == 1:  # the first of its group
            self._prompt_tokens += self._layout.prompt(job.prompt_tokens)
        return True

    def take(self, events: StepEvents, kv_tokens: int | None) -> Sequence[Completion]:
        """Take what a step of the generator has brought; return what has finished, in the order of admission.

        What is shown of prompts, lengths are told at once; what is shown of completions, together with what has ended.

        Args:
            events: Of the step. What it has preempted is queued again.
            kv_tokens: The KV tokens there is memory for after it.
        """
        self.step += events.num_steps
        self.kv_tokens, self._totals = kv_tokens, None
        for request in events.preempted:
            self.preempt(request)
        if events.beyond:
            decoding = [*self.decoding]
            self._table[1, : len(decoding)] += np.array([events.beyond.get(key, 0) for key in decoding])
            self._fits = (None, 0)
        for each in events.observations:
            if each.num_tokens not in self._lengths.points:
                continue
            if each.num_tokens:
                keys, rows = self._observed.setdefault(each.num_tokens, ([], []))
                keys += cast("Sequence[Key]", each.keys)
                rows.append(each.features)
            else:
                self._lengths.observe(each.keys, 0, each.features)
        if len(events.finished) < 2:
            return events.finished
        finished = [completion for completion in events.finished if completion.request.key in self.decoding]
        return sorted(finished, key=lambda completion: self.decoding[completion.request.key].number)

    def _leave(self, key: Key) -> Entry:
        """Take a request out of its slot."""
        place = int(np.searchsorted(self._table[0, : len(self.decoding)], self.decoding[key].number))
        entry, group = self.decoding.pop(key), key[:2]
        job, num_left = entry.job, len(self.decoding)
        self._table[:, place:num_left] = self._table[:, place + 1 : num_left + 1]
        self._free.append(entry.slot)
        self._refused, self._totals = False, None
        self._most_tokens -= smallest_budget(self._layout, job.prompt_tokens, entry.request.sampling.room)
        self._decoding_of[group] -= 1
        if not self._decoding_of[group]:  # the last of its group
            self._prompt_tokens -= self._layout.prompt(job.prompt_tokens)
        if entry.begin < self.step:
            self.spans.add(key, entry.slot, entry.begin, self.step)
        self._queues[entry.stage or 0].left(job)
        return entry

    def preempt(self, request: Request) -> None:
        """Queue a request that decodes before all others that have come as far; it goes on later from its prefix."""
        entry = self._leave(request.key)
        entry.request, entry.state = request, "queued"
        self._queues[entry.stage or 0].put_first(entry.job)

    def park(self, reached: Sequence[tuple[Request, int]]) -> None:
        """Let requests that decode wait at the points to which they have come; lengths then say which goes on."""
        for request, point in reached:
            entry = self._leave(request.key)
            entry.request, entry.state, entry.stage = request, "at_probe", self.points.index(point) + 1
            self._queues[entry.stage].add([entry.job])
        if reached and not len(self._queues[0]):
            self.tell_lengths()

    def await_env(self, request: Request) -> None:
        """Let a request wait for its environment: one that has sampled a turn, or that enters the rollout so."""
        entry = self.groups[request.group][request.path]
        if entry.state == "decoding":
            self._leave(request.key)
        entry.state, entry.since = "awaiting_env", time.monotonic()
        self.awaiting_env[request.key] = entry
        self._replace(entry, request)

    def resume(self, request: Request) -> None:
        """Queue a request that waited for its environment before all others, to go on from its prefix.

        One that is queued for the first time in the rollout comes in the order of arrival.
        """
        entry = self.awaiting_env.pop(request.key)
        entry.state = "queued"
        self._replace(entry, request)
        if entry.stage is None:
            entry.stage = 0
            self._queues[0].add([entry.job])
        else:
            self._queues[entry.stage].put_first(entry.job)

    def remove(self, key: Key, num_sampled: int = 0) -> Entry:
        """Take a request that has come to so many tokens out of the ledger, in whatever state; return its entry."""
        entries = self.groups[key[:2]]
        entry = entries.pop(key[2])
        if not entries:
            del self.groups[key[:2]]
        if entry.state == "decoding":
            self._leave(key)
        elif entry.state == "awaiting_env":
            self.awaiting_env.pop(key, None)
        elif entry.stage is not None:
            self._queues[entry.stage].drop(entry.job)
        if num_sampled > entry.sampled_before:
            self.lengths.append(num_sampled - entry.sampled_before)
        return entry

    def finish(self, completion: Completion) -> Entry:
        """Take a request out that has come to its end; return its entry.

        Lengths are told of it with others; as long as requests are queued, these ask how long they will take.
        """
        entry = self.remove(completion.request.key, completion.num_sampled)
        self._ended.append((entry.job, completion.num_sampled))
        if len(self._ended) >= max(len(self.expected) // _PORTIONS, 1) and self.num_queued:
            self.tell_lengths()
        return entry

    def end(self, stopped: Iterable[Request]) -> list[Entry]:
        """End a rollout: what decoded waits with the prefixes of ``stopped``. Return all entries."""
        for request in stopped:
            self._leave(request.key).request = request
        entries: list[Entry] = []
        for group in self.groups.values():
            entries += group.values()
        for entry in entries:
            entry.stage = None
            entry.state = "awaiting_env" if entry.state == "awaiting_env" else "queued"
            if new := entry.request.prefix.num_sampled - entry.sampled_before:
                self.lengths.append(new)
        self.awaiting_env.clear()
        return entries

    def _replace(self, entry: Entry, request: Request) -> None:
        """Give an entry another prefix; what a shorter one has lost is sampled again, and counts again."""
        entry.request = request
        entry.sampled_before = min(entry.sampled_before, request.prefix.num_sampled)

    def tell_lengths(self) -> None:
        """Tell lengths what has come since the last time: what was observed, then what has ended, each once."""
        for num_tokens, (keys, rows) in sorted(self._observed.items()):
            self._lengths.observe(keys, num_tokens, np.concatenate(rows))
        for job, num_tokens in self._ended:
            self._lengths.finish(job, num_tokens)
        self._observed.clear()
        self._ended.clear()

    # ---- memory -------------------------------------------------------------------------------------

    @property
    def _rows(self) -> np.ndarray:
        return self._table[:, : len(self.decoding)]

    def kv_tokens_held(self, ahead: int = 1) -> int:
        """Return the KV tokens that the requests that decode hold in the next step, or in one ``ahead`` of the last."""
        return int(self._held(ahead).sum()) + self._prompt_tokens

    def overflow(self) -> list[Key]:
        """Return those that have to leave for the next step to fit: the youngest; one is always left.

        Some steps are looked at together, for in all of those that fit nothing has to be counted.
        """
        kv_tokens, (fitting, until) = self.kv_tokens, self._fits
        if kv_tokens is None or self._most_tokens <= kv_tokens or (fitting == kv_tokens and self.step < until):
            return []
        held = self._held(np.arange(1, RETRY_STEPS + 1)[:, None])
        num_fitting = int(np.searchsorted(held.sum(1), kv_tokens - self._prompt_tokens, "right"))
        self._fits = (kv_tokens, self.step + num_fitting)
        if num_fitting:
            return []
        staying, leaving = list(self.decoding.values()), []
        members, prompts = self._decoding_of.copy(), self._prompt_tokens
        total = int(held[0].sum())
        while total + prompts > kv_tokens and len(staying) > 1:
            job = staying.pop().job
            leaving.append(job.key)
            total -= int(held[0, len(staying)])
            members[job.group] -= 1
            prompts -= 0 if members[job.group] else self._layout.prompt(job.prompt_tokens)
        return leaving

    def _held(self, ahead: int | np.ndarray = 1) -> np.ndarray:
        """Return the KV tokens of each active completion in steps that give it a token more; shape (..., active)."""
        _, offsets, prompt_tokens, limits, _ = self._rows
        if not self.decoding:
            return limits
        return self._layout.completion(prompt_tokens, np.minimum(self.step + offsets + ahead, limits), limits)

    def _forecast(self, job: Job) -> tuple[int, np.ndarray]:
        """Return the most KV tokens that the requests that decode and one more are expected to hold at a time.

        What may yet be observed is not foreseen: jobs are taken out of their slots where it does not fit.

        Args:
            job: The one more, which stands after the others in the table.

        Returns:
            The KV tokens, and the sampled tokens that are expected of each.
        """
        if self._totals is None:
            self._lengths.progress(self.progress())
            totals = self._lengths.estimate([*(each.job for each in self.decoding.values()), job])
        else:
            totals = np.append(self._totals, self._lengths.estimate([job]))
        _, offsets, prompt_tokens, limits, observed = self._table[:, : len(totals)]
        had = self.step + offsets
        whole = np.minimum(np.maximum(np.ceil(totals) + observed, had + 1), limits).astype(np.int64)
        moments = np.sort(whole - had)[_moments(len(totals)), None]
        tokens = np.minimum(had + moments, limits)  # moments x jobs
        rooms = self._layout.completion(prompt_tokens, np.maximum(tokens, 1), limits)
        held = np.where(whole >= had + moments, rooms, 0).sum(1).max()
        own = 0 if self._decoding_of[job.group] else self._layout.prompt(job.prompt_tokens)
        return int(held) + self._prompt_tokens + own, totals


@cache
def _moments(num_jobs: int) -> np.ndarray:
    """Return which of so many jobs, in the order of their ends, end at the moments at which memory is added up."""
    shares = np.linspace(0, 1, _MOMENTS)
    return np.unique(np.quantile(np.arange(num_jobs), shares, method="nearest"))


def _twice(key: Key) -> str:
    return f"The request {key} is in work already; give each sample a path of its own."


class SpanLog(Sequence[tuple[Key, Span]]):
    """The spans of a rollout, in steps, with the completions that they are of; 20 bytes each."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, int] = {}  # numbered in the order in which they came
        self._paths: dict[SamplePath, int] = {}
        self._rows = array("i")  # of each span slot, start, end, and the numbers of its group and path

    def group(self, group: GroupKey) -> int:
        """Return the number of a group; a new one gets the next."""
        return self._groups.setdefault(group, len(self._groups))

    def add(self, key: Key, slot: int, start: int, end: int) -> None:
        group = self._groups.setdefault(key[:2], len(self._groups))
        self._rows.extend((slot, start, end, group, self._paths.setdefault(key[2], len(self._paths))))

    def __len__(self) -> int:
        return len(self._rows) // 5

    @overload
    def __getitem__(self, index: int) -> tuple[Key, Span]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[Key, Span]]: ...
    def __getitem__(self, index: int | slice) -> tuple[Key, Span] | list[tuple[Key, Span]]:
        """Return a span and the key of its completion."""
        groups, paths = list(self._groups), list(self._paths)
        chosen = range(len(self))[index]
        spans = []
        for row in [chosen] if isinstance(chosen, int) else chosen:
            slot, start, end, group, path = self._rows[5 * row : 5 * row + 5]
            spans.append(((*groups[group], paths[path]), Span(slot, start, end, group)))
        return spans[0] if isinstance(chosen, int) else spans
