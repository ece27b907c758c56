"""Learning from groups as they become whole: one gradient that adds up while others still decode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from lit_grpo.compatibility import SHARDS, Requirement, check_together
from lit_grpo.update.batches.layout import MicroBatches
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.passes import PolicyPasses
from lit_grpo.update.step import Gathered, Step

PROVISIONAL = 2**12
"""What the gradient is divided by until all groups are there; a power of two, which rounds nothing."""


def check_arriving(
    settings: LearnerSettings, num_ranks: int, has_shards: bool = False, plugins: Iterable[Requirement] = ()
) -> None:
    """Check that the gradient of one batch can be added up group by group.

    Args:
        settings: What is learnt.
        num_ranks: Of the run.
        has_shards: Whether each rank has a part of the weights.
        plugins: What the plug-ins of the run need.

    Raises:
        ValueError: The settings or plug-ins need the whole batch beforehand, or ranks would wait for each other.
    """
    needs = {"unsharded_weights"} | ({"fixed_token_budget"} if num_ranks > 1 else set[str]())
    within = Requirement(
        "a plug-in with overlap within",
        needs=frozenset(needs),
        changes={"all_ranks": "learns from groups while others of their batch decode"},
        remedy="take a plug-in with overlap none",
    )
    check_together([*plugins, *settings.parts(), within, *([SHARDS] if has_shards else [])])


class ArrivingGradient:
    """The gradient of one optimizer step, to which groups add as they come.

    A group goes through the policy as soon as the policy is free: what it would wait for is decoded meanwhile.

    Args:
        passes: Of the policy.
    """

    def __init__(self, passes: PolicyPasses) -> None:
        self._passes = passes
        self._parts: list[Step] = []
        self._gathered: list[Gathered] = []
        passes.policy.zero_grad()

    def add(self, part: Step) -> None:
        """Add the gradient of a part of the step, whose totals are :data:`PROVISIONAL`."""
        self._parts.append(part)
        gathered = self._gradient(part)
        if gathered is None:
            self._start_again()
        else:
            self._gathered.append(gathered)

    def finish(self, empty: Step) -> tuple[Step, Gathered, float]:
        """Divide the gradient by the true totals instead of the provisional ones, once all parts have been added.

        Ranks exchange it in the backward pass of an empty micro-batch: none of them knew which was its last.

        Args:
            empty: A part of the step without rollouts.

        Returns:
            The whole step, what its micro-batches add up to, and the factor that provisional values were multiplied by.
        """
        passes, ranks = self._passes, self._passes.ranks
        if ranks.size > 1:
            micro_batches = MicroBatches([], passes.settings.shares_prefix).and_empty(1)
            exchanged = passes.gradient(micro_batches, empty, first=False)
            assert exchanged is not None  # several ranks have a fixed budget
            self._gathered.append(exchanged)
        counts = [(part.own.num_tokens, part.own.num_sequences) for part in self._parts]
        summed = ranks.sum(torch.tensor([(0, 0), *counts], dtype=torch.float64).sum(0))
        num_tokens, num_sequences = map(int, summed.tolist())
        totals = replace(
            empty.totals, num_tokens=num_tokens, num_sequences=num_sequences, num_entropy_tokens=num_tokens
        )
        by_token = passes.settings.objective.normalized_by == "token"
        scale = PROVISIONAL / max(num_tokens if by_token else num_sequences, 1)
        for parameter in passes.policy.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        gathered = Gathered.together(self._gathered)
        gathered.loss *= scale
        rollouts = [rollout for part in self._parts for rollout in part.rollouts]
        return replace(empty, rollouts=rollouts, totals=totals), gathered, scale

    def _gradient(self, part: Step) -> Gathered | None:
        micro_batches = self._passes.micro_batches(part.rollouts, equally_many=False, chunks=part.chunks)
        return self._passes.gradient(micro_batches, part, first=False, last=False)

    def _start_again(self) -> None:
        """Take all parts again, in smaller micro-batches, for memory has run out."""
        while True:
            self._passes.halve_budget([rollout for part in self._parts for rollout in part.rollouts])
            self._passes.policy.zero_grad()
            self._gathered = []
            for part in self._parts:
                gathered = self._gradient(part)
                if gathered is None:
                    break
                self._gathered.append(gathered)
            else:
                return
