"""Rollouts and simulations for benchmarks: the one place that starts a rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_grpo.methods.plans import find_plan
from lit_grpo.plugins import Listener
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.scheduling.jobs import FittedLengths, Job, NoLengths
from lit_grpo.tools.simulation.known import KnownLengths, lengths_of
from lit_grpo.tools.simulation.simulator import Engine, Schedule, simulate
from lit_grpo.types import Key, Prompt, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from lit_grpo.rollout.generator import Generator, StepEvents
    from lit_grpo.rollout.loop import RolloutStats
    from lit_grpo.rollout.slots.rows import SampledStep
    from lit_grpo.tools.simulation.traces import Trace

__all__ = [
    "ForetoldLengths",
    "KnownLengths",
    "Stepped",
    "kv_parts",
    "kv_tokens",
    "lengths_of",
    "replayed",
    "roll_out",
    "slots",
]


class ForcedGenerator(SlotGenerator):
    """SlotGenerator whose completions end after a given number of tokens, whatever is sampled.

    Args:
        lengths: The tokens of each completion.
        num_slots: As in SlotGenerator.
        packed_weights: Likewise.
    """

    def __init__(self, lengths: dict[Key, int], num_slots: int, packed_weights: bool = False) -> None:
        super().__init__(num_slots, packed_weights=packed_weights, drafts="off")
        self.lengths = lengths

    def _finish(self, step: SampledStep, tokens_B: np.ndarray, events: StepEvents) -> None:
        """Take the tokens of completions that are as long as they should be for end tokens, and no others."""
        lengths_B = np.array([self.lengths[request.key] for request in self._rows.requests])
        ends_B = self._rows.counts[: len(lengths_B)] >= lengths_B
        super()._finish(step, np.where(ends_B, self._eos_ids[0], -1), events)


class ForetoldLengths(NoLengths):
    """Estimates that are given beforehand."""

    informative = True

    def __init__(self, expected: dict[Key, float]) -> None:
        self.expected = expected

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        """Return the estimates."""
        return np.array([self.expected[job.key] for job in jobs])


class Stepped(Listener):
    """Calls a function with the number of tokens after each step."""

    def __init__(self, call: Callable[[int], None]) -> None:
        self._call = call

    def on_step(self, events: StepEvents) -> None:
        self._call(events.num_tokens)


def slots(
    policy: Any,
    tokenizer: Any,
    num_slots: int,
    lengths: dict[Key, int] | None = None,
    feature_points: tuple[int, ...] = (),
    packed_weights: bool = False,
) -> SlotGenerator:
    """Return a SlotGenerator that holds the policy's weights, and tries no drafts.

    Args:
        policy: Decodes.
        tokenizer: Its tokenizer.
        num_slots: As in SlotGenerator.
        lengths: The tokens after which each completion ends, whatever is sampled; by default its policy decides.
        feature_points: As in SlotGenerator.
        packed_weights: Likewise.
    """
    generator = (
        SlotGenerator(num_slots, packed_weights=packed_weights, drafts="off")
        if lengths is None
        else ForcedGenerator(lengths, num_slots, packed_weights)
    )
    generator.feature_points = feature_points
    generator.start(PolicySpec(policy, tokenizer))
    generator.load_weights(policy.named_parameters(), 0)
    return generator


def roll_out(
    generator: Generator,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: SamplingParams,
    plan: str = "fcfs",
    lengths: FittedLengths | None = None,
    on_step: Callable[[int], None] | None = None,
    points: Sequence[int] = (),
) -> tuple[list[RolloutGroup], RolloutStats]:
    """Sample ``group_size`` completions of each prompt with a generator that is ready; return groups and statistics.

    ``on_step`` is called after each step with its number of tokens; ``points`` are as in :class:`RolloutLoop`.
    """
    listeners = [] if on_step is None else [Stepped(on_step)]
    loop = RolloutLoop(generator, plan=find_plan(plan), lengths=lengths, listeners=listeners, points=points)
    return loop.collect(prompts, group_size, sampling, seed=0)


def kv_tokens(generator: SlotGenerator) -> tuple[int, int]:
    """Return the KV tokens that there is memory for at this moment, and those in it that are read: the used ones."""
    rows = generator._rows
    if not rows.requests:
        return generator.capacity().kv_tokens_in_use, 0
    prompts = {request.key[:2]: len(request.prompt.token_ids) for request in rows.requests}
    return generator.capacity().kv_tokens_in_use, int(rows.counts[: len(rows.requests)].sum()) + sum(prompts.values())


def kv_parts(generator: SlotGenerator) -> dict[str, int]:
    """Return the KV tokens that there is memory for at this moment: of prompts, of slots, and of what waits."""
    cache = generator._cache
    prompts = sum(shelf.room * shelf.num_tokens for shelf in cache._prompt_shelves.values())
    return {
        "prompts": prompts,
        "slots": cache.allocated_tokens - prompts,
        "waiting": generator.capacity().kv_tokens_in_use - cache.allocated_tokens,
    }


def replayed(trace: Trace, plan: str, num_slots: int, lengths: FittedLengths, kv_tokens: int | None = None) -> Schedule:
    """Decode a trace by a plan in a simulation: slots, KV tokens that limit what is in them, and no model."""
    return simulate(trace, find_plan(plan), Engine(num_slots, kv_tokens), lengths)
