"""The rollout loop: admit, step, finish, reward, until every group is whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_grpo.types import Completion, Prompt, Request, Rollout, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from lit_grpo.rewards import RewardRunner
    from lit_grpo.rollout.generator import Generator
    from lit_grpo.scheduling.plans import Plan


@dataclass
class RolloutStats:
    """What one rollout cost.

    ``bubble_ratio`` is one minus the share of slot time in which a slot was decoding.
    """

    num_steps: int = 0
    num_tokens: int = 0
    rollout_s: float = 0.0
    reward_wait_s: float = 0.0
    active_slot_s: float = 0.0
    slot_s: float = 0.0

    @property
    def bubble_ratio(self) -> float:
        """1 - sum(active slots x step time) / (slots x rollout time)."""
        return 1.0 - self.active_slot_s / self.slot_s if self.slot_s else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the figures by the names they are logged under."""
        return {
            "rollout/steps": float(self.num_steps),
            "rollout/tokens": float(self.num_tokens),
            "rollout/bubble_ratio": self.bubble_ratio,
            "time/rollout_s": self.rollout_s,
            "time/reward_wait_s": self.reward_wait_s,
        }


class RolloutController:
    """Turns prompts into whole, rewarded groups with a generator, in the order of a plan.

    Args:
        generator: Decodes; started, and with weights loaded.
        rewards: Scores each group as soon as it is whole, while others still decode; ``None``
            leaves the rewards open.
        make_plan: Makes the plan of one rollout.
        on_step: Called with the number of tokens after each step, for progress displays.
    """

    def __init__(
        self,
        generator: Generator,
        rewards: RewardRunner | None,
        make_plan: Callable[[], Plan],
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        self.generator = generator
        self.rewards = rewards
        self.make_plan = make_plan
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
        plan, stats = self.make_plan(), RolloutStats()
        assembly = _Assembly(prompts, num_generations)
        plan.add(Request(p, sample_id, sampling, seed) for p in prompts for sample_id in range(num_generations))
        start = time.perf_counter()
        try:
            while not assembly.done:
                self._admit(plan, assembly)
                self._step(plan, assembly, stats)
        except BaseException:
            self.generator.abort(assembly.in_flight)
            self.generator.release(prompts)
            raise
        decoded = time.perf_counter()
        if self.rewards is not None:
            self.rewards.gather()
        stats.rollout_s = time.perf_counter() - start
        stats.reward_wait_s = time.perf_counter() - decoded
        return assembly.groups(), stats

    def _admit(self, plan: Plan, assembly: _Assembly) -> None:
        """Fill the free slots, and let go of prompts whose last sample has been admitted."""
        requests = plan.admit(self.generator.capacity().free_slots)
        if requests:
            complete = assembly.admit(requests)  # before they are submitted, so that an interrupt aborts them
            self.generator.submit(requests)
            self.generator.release(complete)
        elif not assembly.in_flight:
            raise RuntimeError(f"The plan {type(plan).__name__} hands out nothing, and {len(plan)} requests wait.")

    def _step(self, plan: Plan, assembly: _Assembly, stats: RolloutStats) -> None:
        """Decode one token of everything in flight, and reward the groups that became whole."""
        begin = time.perf_counter()
        events = self.generator.step()
        elapsed = time.perf_counter() - begin
        for completion in events.finished:
            plan.finish(completion)
            group = assembly.finish(completion)
            if group is not None and self.rewards is not None:
                self.rewards.submit(group)
        stats.num_steps += 1
        stats.num_tokens += events.num_tokens
        stats.active_slot_s += events.num_active * elapsed
        stats.slot_s += self.generator.capacity().slots * elapsed
        if self.on_step is not None:
            self.on_step(events.num_tokens)


class _Assembly:
    """Groups in the making: a group comes out once, when its last completion arrives."""

    def __init__(self, prompts: Sequence[Prompt], num_generations: int) -> None:
        self.num_generations = num_generations
        self.in_flight: set[tuple[str, int, int]] = set()
        self._prompts = {(p.prompt_id, p.visit): p for p in prompts}
        if len(self._prompts) != len(prompts):
            raise ValueError("A batch holds the same visit of a prompt twice; give its rows distinct prompt ids.")
        self._unadmitted = dict.fromkeys(self._prompts, num_generations)
        self._completions: dict[tuple[str, int], dict[int, Completion]] = {key: {} for key in self._prompts}
        self._groups: dict[tuple[str, int], RolloutGroup] = {}

    @property
    def done(self) -> bool:
        return len(self._groups) == len(self._prompts)

    def admit(self, requests: Sequence[Request]) -> list[Prompt]:
        """Note what is in flight; return the prompts of which no request is left to admit."""
        complete = []
        for request in requests:
            self.in_flight.add(request.key)
            key = request.key[:2]
            self._unadmitted[key] -= 1
            if not self._unadmitted[key]:
                complete.append(request.prompt)
        return complete

    def finish(self, completion: Completion) -> RolloutGroup | None:
        """Take a completion; return its group if it is whole now."""
        *_, sample_id = request_key = completion.request.key
        self.in_flight.remove(request_key)
        members = self._completions[request_key[:2]]
        members[sample_id] = completion
        if len(members) < self.num_generations:
            return None
        prompt = completion.request.prompt
        group = RolloutGroup(prompt, [Rollout(prompt, members[sample]) for sample in sorted(members)])
        self._groups[request_key[:2]] = group
        return group

    def groups(self) -> list[RolloutGroup]:
        """Return the whole groups in the order of the prompts."""
        return [self._groups[key] for key in self._prompts]
