"""The rollout loop: admit, make room, step, tell, until the buffer can release what it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from lit_grpo.plugins import Answer, Listener
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.length_reports import LengthReports
from lit_grpo.rollout.stats import RolloutStats
from lit_grpo.scheduling.flight import Flight, job_of
from lit_grpo.scheduling.jobs import Job, LearntLengths, NoLengths
from lit_grpo.scheduling.plans.plan import make_plan
from lit_grpo.scheduling.plans.probing import Probing
from lit_grpo.scheduling.plans.queue import Queue

if TYPE_CHECKING:
    from lit_grpo.rollout.generator import Decoder, Observation, StepEvents
    from lit_grpo.types import Completion, GroupKey, Key, Prompt, Request, RolloutGroup, SamplePath, SamplingParams


AWAY_S = 0.001
"""How long the loop sleeps between two looks at its listeners, where all requests are away."""


class RolloutLoop:
    """Decodes what a buffer asks for, in the order of a plan.

    Args:
        generator: Decodes; started, and with weights loaded.
        buffer: Owns the groups; a buffer of its own by default.
        plan: What :func:`lit_grpo.scheduling.plans.make_plan` takes: a name, with options or without.
        lengths: What the plan and the memory are told of lengths; it is told what happens, and learns from it once its
            ``end(commit=True)`` is called.
        listeners: Hear what happens, in this order.
        points: Where there are more completions than slots, all are decoded to so many tokens before any goes on
            (:class:`Probing`): numbers of tokens, ascending, or none to do without.
    """

    def __init__(
        self,
        generator: Decoder,
        buffer: RolloutBuffer | None = None,
        plan: str = "fcfs",
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
        rollout = _Rollout(self, admits)
        rollout.stats.num_discarded, rollout.stats.num_continued = renewal.num_discarded, renewal.num_continued
        try:
            rollout.run(until)
            rollout.end(closes)
        except BaseException:
            rollout.abandon()
            raise
        return rollout.stats


class _Rollout:
    """One run of the loop; where it ``goes_back`` to what has ended, prompts are kept until their groups are whole."""

    def __init__(self, loop: RolloutLoop, admits: Callable[[], bool]) -> None:
        self._start = time.perf_counter()
        self._admits = admits
        self._generator, self._buffer = loop.generator, loop.buffer
        self._lengths, self._listeners = loop.lengths, loop.listeners
        self._generator.feature_points = tuple(sorted({*loop.lengths.points, *loop.points}))
        capacity = self._capacity = self._generator.capacity()
        forks = any(listener.forks for listener in self._listeners)
        self._prompts: dict[GroupKey, Prompt] = {}  # of open groups that may be gone back to
        self._goes_back = self._generator.keeps_ended = forks  # or once there are requests of several turns
        self._flight = Flight(capacity.slots, self._lengths, capacity.layout, capacity.kv_tokens, forks)
        self._plan: Queue | Probing = make_plan(loop.plan, self._lengths, capacity.slots)
        self._probe: Probing | None = None
        requests, away = self._buffer.unfinished, self._buffer.away
        if loop.points and len(requests) > capacity.slots:
            self._plan = self._probe = Probing(loop.plan, self._lengths, capacity.slots, loop.points)
        self._requests, self._away = requests, away
        self._unplanned: set[Key] = set()  # of those away, the ones that the plan has not had
        self._begun_with: dict[Key, int] = {}  # tokens that were sampled before, or of another request
        self._reports = LengthReports(self._lengths)
        self.stats = RolloutStats(spans=self._flight.spans)

    def run(self, until: Callable[[int], bool]) -> None:
        """Decode until that is so."""
        for listener in self._listeners:
            listener.on_rollout_start(self._flight)
        self._tell(self._buffer.whole())
        self._submit(self._requests, self._away)
        asked = [*self._requests, *self._away]
        self._generator.expect({request.group: request.prompt for request in asked}.values())
        self.stats.scheduling_s = time.perf_counter() - self._start
        while self._goes_on(until):
            began = time.perf_counter()
            self._admit()
            if not self._flight.num_active:
                raise ValueError("All requests have ended, and the rollout waits for more: open more groups.")
            self._make_room()
            admitted = time.perf_counter()
            events = self._generator.step()
            stepped = time.perf_counter()
            if not events.num_active and not events.set_aside:
                raise RuntimeError(f"The generator lost {self._flight.num_active} requests that were in flight.")
            self._capacity = self._generator.capacity()
            self._take(events)
            self.stats.add_step(events, self._capacity, admitted - self._start, stepped - self._start)
            self.stats.scheduling_s += admitted - began + time.perf_counter() - stepped

    def _goes_on(self, until: Callable[[int], bool]) -> bool:
        """Whether there is more to decode, once listeners have asked for what they want."""
        while True:
            is_idle = not self._decodes
            for listener in self._listeners:
                if is_idle or listener.lock_step:
                    self._follow(listener.on_idle())
            if until(self.stats.num_steps):
                return False
            if self._decodes or not self._flight.num_away:
                return True
            time.sleep(AWAY_S)

    @property
    def _decodes(self) -> bool:
        """Whether anything is decoded, or could be."""
        return self._flight.num_active + self._flight.num_waiting > 0

    def _tell(self, groups: Iterable[RolloutGroup]) -> None:
        """Let listeners know of groups that are to be scored."""
        for group in groups:
            for listener in self._listeners:
                listener.on_group(group)

    def abandon(self) -> None:
        """Leave the generator as if nothing had been asked of it."""
        self._lengths.end(commit=False)
        self._put_back()
        for listener in self._listeners:
            listener.on_rollout_end(failed=True)

    # ---- what goes in -------------------------------------------------------------------------------

    def _submit(self, requests: Sequence[Request], away: Sequence[Request] = ()) -> None:
        """Let requests wait for their turn, or be away first; those ``away`` stay so."""
        asked = [*requests, *away]
        if any(request.sampling.max_observed for request in asked):
            self._goes_back = self._generator.keeps_ended = True
        if self._goes_back:
            self._prompts |= {request.group: request.prompt for request in asked}
        if not asked:
            return
        self._begun_with |= {each.key: each.prefix.num_sampled for each in asked if each.prefix.num_sampled}
        held = {request.key: request for listener in self._listeners for request in listener.on_requests(asked)}
        leaving = {request.key: request for request in away} | held
        for request in held.values():
            self._buffer.hold(request)
            self._forget_lost(request)
        self._flight.add_away(leaving.values())
        self._unplanned |= leaving.keys()
        self._expect([job_of(request) for request in leaving.values()])
        if jobs := self._flight.add([request for request in requests if request.key not in leaving]):
            self._expect(jobs)
            self._plan.add(jobs)

    def _expect(self, jobs: Sequence[Job]) -> None:
        """Note how long new jobs of the rollout are expected to be."""
        if not jobs:
            return
        self._lengths.begin(jobs)
        self._reports.add(jobs)
        self.stats.predicted |= zip((job.key for job in jobs), self._lengths.estimate(jobs).tolist(), strict=True)

    def _admit(self) -> None:
        """Fill the free slots, and let go of prompts whose last sample has been admitted."""
        flight = self._flight
        if not self._capacity.free_slots or not len(self._plan) or not flight.asks_memory_again():
            return
        if not self._admits():
            return
        jobs = self._plan.admit(self._capacity.free_slots, flight.take)
        if jobs:
            requests = [flight.request(job.key) for job in jobs]
            self._generator.submit(requests, [self.stats.predicted[job.key] for job in jobs])
            self._release(requests)
        elif not flight.num_active:
            plan = type(self._plan).__name__
            raise RuntimeError(
                f"The plan {plan} hands out nothing while {len(self._plan)} jobs wait and no slot decodes."
            )

    def _release(self, requests: Iterable[Request]) -> None:
        """Let go of the prompts of these requests that no other needs."""
        if self._goes_back:
            return
        prompts = {request.group: request.prompt for request in requests}
        for group in list(prompts):
            if self._flight.waits(group) or (self._probe is not None and self._probe.parks(group)):
                del prompts[group]
        self._generator.release(prompts.values())

    def _make_room(self) -> None:
        """Take the youngest away from a generator whose next step would not fit, and let them wait."""
        if not self._capacity.evicts:
            youngest = self._flight.overflow()
            stopped = {request.key: request for request in self._generator.abort(youngest)}
            self._set_aside(stopped[key] for key in youngest)

    def _set_aside(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._plan.set_aside(self._flight.wait(request))
            self._buffer.ask(request)
            self.stats.num_set_aside += 1

    # ---- what comes out -----------------------------------------------------------------------------

    def _take(self, events: StepEvents) -> None:
        """Learn what a step brought, and tell the listeners."""
        self._flight.step += events.num_steps
        self._flight.kv_tokens = self._capacity.kv_tokens
        self._set_aside(events.set_aside)
        for observation in events.observations:
            self._reports.observe(observation)
        answers = [listener.on_step(events) for listener in self._listeners]
        for completion in self._flight.in_order(events.finished):
            answers += self._end_turn(completion)
        for answer in answers:
            self._follow(answer)
        if self._probe is not None:
            self._park(self._probe, events.observations)

    def _park(self, probe: Probing, observations: Iterable[Observation]) -> None:
        """Take out of their slots those that have come to a point, so that the plan can say which of all goes on."""
        there = {each.num_tokens: each for each in observations if each.num_tokens in probe.points}
        stopping = [each for point, each in there.items() if probe.stops(point)]
        reached = {cast("Key", key): each.num_tokens for each in stopping for key in each.keys}
        keys = [key for key in self._flight.active if key in reached] if reached else []
        stopped = {request.key: request for request in self._generator.abort(keys)}
        for key in keys:
            probe.park(self._flight.wait(stopped[key]), reached[key])
            self._buffer.ask(stopped[key])
        if not keys:
            return
        self.stats.num_parked += len(keys)
        self._capacity = self._generator.capacity()
        if probe.all_begun:
            self._reports.pass_on()

    def _end_turn(self, completion: Completion) -> list[Answer | None]:
        """Take an active request out of its slot: it is over, unless a listener lets it go on or holds it."""
        key = completion.request.key
        heard = (listener.on_turn(completion) for listener in self._listeners)
        answer = next((each for each in heard if each is not None), None)
        going_on = [] if answer is None else [request for request in answer.go_on if request.key == key]
        if answer is None or not (going_on or key in answer.hold):
            job = self._flight.leave(key)
            self._plan.finish(job, completion.num_sampled)
            return [answer, *self._finish(job, completion)]
        so_far = completion.request.after(completion)
        self._plan.finish(self._flight.send_away(so_far), completion.num_sampled)
        self._buffer.hold(so_far)
        return [replace(answer, hold=[other for other in answer.hold if other != key])]

    def _finish(self, job: Job, completion: Completion) -> list[Answer | None]:
        """Take a completion that has ended, and its group unless a listener asks for more of it."""
        self._reports.finish(job, completion.num_sampled, len(self._plan) > 0)
        if self._probe is not None:
            self._release([completion.request])
        self._count(completion.request.key, completion.num_sampled)
        answers = [listener.on_completion(completion) for listener in self._listeners]
        for request in (each for answer in answers if answer is not None for each in answer.submit):
            self._buffer.ask(request)
        return answers + self._whole(self._buffer.finish(completion))

    def _count(self, key: Key, num_tokens: int) -> None:
        """Note how many tokens of a completion this rollout has sampled."""
        if new := num_tokens - self._begun_with.get(key, 0):
            self.stats.lengths.append(new)

    def _whole(self, group: RolloutGroup | None) -> list[Answer | None]:
        if group is None:
            return []
        if self._prompts.pop(group.key, None) is not None:
            self._generator.release([group.prompt])
        return [listener.on_group(group) for listener in self._listeners]

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
        for request in answer.go_on:
            self._come_back(request)
        for request in answer.again:
            self._begin_again(request)
        for request in answer.rewritten:
            self._away_request(request.key, "rewrites")
            self._wait_again(request)
        for completion in answer.finish:
            job = job_of(self._away_request(completion.request.key, "finishes"))
            self._flight.drop(job.key)
            self._release([completion.request])
            answers += self._finish(job, completion)
        further = [*answer.submit, *self._divide(answer.fork)]
        for request in further:
            request.check_prefix()
            self._buffer.ask(request)
        if answer.open:
            self._buffer.open(answer.open)
            self._generator.expect({request.group: request.prompt for request in answer.open}.values())
        self._submit([*further, *answer.open])
        for key in answer.drop:
            request = self._stop(key)
            for listener in self._listeners:
                listener.on_drop(request)
            answers += self._whole(self._buffer.drop(key))
        for each in answers:
            self._follow(each)

    def _divide(self, forks: Mapping[Key, Sequence[SamplePath]]) -> list[Request]:
        """Let active requests wait again, before all others; return those that begin with what each has come to."""
        for key in forks:
            if not self._flight.is_active(key):
                raise ValueError(
                    f"A listener forks {key}, which is not being decoded; submit requests that begin with a part of "
                    "it, with prefix=trajectory.until(num_tokens)."
                )
        stopped = {request.key: request for request in self._generator.abort(forks)}
        for key in forks:
            self._plan.set_aside(self._flight.wait(stopped[key]))
            self._buffer.ask(stopped[key])
        if forks:
            self._capacity = self._generator.capacity()
        return [replace(stopped[key], path=path) for key, paths in forks.items() for path in paths]

    def _come_back(self, request: Request) -> None:
        """Let a request that is away wait for a slot."""
        key, prefix = request.key, request.prefix
        before = self._away_request(key, "lets go on").prefix
        if prefix.num_sampled != before.num_sampled or prefix.num_tokens < before.num_tokens:
            raise ValueError(
                f"A listener lets {key} go on from {prefix.num_tokens} tokens, of which {prefix.num_sampled} were "
                f"sampled, but the request has {before.num_tokens}, of which {before.num_sampled} were: put what is "
                "observed after them, with prefix.followed_by(token_ids)."
            )
        self._wait_again(request)

    def _begin_again(self, request: Request) -> None:
        """Let a request that is away lose what it has sampled after its prefix, and wait for a slot."""
        before = self._away_request(request.key, "begins again with").prefix
        self.stats.num_discarded += before.num_sampled - request.prefix.num_sampled
        self._forget_lost(request)
        self._wait_again(request)

    def _forget_lost(self, request: Request) -> None:
        """Count all that a request samples to this rollout, where it has lost what it had before."""
        if request.prefix.num_sampled < self._begun_with.get(request.key, 0):
            self._begun_with[request.key] = request.prefix.num_sampled

    def _wait_again(self, request: Request) -> None:
        """Let a request that was away wait for a slot, to go on from its prefix."""
        request.check_prefix()
        job = self._flight.come_back(request)
        if request.key in self._unplanned:
            self._unplanned.remove(request.key)
            self._plan.add([job])
        else:
            self._plan.come_back(job)
        self._buffer.ask(request)

    def _away_request(self, key: Key, does: str) -> Request:
        """Return a request that is away, with what it has come to; ``does`` is what a listener does with it."""
        if not self._flight.is_away(key):
            raise ValueError(f"A listener {does} {key}, which is not away; hold it first, at the end of a turn.")
        return self._flight.away_request(key)

    def _stop(self, key: Key) -> Request:
        """Take a request out of work, and return it with what it has come to."""
        if self._flight.is_active(key):
            (request,) = self._generator.abort([key])
            self._plan.finish(self._flight.leave(key), request.prefix.num_sampled)
            self._capacity = self._generator.capacity()
        else:
            is_away = self._flight.is_away(key)
            request = self._flight.drop(key)
            if not is_away:
                self._plan.drop(job_of(request))
            self._release([request])
        self._count(key, request.prefix.num_sampled)
        return request

    # ---- the end ------------------------------------------------------------------------------------

    def _put_back(self) -> None:
        """Take out of the generator what is unfinished; the buffer has its prefixes."""
        prompts = self._prompts | {request.group: request.prompt for request in self._flight.requests}
        for request in self._generator.abort(self._flight.active):
            self._flight.wait(request)
            self._buffer.ask(request)
        for request in self._flight.requests:
            self._count(request.key, request.prefix.num_sampled)
        if prompts:
            self._generator.release(prompts.values())

    def end(self, closes: bool) -> None:
        """Wait for the rewards, tell the last lengths, and add up."""
        self._put_back()
        if closes:
            self._tell(self._buffer.close())
        decoded = time.perf_counter()
        for listener in self._listeners:
            listener.on_rollout_end(failed=False)
        gathered = time.perf_counter()
        self._reports.pass_on()
        self.stats.finish(self._capacity.slots)
        self.stats.reward_wait_s = gathered - decoded
        self.stats.rollout_s = gathered - self._start
        self.stats.scheduling_s += time.perf_counter() - gathered
