"""Rollouts of one prompt, decoded by what Infinite Sampling is made of, one part after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.baseline_plans import FIXED_SLOT, FULL_GROUP, MICRO_ROUNDS
from benchmarks.rollouts import KnownLengths, slots
from lit_grpo.methods.plans import find_plan
from lit_grpo.rollout.loop import RolloutLoop, RolloutStats
from lit_grpo.scheduling.jobs import FittedLengths, Job, NoLengths
from lit_grpo.scheduling.lengths import LengthPredictor
from lit_grpo.scheduling.plans.probe_choice import Points, ProbeChoice
from lit_grpo.types import Key, Prompt, RolloutGroup, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.objective.objective import Objective

POINTS = (0, 8, 32, 64)


@dataclass(frozen=True)
class System:
    """A row of the table: what decides the order, and what it is told.

    ``points`` are those of the rollout loop, None for those that the run chooses by itself. ``lengths`` are predicted,
    known beforehand, or none.
    """

    name: str
    plan: str
    points: Points | None = ()
    lengths: str = "predicted"


SYSTEMS = (
    System("full group, shared prompt", FULL_GROUP, lengths="none"),
    System("naive micro groups", MICRO_ROUNDS, lengths="none"),
    System("fixed slots", FIXED_SLOT, lengths="none"),
    System("first come", "fcfs", lengths="none"),
    System("+ shortest first", "sjf"),
    System("+ grouping", "infinite_sampling"),
    System("complete, k = 8", "infinite_sampling", (8,)),
    System("complete, k = 32", "infinite_sampling", (32,)),
    System("complete, k = 64", "infinite_sampling", (64,)),
    System("complete, lengths known", "infinite_sampling", lengths="known"),
    System("default", "short_last", None),
    System("default, k = 8", "short_last", (8,)),
    System("default, k = 32", "short_last", (32,)),
    System("default, lengths known", "short_last", lengths="known"),
)


@dataclass
class Figures:
    """Cost of one system, over rollouts."""

    steps: int = 0
    bound: int = 0
    tokens: int = 0
    seconds: float = 0.0
    points: list[Points] = field(default_factory=list)
    within: list[float] = field(default_factory=list)
    samples: dict[Key, list[int]] = field(default_factory=dict)
    groups: list[RolloutGroup] = field(default_factory=list)

    def add(self, stats: RolloutStats, groups: Sequence[RolloutGroup], points: Points) -> None:
        """Count a rollout."""
        self.steps += stats.num_steps
        self.bound += stats.step_bound
        self.tokens += stats.num_tokens
        self.seconds += stats.rollout_s
        self.points.append(points)
        self.groups += groups
        for group in groups:
            for rollout in group.rollouts:
                self.samples[rollout.completion.request.key] = rollout.completion.token_ids_T.tolist()


class Runner:
    """Decodes rollouts by one system, which learns from them.

    Args:
        system: The system.
        policy: Decodes.
        tokenizer: Its tokenizer.
        num_slots: Slots; as many as completions where the plan decodes whole groups.
        group_size: Completions of a prompt.
        limit: The most tokens of one.
        lengths: Tokens that completions are forced to, by key; by default the policy decides.
        told: What is predicted of them, where there is nothing that could be learned; by default a predictor learns.
        packed_weights: As in SlotGenerator.
    """

    def __init__(
        self,
        system: System,
        policy: Any,
        tokenizer: Any,
        num_slots: int,
        group_size: int,
        limit: int,
        lengths: dict[Key, int] | None = None,
        told: dict[Key, float] | None = None,
        packed_weights: bool = False,
    ) -> None:
        self.system, self.group_size, self.limit, self.told = system, group_size, limit, told
        self.num_slots = group_size if system.plan == FULL_GROUP else num_slots
        self.generator = slots(policy, tokenizer, self.num_slots, lengths, packed_weights=packed_weights)
        self.predicted_at = [point for point in POINTS if point < limit]
        self.predictor = LengthPredictor(self.predicted_at, num_scalars=2, max_tokens=limit)
        self.choice = ProbeChoice()

    def points(self) -> Points:
        """The points of the next rollout."""
        if self.system.points is not None:
            return self.system.points
        return self.choice.points({point: self.predictor.within_correlation(point) for point in self.predicted_at[1:]})

    def run(self, prompts: Sequence[Prompt], figures: Figures, known: dict[Key, int]) -> None:
        """Decode a rollout, count it and learn from it.

        Args:
            prompts: Its prompts.
            figures: Takes the count.
            known: Tokens of each completion, for a system that is told.
        """
        points = self.points()
        loop = RolloutLoop(
            self.generator, None, find_plan(self.system.plan), self._lengths(prompts, known), points=points
        )
        groups, stats = loop.collect(prompts, self.group_size, SamplingParams(max_tokens=self.limit), seed=0)
        if self.system.lengths == "predicted" and self.told is None:
            kept = self.generator.capacity().kept_share * self.num_slots * self.limit
            self.choice.learn(self.predictor.outcome(), self.limit, self.num_slots, self.predictor.informative, kept)
            self.predictor.end(commit=True)
        figures.add(stats, groups, points)

    def _lengths(self, prompts: Sequence[Prompt], known: dict[Key, int]) -> FittedLengths:
        if self.system.lengths == "none":
            return NoLengths()
        if self.system.lengths == "predicted" and self.told is None:
            return self.predictor
        foretold = known if self.system.lengths == "known" or self.told is None else self.told
        keys = [(prompt.prompt_id, prompt.visit, (sample,)) for prompt in prompts for sample in range(self.group_size)]
        jobs = [Job(key, 1, self.limit) for key in keys]
        return KnownLengths(jobs, np.array([foretold[key] for key in keys]))


class _PlainSteps:
    """An optimizer for a learner that keeps the gradient, and changes no weight."""

    policy_version = 0
    optimizer: torch.optim.Optimizer

    def __init__(self, policy: torch.nn.Module) -> None:
        self._policy, self.gradient = policy, torch.empty(0)
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)

    def add_gradient(self, compute_loss: Any, exchange: bool) -> None:
        """Add a micro-batch's."""
        compute_loss().backward()

    def take_step(self, scale: float = 1.0) -> float:
        """Keep the sum, and begin again."""
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._policy.parameters()]
        self.gradient = torch.cat([gradient.flatten() for gradient in gradients])
        self._policy.zero_grad()
        return 0.0


def gradient_of(policy: Any, groups: Sequence[RolloutGroup], limit: int) -> torch.Tensor:
    """Return the gradient of an update from rollouts, whose reward is whether their lengths are odd."""
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = float(rollout.completion.num_tokens % 2)
            rollout.rewards = {"odd": rollout.reward}
    steps = _PlainSteps(policy.train())
    settings = LearnerSettings(
        Objective(), Advantages(), {"odd": 1.0}, temperature=1.0, max_tokens=limit, max_grad_norm=0.0
    )
    Learner(policy, steps, settings).learn(list(groups))
    policy.eval()
    return steps.gradient
