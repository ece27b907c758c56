"""A plan against a trace, with no model: steps, idle slots and KV tokens over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lit_grpo.scheduling.jobs import Lengths
from lit_grpo.scheduling.plans.plan import Plan
from lit_grpo.scheduling.replay.engine import NEVER, Engine, Workload
from lit_grpo.scheduling.replay.step_cost import StepCost
from lit_grpo.scheduling.replay.traces import Trace
from lit_grpo.types import Span


@dataclass(frozen=True)
class Fleet:
    """What decodes.

    Args:
        num_slots: Slots of each engine.
        kv_tokens: Tokens that the KV cache of each holds; None for no limit.
        num_engines: Engines, all with the same weights, which step together.
    """

    num_slots: int
    kv_tokens: int | None = None
    num_engines: int = 1

    def check(self, trace: Trace) -> None:
        """Raise a ValueError where no plan could decode a trace."""
        if self.num_slots < 1:
            raise ValueError(f"The number of slots is {self.num_slots}: an engine needs 1 or more.")
        if self.num_engines < 1:
            raise ValueError(f"The number of engines is {self.num_engines}: give 1 or more.")
        least = int((trace.prompt_tokens + trace.lengths).max())
        if self.kv_tokens is not None and self.kv_tokens < least:
            raise ValueError(
                f"A KV budget of {self.kv_tokens} tokens is too small for the longest completion of {trace.name} "
                f"with its prompt: the smallest that works is {least}."
            )


@dataclass(frozen=True)
class Schedule:
    """What a plan has made of a trace.

    Args:
        fleet: What decoded.
        spans: Who decoded when, in steps, slots counted through over all engines; shape (spans,).
        span_jobs: Number of each span's completion in the trace, shape (spans,).
        ends: Step after which each completion is done, shape (completions,).
        segments: ``(start, end, active rows, KV tokens in the first step)`` of each engine, where each row adds a
            token a step; int64, shape (segments, 4).
        set_asides: How often a completion was set aside because KV tokens had run out.
    """

    fleet: Fleet
    spans: list[Span]
    span_jobs: list[int]
    ends: np.ndarray
    segments: list[np.ndarray]
    set_asides: int

    @property
    def steps(self) -> int:
        """Decode steps until the last completion is done."""
        return int(self.ends.max())

    @property
    def bubble_ratio(self) -> float:
        """Share of the slots' steps in which they decode nothing."""
        busy = sum(span.end - span.start for span in self.spans)
        return 1.0 - busy / (self.fleet.num_slots * self.fleet.num_engines * self.steps)

    @property
    def mean_completion(self) -> float:
        """Steps until a completion is done, on average."""
        return float(self.ends.mean())

    @property
    def peak_kv_tokens(self) -> int:
        """The most KV tokens that one engine holds."""
        last = [rows[:, 3] + rows[:, 2] * (rows[:, 1] - rows[:, 0] - 1) for rows in self.segments if len(rows)]
        return int(max(tokens.max() for tokens in last))

    def kv_tokens_at(self, steps: np.ndarray) -> np.ndarray:
        """Return the KV tokens that all engines hold in each of some steps, int64, shape (steps,)."""
        total = np.zeros(len(steps), dtype=np.int64)
        for rows in self.segments:
            if len(rows):
                start, end, active, first = rows[np.maximum(np.searchsorted(rows[:, 0], steps, side="right") - 1, 0)].T
                total += np.where((start <= steps) & (steps < end), first + active * (steps - start), 0)
        return total

    def seconds(self, cost: StepCost) -> float:
        """Return the time of the engine that takes longest."""
        return max(cost.seconds(rows[:, 1] - rows[:, 0], rows[:, 2], rows[:, 3]) for rows in self.segments)


def simulate(trace: Trace, plans: Sequence[Plan], fleet: Fleet, lengths: Lengths) -> Schedule:
    """Decode a trace, skipping from one event to the next.

    A free slot is offered to its plan at the start and whenever a completion has finished. Where KV tokens are
    limited, a completion is admitted if it fits beside what is expected of those that decode; if they run out all the
    same, the youngest is set aside.

    Args:
        trace: What is decoded; everything waits from the start.
        plans: One plan for each engine, whose completions are dealt out by whole groups, each to the engine that has
            the fewest expected tokens so far; or a single plan, from which all engines take.
        fleet: What decodes.
        lengths: What is thought of the lengths, for dealing out and for the KV tokens.
    """
    fleet.check(trace)
    if len(plans) not in (1, fleet.num_engines):
        raise ValueError(f"There are {len(plans)} plans for {fleet.num_engines} engines: give 1, or one for each.")
    jobs = trace.jobs
    work = Workload(jobs, trace.group, trace.lengths, lengths.estimate(jobs))
    for plan, numbers in zip(plans, _deal(work, len(plans)), strict=True):
        plan.add([jobs[number] for number in numbers])
    engines = [Engine(work, fleet.num_slots, fleet.kv_tokens) for _ in range(fleet.num_engines)]
    pairs = [(engine, plans[number % len(plans)]) for number, engine in enumerate(engines)]
    return _schedule(fleet, engines, len(jobs), _run(work, pairs))


def _run(work: Workload, pairs: list[tuple[Engine, Plan]]) -> int:
    """Decode everything, and return the number of set-asides."""
    now, set_asides, changed = 0, 0, True
    while True:
        if changed:
            for engine, plan in pairs:
                _admit(engine, plan, now)
        for engine, plan in pairs:
            for job in engine.make_room(now):
                plan.set_aside(job)
                set_asides += 1
        then = min(engine.next_event(now) for engine, _ in pairs)
        if then == NEVER:
            break
        changed = False
        for engine, plan in pairs:
            engine.advance(now, then)
            for job in engine.finish(then):
                plan.finish(job, work.lengths[work.number[job.key]])
                changed = True
        now = then
    waiting = sum(len(plan) for plan in {id(plan): plan for _, plan in pairs}.values())
    if waiting:
        raise RuntimeError(f"The plan hands out nothing while {waiting} jobs wait and no slot decodes.")
    return set_asides


def _admit(engine: Engine, plan: Plan, now: int) -> None:
    """Let a plan fill the free slots of an engine."""
    before = engine.num_active
    admitted = plan.admit(engine.num_free, lambda job: engine.take(job, now))
    assert len(admitted) == engine.num_active - before, "a plan hands out what fits, and nothing else"


def _deal(work: Workload, num_plans: int) -> list[list[int]]:
    """Return the jobs of each plan: groups in the order of arrival, each to the plan with the fewest tokens."""
    if num_plans == 1:
        return [list(range(len(work.jobs)))]
    members: dict[int, list[int]] = {}
    for number, group in enumerate(work.group):
        members.setdefault(group, []).append(number)
    dealt: list[list[int]] = [[] for _ in range(num_plans)]
    loads = [0.0] * num_plans
    for numbers in members.values():
        least = loads.index(min(loads))
        dealt[least] += numbers
        loads[least] += math.fsum(work.expected[number] for number in numbers)
    return dealt


def _schedule(fleet: Fleet, engines: list[Engine], num_jobs: int, set_asides: int) -> Schedule:
    """Put together what the engines have noted."""
    ends = np.zeros(num_jobs, dtype=np.int64)
    spans: list[Span] = []
    span_jobs: list[int] = []
    for number, engine in enumerate(engines):
        spans += [span._replace(slot=span.slot + number * fleet.num_slots) for span in engine.spans]
        span_jobs += engine.span_jobs
    np.maximum.at(ends, span_jobs, np.array([span.end for span in spans], dtype=np.int64))
    segments = [np.array(engine.segments, dtype=np.int64).reshape(-1, 4) for engine in engines]
    return Schedule(fleet, spans, span_jobs, ends, segments, set_asides)
