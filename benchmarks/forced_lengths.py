"""Decoding completions of given lengths, so that all systems do the same work and plans can be told the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.scheduling.jobs import Job, NoLengths
from lit_grpo.types import Key

if TYPE_CHECKING:
    from lit_grpo.rollout.slots.rows import TokenRows


class ForcedGenerator(SlotGenerator):
    """SlotGenerator whose completions end after a given number of tokens, whatever is sampled.

    Args:
        lengths: The tokens of each completion.
        num_slots: As in SlotGenerator.
    """

    def __init__(self, lengths: dict[Key, int], num_slots: int) -> None:
        super().__init__(num_slots)
        self.lengths = lengths

    def _stopped(self, rows: TokenRows, tokens_B: np.ndarray) -> np.ndarray:
        ends_B = np.array([self.lengths[request.key] for request in rows.requests])
        return rows.counts_B >= ends_B


class ForetoldLengths(NoLengths):
    """Estimates that are given beforehand."""

    informative = True

    def __init__(self, expected: dict[Key, float]) -> None:
        self.expected = expected

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        """Return the estimates."""
        return np.array([self.expected[job.key] for job in jobs])


def started(generator: ForcedGenerator, policy: Any, tokenizer: Any) -> ForcedGenerator:
    """Start a generator with the policy's weights."""
    generator.start(PolicySpec(policy, tokenizer))
    generator.load_weights(policy.named_parameters(), 0)
    return generator
