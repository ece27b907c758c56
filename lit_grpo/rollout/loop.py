"""The rollout loop: admit, make room, step, tell, until the buffer can release what it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lit_grpo.plugins import ROLLOUT_HOOKS, Answer, Listener, overriding
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.stats import RolloutStats
from lit_grpo.scheduling.jobs import LearntLengths, NoLengths
from lit_grpo.scheduling.plans.plan import make_queues

if TYPE_CHECKING:
    from lit_grpo.rollout.generator import Decoder, Observation, StepEvents
    from lit_grpo.scheduling.ledger import Entry
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
        Trajectory,
    )


AWAY_S = 0.001
"""How long the loop sleeps between two looks at its listeners, where all requests are away."""


class RolloutLoop:
    """Decodes what a buffer asks for, in the order of a plan.

    Args:
        generator: Decodes; started, and with weights loaded.
        buffer: Owns the groups; a buffer of its own by default.
        plan: What :func:`lit_grpo.scheduling.plans.plan.find_plan` takes.
        lengths: What the plan and the memory are told of lengths; it is told what happens, and learns from it once its
            ``end(commit=True)`` is called.
        listeners: Hear what happens, in this order.
        points: Where there are more completions than slots, all are decoded to so many tokens before any goes on
            (:func:`lit_grpo.scheduling.plans.plan.make_queues`): numbers of tokens, ascending, or none to do without.
    """

    def __init__(
        self,
        generator: Decoder,
        buffer: RolloutBuffer | None = None,
        plan: str | Plan = "fcfs",
        lengths: LearntLengths | None = None,
        listeners: Sequence[Listener] = (),
        points: Sequence[int] = (),
    ) -> None:
        self.points = tuple(points)
        self.generator = generator
        self.buffer = RolloutBuffer() if buffer is None else buffer
        self.plan = plan
        self.lengths: LearntLengths = NoLengths() if lengths is None else lengths
        self.listeners = listeners

    def collect(
        self, prompts: Sequence[Prompt], num_generations: int | Sequence[int], sampling: SamplingParams, seed: int
    ) -> tuple[list[RolloutGroup], RolloutStats]:
        """Open a group of each prompt, all of one size or each of its own, run, and take what is released."""
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

    def decode(
        self, until: Callable[[int], bool], admits: Callable[[], bool] = lambda: True, closes: bool = True
    ) -> RolloutStats:
        """Decode as :meth:`run`, and leave to the buffer whatever has come of it, on an exception too.

        Args:
            until: See :meth:`run`.
            admits: Whether requests that wait may begin.
            closes: Whether groups that leave in parts are to be scored at the end.
        """
        renewal = self.buffer.renew(self.generator.version)
        run = LoopRun(self, admits)
        run.stats.num_discarded, run.stats.num_continued = renewal.num_discarded, renewal.num_continued
        try:
            run.decode(until)
            run.end(closes)
        except BaseException:
            run.abandon()
            raise
        return run.stats


class LoopRun:
    """One run of the loop: at each event it changes one entry of the ledger, and tells the listeners.

    Args:
        loop: Whose generator, buffer and listeners take part.
        admits: Whether requests that wait may begin.

    Attributes:
        stats: What the run has cost so far.
    """

    def __init__(self, loop: RolloutLoop, admits: Callable[[], bool]) -> None:
        self._start = time.perf_counter()
        self._admits = admits
        self._generator, self._buffer, self._ledger = loop.generator, loop.buffer, loop.buffer.ledger
        self._plan, self._lengths = loop.plan, loop.lengths
        self._hearing = {hook: overriding(loop.listeners, hook) for hook in ROLLOUT_HOOKS}  # nobody else is called
        observers = [(each, point) for each in self._hearing["observes"] if (point := each.observes) is not None]
        self._observers = [(point.num_tokens, listener.observe) for listener, point in observers]
        observed = {num_tokens for num_tokens, _ in self._observers}
        self._generator.feature_points = tuple(sorted({*loop.lengths.points, *loop.points, *observed}))
        capacity = self._capacity = self._generator.capacity()
        forks = any(listener.forks for listener in loop.listeners)
        # Prompts are kept until their groups are whole: for forks, and once there are requests of several turns.
        self._keeps_prompts = self._generator.keeps_ended = forks
        points = loop.points if loop.points and len(self._buffer.unfinished) > capacity.slots else ()
        queues = make_queues(loop.plan, self._lengths, capacity.slots, points)
        layout, kv_tokens = capacity.layout, capacity.kv_tokens
        self._ledger.begin(capacity.slots, self._lengths, layout, kv_tokens, queues, points, forks)
        self.stats = RolloutStats(spans=self._ledger.spans, predicted=self._ledger.expected)

    def decode(self, until: Callable[[int], bool]) -> None:
        """Decode until that is so."""
        ledger = self._ledger
        asked = [*self._buffer.unfinished, *self._buffer.away]
        away = {request.key: request for request in self._buffer.away}
        for listener in self._hearing["on_rollout_start"]:
            listener.on_rollout_start(ledger)
        self._tell(self._buffer.whole())
        self._enter(asked, away)
        self._generator.expect({request.group: request.prompt for request in asked}.values())
        self.stats.scheduling_s = time.perf_counter() - self._start
        while self._goes_on(until):
            began = time.perf_counter()
            self._admit()
            if not ledger.num_decoding:
                raise ValueError("All requests have ended, and the rollout waits for more: open more groups.")
            if not self._capacity.evicts:
                self._preempt(ledger.overflow())
            admitted = time.perf_counter()
            events = self._generator.step()
            stepped = time.perf_counter()
            if not events.num_active and not events.set_aside:
                raise RuntimeError(f"The generator lost {ledger.num_decoding} requests that were in flight.")
            self._capacity = self._generator.capacity()
            self._take(events)
            self.stats.add_step(events, self._capacity, admitted - self._start, stepped - self._start)
            self.stats.scheduling_s += admitted - began + time.perf_counter() - stepped

    def _goes_on(self, until: Callable[[int], bool]) -> bool:
        """Whether there is more to decode, once listeners have asked for what they want."""
        ledger = self._ledger
        while True:
            is_idle = not (ledger.num_decoding or ledger.num_queued)
            for listener in self._hearing["on_idle"]:
                if is_idle or listener.lock_step:
                    self._follow(listener.on_idle())
            if until(self.stats.num_steps):
                return False
            if ledger.num_decoding or ledger.num_queued or not ledger.num_awaiting_env:
                return True
            time.sleep(AWAY_S)

    def _tell(self, groups: Iterable[RolloutGroup]) -> list[Answer | None]:
        """Let listeners know of groups that are to be scored."""
        return [listener.on_group(group) for group in groups for listener in self._hearing["on_group"]]

    # ---- what goes in -------------------------------------------------------------------------------

    def _enter(self, requests: Sequence[Request], away: Mapping[Key, Request]) -> None:
        """Let requests that have been asked wait for their turn, or for their environments first."""
        if not requests:
            return
        if any(request.sampling.max_observed for request in requests):
            self._keeps_prompts = self._generator.keeps_ended = True
        hearing = self._hearing["on_requests"]
        held = {request.key: request for listener in hearing for request in listener.on_requests(requests)}
        self._ledger.enter(requests, {**away, **held})

    def _admit(self) -> None:
        """Fill the free slots, and let go of prompts whose last sample has been admitted."""
        ledger = self._ledger
        if not self._capacity.free_slots or not ledger.num_queued or not self._admits():
            return
        requests = ledger.admit(self._capacity.free_slots)
        if requests:
            self._generator.submit(requests, [ledger.expected[request.key] for request in requests])
            self._release(requests)
        elif not ledger.num_decoding:
            waiting = f"{ledger.num_queued} requests wait and no slot decodes"
            raise RuntimeError(f"The plan {self._plan} admits none, while {waiting}.")

    def _release(self, requests: Iterable[Request]) -> None:
        """Let go of the prompts of these requests that no other needs."""
        if not self._keeps_prompts:
            prompts = {request.group: request.prompt for request in requests}
            may_admit = self._ledger.may_admit
            self._generator.release([prompt for group, prompt in prompts.items() if not may_admit(group)])

    def _stop(self, keys: Iterable[Key]) -> list[Request]:
        """Take requests that decode out of the generator; return them in this order, with what they have come to."""
        keys = list(keys)
        if not keys:
            return []
        stopped = {request.key: request for request in self._generator.abort(keys)}
        self._capacity = self._generator.capacity()
        return [stopped[key] for key in keys]

    def _preempt(self, keys: Iterable[Key]) -> None:
        """Take the youngest out of a generator whose next step would not fit, and let them wait."""
        for request in self._stop(keys):
            self._ledger.preempt(request)
            self.stats.num_set_aside += 1

    # ---- what comes out -----------------------------------------------------------------------------

    def _take(self, events: StepEvents) -> None:
        """Learn what a step brought, and tell the listeners."""
        ledger = self._ledger
        ledger.step += events.num_steps
        ledger.kv_tokens = self._capacity.kv_tokens
        for request in events.set_aside:
            ledger.preempt(request)
            self.stats.num_set_aside += 1
        for each in events.observations:
            ledger.observe(each.keys, each.num_tokens, each.features)
            for num_tokens, observe in self._observers:
                if num_tokens == each.num_tokens:
                    observe(each)
        answers = [listener.on_step(events) for listener in self._hearing["on_step"]]
        for completion in ledger.in_order(events.finished):
            answers += self._end_turn(completion)
        for answer in answers:
            self._follow(answer)
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

    def _end_turn(self, completion: Completion) -> list[Answer | None]:
        """Take a request out of its slot: it is over, unless a listener lets it go on or holds it."""
        key = completion.request.key
        heard = (listener.on_turn(completion) for listener in self._hearing["on_turn"])
        answer = next((each for each in heard if each is not None), None)
        if answer is None or not (key in answer.hold or any(request.key == key for request in answer.go_on)):
            return [answer, *self._end(completion)]
        self._ledger.await_env(completion.request.after(completion))
        return [replace(answer, hold=[other for other in answer.hold if other != key])]

    def _end(self, completion: Completion) -> list[Answer | None]:
        """Let listeners know that a completion has ended, and of its group, unless they ask for more of that."""
        entry = self._ledger.remove(completion.request.key)
        self._ledger.finish(entry.job, completion.num_sampled)
        if self._ledger.points or entry.state == "awaiting_env":
            self._release([completion.request])
        self._count(entry, completion)
        self._buffer.finish(completion)
        answers = [listener.on_completion(completion) for listener in self._hearing["on_completion"]]
        for request in (each for answer in answers if answer is not None for each in answer.submit):
            self._buffer.ask(request)
        return answers + self._close(completion.request.group)

    def _count(self, entry: Entry, trajectory: Trajectory) -> None:
        """Note how many tokens of a completion this rollout has sampled."""
        if new := trajectory.num_sampled - entry.sampled_before:
            self.stats.lengths.append(new)

    def _close(self, key: GroupKey) -> list[Answer | None]:
        """Let listeners know of a group where it is whole."""
        group = self._buffer.make_due(key)
        if group is None:
            return []
        if self._keeps_prompts:
            self._generator.release([group.prompt])
        return self._tell([group])

    def _follow(self, answer: Answer | None) -> None:
        """Do what a listener has asked for.

        Raises:
            ValueError: It asks for what cannot be.
        """
        if answer is None:
            return
        if answer.hold:
            raise ValueError(f"A listener holds {answer.hold[0]}, which has not just come to the end of a turn.")
        answers: list[Answer | None] = []
        ledger, buffer = self._ledger, self._buffer
        self._resume(answer)
        for completion in answer.finish:
            self._away(completion.request.key, "finishes")
            answers += self._end(completion)
        further = [*answer.submit, *self._divide(answer.fork)]
        for request in further:
            request.check_prefix()
            buffer.ask(request)
        if answer.open:
            buffer.open(answer.open)
            self._generator.expect({request.group: request.prompt for request in answer.open}.values())
        self._enter([*further, *answer.open], {})
        for key in answer.drop:
            request = self._stop([key])[0] if ledger.is_decoding(key) else ledger.request(key)
            entry = ledger.remove(key)
            if entry.state != "decoding":
                self._release([request])
            self._count(entry, request.prefix)
            for listener in self._hearing["on_drop"]:
                listener.on_drop(request)
            answers += self._close(request.group)
        for each in answers:
            self._follow(each)

    def _resume(self, answer: Answer) -> None:
        """Let requests that wait for their environments wait for a slot, to go on from their prefixes."""
        for request in answer.go_on:
            prefix, before = request.prefix, self._away(request.key, "lets go on").prefix
            if prefix.num_sampled != before.num_sampled or prefix.num_tokens < before.num_tokens:
                raise ValueError(
                    f"A listener lets {request.key} go on from {prefix.num_tokens} tokens, of which "
                    f"{prefix.num_sampled} were sampled, but the request has {before.num_tokens}, of which "
                    f"{before.num_sampled} were: put what is observed after them, with prefix.followed_by(token_ids)."
                )
        for request in answer.again:
            before = self._away(request.key, "begins again with").prefix
            self.stats.num_discarded += before.num_sampled - request.prefix.num_sampled
        for request in answer.rewritten:
            self._away(request.key, "rewrites")
        for request in (*answer.go_on, *answer.again, *answer.rewritten):
            request.check_prefix()
            self._ledger.resume(request)

    def _away(self, key: Key, does: str) -> Request:
        """Return a request that waits for its environment; ``does`` is what a listener does with it."""
        if not self._ledger.awaits_env(key):
            raise ValueError(f"A listener {does} {key}, which is not away; hold it first, at the end of a turn.")
        return self._ledger.request(key)

    def _divide(self, forks: Mapping[Key, Sequence[SamplePath]]) -> list[Request]:
        """Let requests that decode wait before all others; return those that begin with what each has come to."""
        for key in forks:
            if not self._ledger.is_decoding(key):
                raise ValueError(
                    f"A listener forks {key}, which is not being decoded; submit requests that begin with a part of "
                    "it, with prefix=trajectory.until(num_tokens)."
                )
        stopped = self._stop(forks)
        for request in stopped:
            self._ledger.preempt(request)
        return [replace(request, path=path) for request in stopped for path in forks[request.key]]

    # ---- the end ------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Leave the generator as if nothing had been asked of it."""
        self._lengths.end(commit=False)
        self._put_back()
        for listener in self._hearing["on_rollout_end"]:
            listener.on_rollout_end(failed=True)

    def end(self, closes: bool) -> None:
        """Wait for the rewards, tell the last lengths, and add up."""
        self._put_back()
        if closes:
            self._tell(self._buffer.close())
        decoded = time.perf_counter()
        for listener in self._hearing["on_rollout_end"]:
            listener.on_rollout_end(failed=False)
        gathered = time.perf_counter()
        self._ledger.tell_lengths()
        self.stats.finish(self._capacity.slots)
        self.stats.reward_wait_s = gathered - decoded
        self.stats.rollout_s = gathered - self._start
        self.stats.scheduling_s += time.perf_counter() - gathered

    def _put_back(self) -> None:
        """Take out of the generator what is unfinished; the ledger has its prefixes."""
        entries = self._ledger.end(self._generator.abort(self._ledger.decoding))
        for entry in entries:
            self._count(entry, entry.request.prefix)
        prompts = {entry.job.group: entry.request.prompt for entry in entries}
        if self._keeps_prompts:
            prompts |= self._buffer.prompts
        if prompts:
            self._generator.release(prompts.values())
