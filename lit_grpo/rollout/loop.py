"""The rollout loop: admit, make room, step, tell, until the buffer can release what it is asked for; its costs."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_grpo.plugins import ROLLOUT_HOOKS, Answer, CoreListener, Listener, ask, overriding
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.scheduling.jobs import FittedLengths, NoLengths
from lit_grpo.scheduling.plans.plan import make_queues, slot_bound
from lit_grpo.types import AllGather, Clock, Key, Part, Span, alone, over_ranks

if TYPE_CHECKING:
    from lit_grpo.rollout.generator import Capacity, Decoder, Observation, StepEvents
    from lit_grpo.scheduling.plans.plan import Plan
    from lit_grpo.types import (
        Completion,
        GroupKey,
        Key,
        Prompt,
        Request,
        RolloutGroup,
        SamplePath,
        SamplingParams,
    )


AWAY_S = 0.001
"""How long the loop sleeps between two looks at its listeners, where all requests are away."""


class RolloutLoop:
    """Decodes what a buffer asks for, in the order of a plan.

    Args:
        generator: Decodes; started, and with weights loaded.
        buffer: Owns the groups; a buffer of its own by default.
        plan: Scheduling policy, as :func:`lit_grpo.scheduling.plans.plan.find_plan` takes it.
        lengths: Lengths that the plan and the memory use. They observe what is decoded, and are fitted to it once
            ``end(commit=True)`` is called.
        listeners: Hear what happens, in this order.
        points: Numbers of tokens, ascending, to which all completions are decoded before any continues, if there are
            more completions than slots (:func:`lit_grpo.scheduling.plans.plan.make_queues`); empty for none.
    """

    def __init__(
        self,
        generator: Decoder,
        buffer: RolloutBuffer | None = None,
        plan: str | Plan = "fcfs",
        lengths: FittedLengths | None = None,
        listeners: Sequence[Listener] = (),
        points: Sequence[int] = (),
    ) -> None:
        self.points = tuple(points)
        self.generator = generator
        self.buffer = RolloutBuffer() if buffer is None else buffer
        self.plan = plan
        self.lengths: FittedLengths = NoLengths() if lengths is None else lengths
        self.listeners = listeners

    def collect(
        self, prompts: Sequence[Prompt], num_generations: int | Sequence[int], sampling: SamplingParams, seed: int
    ) -> tuple[list[RolloutGroup], RolloutStats]:
        self.buffer.open(group_requests(prompts, num_generations, sampling, seed))
        stats = self.run(self.buffer.ready)
        return self.buffer.take(), stats

    def run(self, until: Callable[[int], bool]) -> RolloutStats:
        """Decode until ``until`` says so, which is told how many steps have been taken.

        What is unfinished then is taken out of the generator, and its requests stay in the buffer with their prefixes.
        On an exception (an interrupt among them) it is taken out too, and the buffer is as it was before; where it
        waits for all groups, it forgets them.

        Raises:
            ValueError: Nothing is left to decode before ``until`` is met.
        """
        self.buffer.begin()
        try:
            return self.decode(until)
        except BaseException:
            self.buffer.undo()
            raise

    def _begin(self) -> None:
        """Begin a rollout: find out who listens to what, and let the ledger know slots, memory, queues and lengths."""
        self._start = time.perf_counter()
        self._ledger = self.buffer.ledger
        self._renewal = self.buffer.renew(self.generator.version)
        self._hearing = {hook: overriding(self.listeners, hook) for hook in ROLLOUT_HOOKS}  # nobody else is called
        looks = [ask(listener, "observes") for listener in self._hearing["observes"]]
        observed = [point.num_tokens for point in looks if point is not None]
        self.generator.feature_points = tuple(sorted({*self.lengths.points, *self.points, *observed}))
        capacity = self._capacity = self.generator.capacity()
        traits = {trait for listener in self.listeners for trait in listener.traits}
        forks, self.generator.one_by_one = "forks" in traits, "by_progress" in traits
        self.generator.num_likeliest = max([ask(each, "likeliest") for each in self._hearing["likeliest"]], default=0)
        # Prompts are kept until their groups are whole: for forks, and once there are requests of several turns.
        self._keeps_prompts = self.generator.keeps_ended = forks
        points = self.points if self.points and len(self.buffer.unfinished) > capacity.slots else ()
        queues = make_queues(self.plan, self.lengths, capacity.slots, points)
        self._ledger.begin(capacity.slots, self.lengths, capacity.layout, capacity.kv_tokens, queues, points, forks)
        self.stats = RolloutStats(spans=self._ledger.spans, lengths=self._ledger.lengths)
        self.stats.num_discarded = self._renewal.num_discarded
        self.stats.num_continued = self._renewal.num_continued

    def decode(
        self, until: Callable[[int], bool], admits: Callable[[], bool] | None = None, closes: bool = True
    ) -> RolloutStats:
        """Decode as :meth:`run` does, and leave to the buffer whatever has come of it, on an exception too.

        Args:
            until: Says whether the run is over, after so many steps.
            admits: Says whether requests that wait may begin; by default they always may.
            closes: Whether groups that leave in parts are to be scored at the end.
        """
        self._begin()
        generator, ledger, stats = self.generator, self._ledger, self.stats
        try:
            away = {request.key: request for request in self.buffer.away} if ledger.awaiting_env else {}
            asked = [*self.buffer.unfinished, *away.values()]
            self._hear("on_rollout_start", ledger)
            for group in self._renewal.unscored:
                self._hear("on_group", group)
            self._enter(asked, away)
            generator.expect({request.group: request.prompt for request in asked}.values())
            stats.scheduling_s = time.perf_counter() - self._start
            while self._goes_on(until):
                began = time.perf_counter()
                self._admit(admits)
                admitted = time.perf_counter()
                events = generator.step()
                stepped = time.perf_counter()
                self._take(events)
                stats.add_step(events, self._capacity, admitted - self._start, stepped - self._start)
                stats.scheduling_s += admitted - began + time.perf_counter() - stepped
            self._end_run(closes)
        except BaseException:
            self.lengths.end(commit=False)
            self._put_back()
            self._hear("on_rollout_end", True)
            raise
        return stats

    def _goes_on(self, until: Callable[[int], bool]) -> bool:
        """Return whether there is more to decode, once listeners have asked for what they want."""
        ledger = self._ledger
        while True:
            is_idle = not (ledger.decoding or ledger.num_queued)
            for listener in self._hearing["on_idle"]:
                if is_idle or "lock_step" in listener.traits:
                    self._follow(self._hear("on_idle", listeners=[listener]))
            if until(self.stats.num_steps):
                return False
            if ledger.decoding or ledger.num_queued or not ledger.awaiting_env:
                return True
            time.sleep(AWAY_S)

    def _hear(self, hook: str, *arguments: Any, listeners: Sequence[Listener] | None = None) -> list[Any]:
        """Return what a hook of listeners answers, by default of all that have it; the core's own are not checked."""
        return [
            getattr(each, hook)(*arguments) if isinstance(each, CoreListener) else ask(each, hook, *arguments)
            for each in (self._hearing[hook] if listeners is None else listeners)
        ]

    # ---- what goes in -------------------------------------------------------------------------------

    def _enter(self, requests: Sequence[Request], away: Mapping[Key, Request]) -> None:
        """Let requests that have been asked wait for their turn, or for their environments first."""
        if not requests:
            return
        if any(request.sampling.max_observed for request in requests):
            self._keeps_prompts = self.generator.keeps_ended = True
        held = dict(away)
        for first in self._hear("on_requests", requests):
            held |= {request.key: request for request in first}
        self._ledger.enter(requests, held)

    def _admit(self, admits: Callable[[], bool] | None) -> None:
        """Fill the free slots, let go of prompts whose last sample has been admitted, and make room for a step.

        Raises:
            ValueError: Nothing is left to decode.
        """
        ledger, free_slots = self._ledger, self._capacity.free_slots
        if free_slots and ledger.num_queued and (admits is None or admits()):
            requests = ledger.admit(free_slots)
            if requests:
                self.generator.submit(requests, [ledger.expected[request.key] for request in requests])
                self._release(requests)
            elif not ledger.decoding:
                waiting = f"{ledger.num_queued} requests wait and no slot decodes"
                raise RuntimeError(f"The plan {self.plan} admits none, while {waiting}.")
        if not ledger.decoding:
            raise ValueError("All requests have ended, and the rollout waits for more: open more groups.")
        if not self._capacity.evicts and (leaving := ledger.overflow()):
            for request in self._stop(leaving):
                ledger.preempt(request)
            self.stats.num_preempted += len(leaving)

    def _release(self, requests: Iterable[Request]) -> None:
        """Let go of the prompts of these requests that no other needs."""
        if not self._keeps_prompts:
            prompts = {request.group: request.prompt for request in requests}
            self.generator.release([prompts[group] for group in prompts if not self._ledger.may_admit(group)])

    def _stop(self, keys: Iterable[Key]) -> list[Request]:
        """Take requests that decode out of the generator; return them in this order, with what they have come to."""
        keys = list(keys)
        if not keys:
            return []
        stopped = {request.key: request for request in self.generator.abort(keys)}
        self._capacity = self.generator.capacity()
        return [stopped[key] for key in keys]

    # ---- what comes out -----------------------------------------------------------------------------

    def _take(self, events: StepEvents) -> None:
        """Let the ledger take what a step brought, tell the listeners, and do what they ask for."""
        ledger = self._ledger
        if not events.num_active and not events.preempted:
            raise RuntimeError(f"The generator lost {len(ledger.decoding)} requests that were in flight.")
        self._capacity = self.generator.capacity()
        finished = ledger.take(events, self._capacity.kv_tokens)
        self.stats.num_preempted += len(events.preempted)
        answers = self._hear("on_step", events)
        for completion in finished:
            key, answer = completion.request.key, None
            for listener in self._hearing["on_turn"]:
                answer = ask(listener, "on_turn", completion)
                if answer is not None:
                    break
            if answer is None or not (key in answer.hold or any(request.key == key for request, _ in answer.resume)):
                answers += [answer, *self._end(completion)]
            else:  # a listener lets it go on, or holds it
                ledger.await_env(completion.request.after(completion))
                answers.append(replace(answer, hold=[other for other in answer.hold if other != key]))
        self._follow(answers)
        if ledger.points and events.observations:
            self._park(events.observations)

    def _park(self, observations: Iterable[Observation]) -> None:
        """Take out of their slots those that have come to a point, so that the plan can say which of all goes on."""
        ledger = self._ledger
        stopping = {each.num_tokens: each for each in observations if ledger.stops_at(each.num_tokens)}
        reached = {key: point for point, each in stopping.items() for key in each.keys}
        parked = self._stop(key for key in ledger.decoding if key in reached) if reached else []
        ledger.park([(request, reached[request.key]) for request in parked])
        self.stats.num_parked += len(parked)

    def _end(self, completion: Completion) -> list[Answer | None]:
        """Let listeners know that a completion has ended, and of its group, unless they ask for more of that."""
        entry = self._ledger.finish(completion)
        if self._ledger.points or entry.state == "awaiting_env":
            self._release([completion.request])
        self.buffer.finish(completion)
        answers = self._hear("on_completion", completion)
        for answer in answers:
            for request in () if answer is None else answer.submit:
                self.buffer.ask(request)
        return answers + self._close(completion.request.group)

    def _close(self, key: GroupKey) -> list[Answer | None]:
        """Let listeners know of a group where it is whole."""
        group = self.buffer.make_due(key)
        if group is None:
            return []
        if self._keeps_prompts:
            self.generator.release([group.prompt])
        return self._hear("on_group", group)

    def _follow(self, answers: Iterable[Answer | None]) -> None:
        """Do what listeners have asked for, in this order, and then what they ask for on hearing of that.

        Raises:
            ValueError: It asks for what cannot be.
        """
        ledger, buffer = self._ledger, self.buffer
        for answer in answers:
            if answer is None:
                continue
            if answer.hold:
                raise ValueError(f"A listener holds {answer.hold[0]}, which has not just come to the end of a turn.")
            further: list[Answer | None] = []
            self._resume(answer)
            for completion in answer.finish:
                self._away(completion.request.key, "finishes")
                further += self._end(completion)
            requests = [*answer.submit, *self._divide(answer.fork)]
            for request in requests:
                request.check_prefix()
                buffer.ask(request)
            if answer.open:
                buffer.open(answer.open)
                self.generator.expect({request.group: request.prompt for request in answer.open}.values())
            self._enter([*requests, *answer.open], {})
            for key in list(answer.drop):
                request = self._stop([key])[0] if key in ledger.decoding else ledger.request(key)
                if ledger.remove(key, request.prefix.num_sampled).state != "decoding":
                    self._release([request])
                self._hear("on_drop", request)
                further += self._close(request.group)
            self._follow(further)

    def _resume(self, answer: Answer) -> None:
        """Let requests that wait for their environments wait for a slot, to go on from their prefixes."""
        does = {"go_on": "lets go on", "again": "begins again with", "rewritten": "rewrites"}
        for request, how in answer.resume:
            prefix, before = request.prefix, self._away(request.key, does[how]).prefix
            goes_on = prefix.num_sampled == before.num_sampled and prefix.num_tokens >= before.num_tokens
            if how == "go_on" and not goes_on:
                raise ValueError(
                    f"A listener lets {request.key} go on from {prefix.num_tokens} tokens, of which "
                    f"{prefix.num_sampled} were sampled, but the request has {before.num_tokens}, of which "
                    f"{before.num_sampled} were: put what is observed after them, with prefix.followed_by(token_ids)."
                )
            request.check_prefix()
            self.stats.num_discarded += before.num_sampled - prefix.num_sampled if how == "again" else 0
            self._ledger.resume(request)

    def _away(self, key: Key, does: str) -> Request:
        """Return a request that waits for its environment; ``does`` is what a listener does with it."""
        if key not in self._ledger.awaiting_env:
            raise ValueError(f"A listener {does} {key}, which is not away; hold it first, at the end of a turn.")
        return self._ledger.request(key)

    def _divide(self, forks: Mapping[Key, Sequence[SamplePath]]) -> list[Request]:
        """Let requests that decode wait before all others; return those that begin with what each has come to."""
        for key in forks:
            if key not in self._ledger.decoding:
                raise ValueError(
                    f"A listener forks {key}, which is not being decoded; submit requests that begin with a part of "
                    "it, with prefix=trajectory.until(num_tokens)."
                )
        stopped = self._stop(forks)
        for request in stopped:
            self._ledger.preempt(request)
        return [replace(request, path=path) for request in stopped for path in forks[request.key]]

    # ---- the end ------------------------------------------------------------------------------------

    def _end_run(self, closes: bool) -> None:
        """Wait for the rewards, tell the last lengths, and add up."""
        self._put_back()
        if closes:
            for group in self.buffer.close():
                self._hear("on_group", group)
        decoded = time.perf_counter()
        self._hear("on_rollout_end", False)
        gathered = time.perf_counter()
        self._ledger.tell_lengths()
        if self.stats.lengths:
            self.stats.step_bound = slot_bound(np.array(self.stats.lengths), self._capacity.slots)
        self.stats.reward_wait_s = gathered - decoded
        self.stats.rollout_s = gathered - self._start
        self.stats.scheduling_s += time.perf_counter() - gathered

    def _put_back(self) -> None:
        """Take out of the generator what is unfinished; the ledger has its prefixes."""
        entries = self._ledger.end(self.generator.abort(self._ledger.decoding))
        prompts = {entry.job.group: entry.request.prompt for entry in entries}
        if self._keeps_prompts:
            prompts |= self.buffer.prompts
        if prompts:
            self.generator.release(prompts.values())


@dataclass
class RolloutStats:
    """Cost of one rollout.

    ``num_preempted`` counts how often a completion had to leave its slot for want of memory, ``num_parked`` how often
    it did to wait for others at a probe or the end of a time slice. ``num_discarded`` tokens of earlier rollouts were
    decoded again in it, and ``num_continued`` went on. ``num_drafted`` tokens were tried ahead, of which the
    ``accepted`` were kept, by source. ``bubble_ratio`` is one minus the share of slot steps in which a slot was
    decoding. ``scheduling_s`` is the time spent neither in the generator nor in waiting for rewards. ``spans`` says
    which slot decoded which completion when, by the steps of ``clock``, and ``step_bound`` is the fewest steps that
    these lengths allow in so many slots.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    num_preempted: int = 0
    num_parked: int = 0
    num_discarded: int = 0
    num_continued: int = 0
    rollout_s: float = 0.0
    reward_wait_s: float = 0.0
    scheduling_s: float = 0.0
    active_slot_steps: int = 0
    slot_steps: int = 0
    active_slot_s: float = 0.0
    slot_s: float = 0.0
    kv_tokens_peak: int = 0
    step_bound: int = 0
    lengths: array[int] = field(default_factory=partial(array, "q"))
    spans: Sequence[tuple[Key, Span]] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    messages: list[str] = field(default_factory=list)

    @property
    def bubble_ratio(self) -> float:
        """1 - sum(active slots) / (slots x steps); the same in every run with the same seed."""
        return 1.0 - self.active_slot_steps / self.slot_steps if self.slot_steps else 0.0

    @property
    def decoded_s(self) -> float:
        """Seconds in the generator's steps."""
        return float(np.array(self.clock.ended).sum() - np.array(self.clock.began).sum())

    def add_step(self, events: StepEvents, capacity: Capacity, began_s: float, ended_s: float) -> None:
        """Add a step, with the seconds from the rollout's beginning to its own and to its end."""
        elapsed_s, clock = ended_s - began_s, self.clock
        self.num_steps += events.num_steps
        self.num_tokens += events.num_tokens
        self.num_drafted += events.num_drafted
        self.accepted += events.accepted
        self.active_slot_steps += events.num_active * events.num_steps
        self.slot_steps += capacity.slots * events.num_steps
        self.active_slot_s += events.num_active * elapsed_s
        self.slot_s += capacity.slots * elapsed_s
        self.kv_tokens_peak = max(self.kv_tokens_peak, capacity.kv_tokens_in_use)
        clock.slots, clock.kv_limit = capacity.slots, capacity.kv_tokens
        clock.steps.append(self.num_steps)
        clock.began.append(began_s)
        clock.ended.append(ended_s)
        clock.kv_tokens.append(capacity.kv_tokens_in_use)
        clock.prefilled.append(events.prefilled_tokens)
        if events.message:
            self.messages.append(events.message)

    def metrics(self, all_gather: AllGather = alone) -> dict[str, float]:
        """Return the figures of all ranks by the names they are logged under, or of this rank alone by default.

        Counts are sums, and steps, times and peaks those of the rank with the most.
        """
        limit = self.clock.kv_limit
        budget = {} if limit is None else {"memory/kv_tokens_budget": Part(limit, "max")}
        drafted = {
            "rollout/drafted_tokens": Part(self.num_drafted),
            "rollout/accepted_tokens": Part(self.accepted.total()),
            "rollout/tokens_per_step": Part(self.num_tokens, "mean", max(self.active_slot_steps, 1)),
            **{
                f"rollout/accepted_per_step/{source}": Part(tokens, "mean", self.active_slot_steps)
                for source, tokens in self.accepted.items()
            },
        }
        parts = {
            **budget,
            **(drafted if self.num_drafted else {}),
            "rollout/steps": Part(self.num_steps, "max"),
            "rollout/tokens": Part(self.num_tokens),
            "rollout/bubble_ratio": Part(self.slot_steps - self.active_slot_steps, "mean", self.slot_steps),
            "rollout/set_asides": Part(self.num_preempted),
            "rollout/parked": Part(self.num_parked),
            "rollout/steps_over_bound": Part(self.num_steps, "mean", max(self.step_bound, 1)),
            "rollout/slots_in_use": Part(self.num_tokens - self.accepted.total(), "mean", max(self.num_steps, 1)),
            "rollout/kv_tokens_peak": Part(self.kv_tokens_peak, "max"),
            "perf/bubble_ratio": Part(self.slot_s - self.active_slot_s, "mean", self.slot_s),
            "time/rollout_s": Part(self.rollout_s, "max"),
            "time/reward_wait_s": Part(self.reward_wait_s, "max"),
            "time/scheduling_s": Part(self.scheduling_s, "max"),
        }
        return over_ranks(parts, all_gather)
