"""The rollout loop: admit, step, finish, reward, until every group is whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lit_grpo.rollout.buffer import GroupAssembly, job_of
from lit_grpo.rollout.length_reports import LengthReports
from lit_grpo.rollout.stats import RolloutStats
from lit_grpo.scheduling.bounds import slot_bound
from lit_grpo.scheduling.flight import InFlight
from lit_grpo.scheduling.jobs import LearntLengths, NoLengths, SampleValues
from lit_grpo.scheduling.plans.plan import Plan, make_plan
from lit_grpo.types import Prompt, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from lit_grpo.rewards import RewardRunner
    from lit_grpo.rollout.generator import Generator, StepEvents


class RolloutController:
    """Turns prompts into whole, rewarded groups with a generator, in the order of a plan.

    Args:
        generator: Decodes; started, and with weights loaded.
        rewards: Scores each group as soon as it is whole, while others still decode; ``None``
            leaves the rewards open.
        plan: The name of a plan (:data:`lit_grpo.scheduling.plans.plan.PLANS`).
        lengths: What the plan and the memory are told of lengths; it learns from what happens.
        on_step: Called with the number of tokens after each step, for progress displays.
    """

    def __init__(
        self,
        generator: Generator,
        rewards: RewardRunner | None = None,
        plan: str = "fcfs",
        lengths: LearntLengths | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        self.generator = generator
        self.rewards = rewards
        self.plan = plan
        self.lengths: LearntLengths = NoLengths() if lengths is None else lengths
        self.on_step = on_step

    def collect(
        self, prompts: Sequence[Prompt], num_generations: int, sampling: SamplingParams, seed: int
    ) -> tuple[list[RolloutGroup], RolloutStats]:
        """Sample ``num_generations`` completions of each prompt and reward them.

        Every admitted request finishes: nothing is dropped for being slow. On an exception (an interrupt
        among them) what is in flight is aborted, so that the generator can be used again.

        Returns:
            One group a prompt, in the order of ``prompts``, its rollouts in the order of ``sample_id``.
        """
        assembly = GroupAssembly(prompts, num_generations, sampling, seed)
        rollout = _Rollout(self, assembly)
        try:
            rollout.run()
        except BaseException:
            self.lengths.end(commit=False)
            self.generator.abort(assembly.in_flight)
            self.generator.release(prompts)
            raise
        decoded = time.perf_counter()
        if self.rewards is not None:
            self.rewards.gather()
        rollout.stats.rollout_s = time.perf_counter() - rollout.start
        rollout.stats.reward_wait_s = time.perf_counter() - decoded
        return assembly.groups(), rollout.stats


class _Rollout:
    """One rollout on its way."""

    def __init__(self, controller: RolloutController, assembly: GroupAssembly) -> None:
        self.start = time.perf_counter()
        self.stats = RolloutStats()
        self._generator, self._rewards = controller.generator, controller.rewards
        self._lengths, self._on_step = controller.lengths, controller.on_step
        self._assembly = assembly
        self._capacity = self._generator.capacity()
        self._in_flight = InFlight(self._capacity.slots, self._lengths, self._capacity.kv_tokens)
        self._plan: Plan = make_plan(controller.plan, self._lengths, self._capacity.slots)

    def run(self) -> None:
        """Decode until every group is whole."""
        self._begin()
        while not self._assembly.done:
            began = time.perf_counter()
            self._admit()
            admitted = time.perf_counter()
            events = self._generator.step()
            if not events.num_active and not events.set_aside:
                raise RuntimeError(f"The generator lost {len(self._assembly.in_flight)} requests that were in flight.")
            stepped = time.perf_counter()
            self._capacity = self._generator.capacity()
            self._take(events)
            self.stats.add_step(events, self._capacity, stepped - admitted)
            self.stats.scheduling_s += admitted - began + time.perf_counter() - stepped
            if self._on_step is not None:
                self._on_step(events.num_tokens)
        self._end()

    def _begin(self) -> None:
        """Tell everybody what is to come."""
        jobs = self._assembly.jobs
        self._lengths.begin(jobs)
        self._reports = LengthReports(self._lengths, jobs)
        groups = [(prompt.prompt_id, prompt.visit) for prompt in self._assembly.prompts]
        self.stats.predicted = SampleValues(
            groups, self._lengths.estimate(jobs).reshape(len(groups), self._assembly.num_generations)
        )
        self._plan.add(jobs)
        self._generator.expect(self._assembly.prompts)
        self.stats.scheduling_s = time.perf_counter() - self.start

    def _end(self) -> None:
        """Tell the last lengths, and add up."""
        began = time.perf_counter()
        self._reports.pass_on()
        self.stats.spans = self._in_flight.spans
        if self.stats.lengths:
            self.stats.step_bound = slot_bound(np.array(self.stats.lengths), self._capacity.slots)
        self.stats.scheduling_s += time.perf_counter() - began

    def _admit(self) -> None:
        """Fill the free slots, and let go of prompts whose last sample has been admitted."""
        free_slots = self._capacity.free_slots
        if not free_slots or not len(self._plan):
            return
        jobs = self._plan.admit(free_slots, self._in_flight.take)
        if jobs:
            requests, complete = self._assembly.admit(jobs)  # first, so that an interrupt aborts them
            self._generator.submit(requests, [self.stats.predicted[job.key] for job in jobs])
            self._generator.release(complete)
        elif not self._assembly.in_flight:
            plan = type(self._plan).__name__
            raise RuntimeError(f"The plan {plan} hands out nothing, and {len(self._plan)} requests wait.")

    def _take(self, events: StepEvents) -> None:
        """Learn what a step brought, and reward the groups that became whole."""
        for observation in events.observations:
            self._reports.observe(observation)
        for request in events.set_aside:
            self._in_flight.set_aside(request.key)
            self._assembly.set_aside(request)
            self._plan.set_aside(job_of(request))
        self._in_flight.step += 1
        self._in_flight.kv_tokens = self._capacity.kv_tokens
        for completion in events.finished:
            job = job_of(completion.request)
            self._in_flight.finish(job.key)
            self._reports.finish(job, completion.num_tokens, len(self._plan) > 0)
            self._plan.finish(job, completion.num_tokens)
            group = self._assembly.finish(completion)
            if group is not None and self._rewards is not None:
                self._rewards.submit(group)
