"""A plan against a trace, with no model: the real rollout loop, on a generator that replays a trace."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lit_grpo.methods.plans import find_plan
from lit_grpo.plugins import Listener
from lit_grpo.rollout.buffer import RolloutBuffer
from lit_grpo.rollout.generator import Capacity, Observation, StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.drafts.price import StepCost
from lit_grpo.scheduling.jobs import FittedLengths
from lit_grpo.scheduling.layouts import Blocks, KVLayout
from lit_grpo.scheduling.ledger import RETRY_STEPS, RequestLedger
from lit_grpo.scheduling.plans.plan import Plan
from lit_grpo.tools.simulation.traces import Trace
from lit_grpo.types import Completion, Key, Prompt, Request, SamplingParams, Span, Trajectory

MOST_SLOTS = 2**20


@dataclass(frozen=True)
class Engine:
    """The simulated engine.

    Args:
        num_slots: Number of completions decoded at a time.
        kv_tokens: Tokens that the KV cache holds; None for no limit.
        layout: Layout of the KV cache.
    """

    num_slots: int
    kv_tokens: int | None = None
    layout: KVLayout = field(default_factory=Blocks)

    def check(self, trace: Trace) -> None:
        """Raise a ValueError where no plan could decode a trace."""
        if not 1 <= self.num_slots <= MOST_SLOTS:
            raise ValueError(f"The number of slots is {self.num_slots}: an engine has from 1 to {MOST_SLOTS:,}.")
        prompts = np.array([self.layout.prompt(tokens) for tokens in trace.prompt_tokens.tolist()])
        held = prompts + self.layout.completion(trace.prompt_tokens, trace.lengths, trace.max_tokens)
        if self.kv_tokens is not None and self.kv_tokens < held.max():
            raise ValueError(
                f"A KV budget of {self.kv_tokens} tokens is too small for the longest completion of {trace.name} "
                f"with its prompt: the smallest that works is {held.max()}."
            )


@dataclass(frozen=True)
class Schedule:
    """The schedule of a trace by a scheduling policy.

    Args:
        engine: The engine that decoded.
        spans: Spans of decoding, in steps, with the keys of the completions.
        ends: Step after which each completion is done, in the order of the trace, shape (completions,).
        segments: ``(start, end, active rows, KV tokens in the first step, and in the last)`` of stretches of steps;
            int64, shape (segments, 5).
        set_asides: Number of preemptions because KV tokens had run out.
        work: Rows of each stretch's steps together, drafted tokens among them, the tokens that these read, the drafted
            tokens, and whether a step waits for its drafts; int64, shape (segments, 4).
    """

    engine: Engine
    spans: Sequence[tuple[Key, Span]]
    ends: np.ndarray
    segments: np.ndarray
    set_asides: int
    work: np.ndarray

    @property
    def steps(self) -> int:
        """Decode steps until the last completion is done."""
        return int(self.ends.max())

    @property
    def bubble_ratio(self) -> float:
        """Share of the slots' steps in which they decode nothing."""
        start, end, active = self.segments.T[:3]
        return 1.0 - float((active * (end - start)).sum()) / (self.engine.num_slots * self.steps)

    @property
    def mean_completion(self) -> float:
        """Steps until a completion is done, on average."""
        return float(self.ends.mean())

    @property
    def peak_kv_tokens(self) -> int:
        """The most KV tokens that are held."""
        return int(self.segments[:, 3:].max())

    def kv_tokens_at(self, steps: np.ndarray) -> np.ndarray:
        """Return the KV tokens that are held in each of some steps, shape (steps,); even growth within a stretch."""
        rows = self.segments[np.maximum(np.searchsorted(self.segments[:, 0], steps, side="right") - 1, 0)]
        start, end, _, first, last = rows.T
        grown = (last - first) * (steps - start) / np.maximum(end - start - 1, 1)
        return np.where((start <= steps) & (steps < end), first + np.rint(grown), 0).astype(np.int64)

    def seconds(self, cost: StepCost) -> float:
        """Return the time that it takes: of device and host in turn where steps have drafts, else the longer."""
        start, end, active = self.segments.T[:3]
        rows, tokens, _, waits = self.work.T
        device = cost.step_s * (end - start) + cost.row_s * rows + cost.token_s * tokens
        host = (cost.wait_s + cost.wait_row_s * active) * (end - start)
        return float(np.where(waits, device + host, np.maximum(device, host)).sum())


class ReplayGenerator:
    """Decodes completions that come to known lengths, with tokens that mean nothing.

    A step of it is as many decode steps as pass until something can change: a completion ends, memory is entered again,
    or a request that memory has refused is offered again.

    Attributes:
        work: Of each step so far what :class:`Schedule` has.

    Args:
        engine: The engine that decodes.
        lengths: Tokens that each completion comes to.
    """

    version = 0
    feature_points: tuple[int, ...] = ()
    keeps_ended = one_by_one = False
    num_likeliest = 0

    def __init__(self, engine: Engine, lengths: dict[Key, int]) -> None:
        self._engine, self._lengths = engine, lengths
        self._rows: dict[Key, tuple[Request, int, int]] = {}  # with its tokens less the step, and the step of its end
        self._ends: list[tuple[int, Key]] = []  # a heap; of those that were taken away too
        self._num_waiting = len(lengths)
        self._step = 0
        self._has_stopped = False  # since the last step, so that others may fit with the next one
        self._context = 0  # tokens of the prompts and completions of the rows, less a step for each
        self.work: list[tuple[int, int, int, bool]] = []

    def capacity(self) -> Capacity:
        """Slots and KV memory, and how much of them is free."""
        engine = self._engine
        return Capacity(engine.num_slots, engine.num_slots - len(self._rows), engine.kv_tokens, 0, engine.layout)

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        """Admit requests."""
        for request in requests:
            offset = request.prefix.num_tokens - self._step
            self._rows[request.key] = (request, offset, self._lengths[request.key] - offset)
            self._context += len(request.prompt.token_ids) + offset
            heapq.heappush(self._ends, (self._lengths[request.key] - offset, request.key))
        self._num_waiting -= len(requests)

    def abort(self, keys: Iterable[Key]) -> list[Request]:
        """Hand requests back, with tokens that mean nothing as their prefixes."""
        stopped = [self._leave(key) for key in list(keys) if key in self._rows]
        self._num_waiting += len(stopped)
        self._has_stopped |= bool(stopped)
        return [request.after(Trajectory.blank(offset + self._step)) for request, offset, _ in stopped]

    def step(self) -> StepEvents:
        """Give every row its next tokens."""
        steps, rows = self._steps_until_change(), len(self._rows)
        read = steps * (self._context + rows * self._step) + rows * steps * (steps + 1) // 2
        beyond, num_drafted, num_read, waits = self._drafted()
        self.work.append((rows * steps + num_drafted, read + num_read, num_drafted, waits))
        self._step += steps
        events = StepEvents(rows, rows * steps + sum(beyond.values()), steps, num_drafted=num_drafted, beyond=beyond)
        events.observations = self._observe() if self.feature_points else []
        for key, num_tokens in beyond.items():
            request, offset, end = self._rows[key]
            self._rows[key] = (request, offset + num_tokens, end - num_tokens)
            self._context += num_tokens
            heapq.heappush(self._ends, (end - num_tokens, key))
        while self._ends and self._ends[0][0] <= self._step:
            end, key = heapq.heappop(self._ends)
            if self._is_current(end, key):
                request, _, _ = self._leave(key)
                events.finished.append(request.after(Trajectory.blank(self._lengths[key])).ended("stop"))
        return events

    def _drafted(self) -> tuple[dict[Key, int], int, int, bool]:
        """Return what rows get beyond a token, the drafted tokens, what these read, and whether the host waits."""
        return {}, 0, 0, False

    def _leave(self, key: Key) -> tuple[Request, int, int]:
        request, offset, end = self._rows.pop(key)
        self._context -= len(request.prompt.token_ids) + offset
        return request, offset, end

    def _observe(self) -> list[Observation]:
        """Report those that had come to a point before this step, and so have a token more by now."""
        reached: dict[int, list[Key]] = {}
        for key, (_, offset, _) in self._rows.items():
            reached.setdefault(self._step + offset - 1, []).append(key)
        points = [point for point in self.feature_points if point in reached]
        return [Observation(reached[point], point, np.zeros((len(reached[point]), 0))) for point in points]

    def _is_current(self, end: int, key: Key) -> bool:
        return key in self._rows and self._rows[key][2] == end

    def _steps_until_change(self) -> int:
        while not self._is_current(*self._ends[0]):
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self._step
        if self.feature_points:
            ends = np.array(self.feature_points) + 1
            has = np.array([offset for _, offset, _ in self._rows.values()]) + self._step
            ahead = np.append(ends, np.iinfo(np.int64).max)[np.searchsorted(ends, has, side="right")] - has
            steps = min(steps, int(ahead.min()))
        if self._engine.kv_tokens is None:
            return steps
        if self._num_waiting and len(self._rows) < self._engine.num_slots:
            steps = min(steps, 1 if self._has_stopped else RETRY_STEPS - self._step % RETRY_STEPS)
        self._has_stopped = False
        return self._steps_that_fit(steps)

    def _steps_that_fit(self, most: int) -> int:
        """Return how many steps, 1 to ``most``, go by before memory runs out."""
        requests = [request for request, _, _ in self._rows.values()]
        has = np.array([offset for _, offset, _ in self._rows.values()]) + self._step
        groups = {request.group: len(request.prompt.token_ids) for request in requests}
        prompts = np.array([groups[request.group] for request in requests])
        limits = np.array([request.sampling.max_tokens for request in requests])
        layout = self._engine.layout
        left = (self._engine.kv_tokens or 0) - sum(layout.prompt(tokens) for tokens in groups.values())
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            fits = layout.completion(prompts, has + middle, limits).sum() <= left
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Nothing is computed."""

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Nothing is kept."""


class _Recorder(Listener):
    """Notes when completions end, and what is held in between."""

    def __init__(self) -> None:
        self.ends: dict[Key, int] = {}
        self.segments: list[tuple[int, int, int, int, int]] = []

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        self._ledger = ledger

    def on_step(self, events: StepEvents) -> None:
        ledger, steps = self._ledger, events.num_steps
        held = ledger.kv_tokens_held(1 - steps), ledger.kv_tokens_held(0)
        self.segments.append((ledger.step - steps, ledger.step, events.num_active, *held))

    def on_completion(self, completion: Completion) -> None:
        self.ends[completion.request.key] = self._ledger.step


def simulate(
    trace: Trace,
    plan: str | Plan,
    engine: Engine,
    lengths: FittedLengths | None = None,
    points: Sequence[int] = (),
    generator: ReplayGenerator | None = None,
) -> Schedule:
    """Decode a trace, skipping from one event to the next.

    Args:
        trace: The completions to decode; all are queued from the start.
        plan: A plan, or the name of one that ships, with options or without, as in ``rollout.plan``.
        engine: The engine that decodes.
        lengths: Length estimates; none by default.
        points: Numbers of tokens after which completions wait at a probe, as in :class:`RolloutLoop`.
        generator: Decodes the trace on that engine; by default with a token per row and step.
    """
    engine.check(trace)
    recorder, buffer = _Recorder(), RolloutBuffer()
    generator = generator or ReplayGenerator(engine, dict(zip(trace.keys, trace.lengths.tolist(), strict=True)))
    buffer.open(_requests(trace))
    stats = RolloutLoop(generator, buffer, find_plan(plan), lengths, [recorder], points).run(buffer.ready)
    ends = np.array([recorder.ends[key] for key in trace.keys])
    segments, work = np.array(recorder.segments), np.array(generator.work)
    return Schedule(engine, stats.spans, ends, segments, stats.num_preempted, work)


def _requests(trace: Trace) -> list[Request]:
    """The completions of a trace as requests of prompts, whose tokens mean nothing where none were recorded."""
    texts = trace.texts or [((), ())] * len(trace)
    prompts = {
        key[:2]: Prompt(key[0], tuple(prompt) or (0,) * tokens, "", visit=key[1])
        for key, tokens, (prompt, _) in zip(trace.keys, trace.prompt_tokens.tolist(), texts, strict=True)
    }
    sampling = {limit: SamplingParams(max_tokens=limit) for limit in np.unique(trace.max_tokens).tolist()}
    limits = trace.max_tokens.tolist()
    return [Request(prompts[key[:2]], key[2], sampling[limit]) for key, limit in zip(trace.keys, limits, strict=True)]
