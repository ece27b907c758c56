"""What a rollout cost."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from lit_grpo.types import Clock, Key, Span

if TYPE_CHECKING:
    from lit_grpo.rollout.generator import Capacity, StepEvents


@dataclass
class RolloutStats:
    """What one rollout cost.

    ``num_preempted`` counts how often a completion had to leave its slot for want of memory, ``num_parked`` how often
    it did to wait for others at a probe or the end of a time slice. ``num_discarded`` tokens of earlier rollouts were
    decoded again in it, and ``num_continued`` went on. ``bubble_ratio`` is one minus the share of slot steps in which a
    slot was decoding. ``scheduling_s`` is the time spent neither in the generator nor in waiting for rewards. ``spans``
    says which slot decoded which completion when, by the steps of ``clock``, ``predicted`` how many tokens were
    expected of each before anything was decoded, and ``step_bound`` is the fewest steps that these lengths allow in so
    many slots.
    """

    num_steps: int = 0
    num_tokens: int = 0
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
    predicted: dict[Key, float] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def bubble_ratio(self) -> float:
        """1 - sum(active slots) / (slots x steps); the same in every run with the same seed."""
        return 1.0 - self.active_slot_steps / self.slot_steps if self.slot_steps else 0.0

    @property
    def timed_bubble_ratio(self) -> float:
        """1 - sum(active slots x step time) / (slots x rollout time)."""
        return 1.0 - self.active_slot_s / self.slot_s if self.slot_s else 0.0

    @property
    def decoded_s(self) -> float:
        """Seconds in the generator's steps."""
        return float(np.array(self.clock.ended).sum() - np.array(self.clock.began).sum())

    def add_step(self, events: StepEvents, capacity: Capacity, began_s: float, ended_s: float) -> None:
        """Add a step, with the seconds from the rollout's beginning to its own and to its end."""
        elapsed_s, clock = ended_s - began_s, self.clock
        self.num_steps += events.num_steps
        self.num_tokens += events.num_tokens
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

    def metrics(self) -> dict[str, float]:
        """Return the figures by the names they are logged under."""
        limit = self.clock.kv_limit
        budget = {} if limit is None else {"memory/kv_tokens_budget": float(limit)}
        return {
            **budget,
            "rollout/steps": float(self.num_steps),
            "rollout/tokens": float(self.num_tokens),
            "rollout/bubble_ratio": self.bubble_ratio,
            "rollout/set_asides": float(self.num_preempted),
            "rollout/parked": float(self.num_parked),
            "rollout/steps_over_bound": self.num_steps / max(self.step_bound, 1),
            "rollout/slots_in_use": self.num_tokens / max(self.num_steps, 1),
            "rollout/kv_tokens_peak": float(self.kv_tokens_peak),
            "perf/bubble_ratio": self.timed_bubble_ratio,
            "time/rollout_s": self.rollout_s,
            "time/reward_wait_s": self.reward_wait_s,
            "time/scheduling_s": self.scheduling_s,
        }
