"""What the tests under the pretended GPU share: rollouts and updates there, and the same on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft  # noqa: F401  # it asks for CUDA when it is imported first under the pretended GPU
import torch
from conftest import random_policy
from hand_made import MAX_TOKENS, random_groups, relative_error

from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import PassRule, Prompt, RolloutGroup, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.prefix.support import prefix_refusal
from tests.doubles.pretend_cuda import Ledger, pretend_cuda

PROMPTS = [Prompt("a", (2, 3, 4), ""), Prompt("b", tuple(range(2, 30)), ""), Prompt("c", (7,), "")]
REWARDS = [[1.0, 0.0, 0.5, 0.2], [0.0, 1.0, 0.0], [0.25, 0.5, 1.0, 0.0, 0.75]]
Samples = list[tuple[list[int], list[float]]]


@dataclass
class StepCounts:
    """What each decode step was counted with: waits, pinned and unpinned copies, launches."""

    waits: list[int] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    unpinned: list[int] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)
    lines: set[str] = field(default_factory=set)

    def note(self, ledger: Ledger) -> None:
        """Take down a step, and begin the next."""
        self.waits.append(ledger.count("wait"))
        self.pinned.append(ledger.count("pinned copy"))
        self.unpinned.append(ledger.count("unpinned copy"))
        self.launches.append(ledger.launches)
        self.lines |= {*ledger.lines("wait"), *ledger.lines("unpinned copy")}
        ledger.reset()


def started(policy: Any, folder: Path, num_slots: int = 5, **options: Any) -> SlotGenerator:
    """A generator that has the policy's weights; without drafts by default, whose price is timed."""
    given: dict[str, Any] = {"drafts": "off"} | options
    generator = SlotGenerator(num_slots, **given)
    generator.start(PolicySpec(policy, load_tokenizer(str(folder))))
    generator.load_weights(policy.named_parameters(), 0)
    return generator


def sample(
    generator: SlotGenerator,
    ledger: Ledger | None = None,
    max_tokens: int = 30,
    autocast: torch.dtype | None = None,
    group_size: int = 2,
    points: Sequence[int] = (),
) -> tuple[Samples, StepCounts]:
    """Sample groups of all prompts; count each step where there is a ledger."""
    counts, step = StepCounts(), generator.step

    def counted() -> Any:
        events = step()
        if ledger is not None:
            counts.note(ledger)
        return events

    generator.step = counted
    kind = generator.policy.device.type
    if ledger is not None:
        ledger.reset()
    with nullcontext() if autocast is None else torch.autocast(kind, autocast, cache_enabled=False):
        loop = RolloutLoop(generator, points=points)
        groups, _ = loop.collect(PROMPTS, group_size, SamplingParams(max_tokens=max_tokens), seed=0)
    del generator.step
    completions = [rollout.completion for group in groups for rollout in group.rollouts]
    return [(each.token_ids_T.tolist(), each.logprobs_T.tolist()) for each in completions], counts


def off(actual: Samples, expected: Samples) -> float:
    """The largest difference of two log-probs; infinite where other tokens were sampled."""
    if [ids for ids, _ in actual] != [ids for ids, _ in expected]:
        return math.inf
    pairs = [pair for one, other in zip(actual, expected, strict=True) for pair in zip(one[1], other[1], strict=True)]
    return max(abs(one - other) for one, other in pairs)


def closeness(autocast: torch.dtype | None) -> float:
    """How near two log-probs are to be: sums in another order can round to another number in bfloat16."""
    return 1e-4 if autocast is None else 2e-3


class Steps:
    """An optimization without a framework, in the precision of a run; it keeps each step's gradient, on the host."""

    def __init__(self, policy: Any, autocast: torch.dtype | None = None, lr: float = 1e-2) -> None:
        self.policy_version, self.autocast, self.policy = 0, autocast, policy
        self.gradients = list[torch.Tensor]()
        self.optimizer = torch.optim.AdamW([each for each in policy.parameters() if each.requires_grad], lr=lr)

    def add_gradient(self, compute_loss: Callable[[], torch.Tensor], exchange: bool) -> None:
        kind = self.policy.device.type
        with nullcontext() if self.autocast is None else torch.autocast(kind, self.autocast, cache_enabled=False):
            loss = compute_loss()
        loss.backward()

    def take_step(self, scale: float = 1.0) -> float:
        self.optimizer.step()
        self.policy_version += 1
        return 0.0


class KeepsGradients(Steps):
    """The same; it reads each step's gradient."""

    def take_step(self, scale: float = 1.0) -> float:
        grads = [each.grad for each in self.policy.parameters() if each.grad is not None]
        self.gradients.append(torch.cat([grad.detach().flatten() for grad in grads]).cpu())
        return super().take_step(scale)


def groups() -> list[RolloutGroup]:
    """Ragged groups whose sampled log-probs are near those of the random policy."""
    made = random_groups(random_policy(), REWARDS, seed=1)
    for group in made:
        for rollout in group.rollouts:
            rollout.rewards = {"exact": rollout.reward}
    return made


def settings(**changes: Any) -> LearnerSettings:
    """Those of an update, with several micro-batches unless told otherwise."""
    defaults: dict[str, Any] = {
        "objective": Objective(),
        "advantages": Advantages(),
        "weights": {"exact": 1.0},
        "temperature": 1.0,
        "max_tokens": MAX_TOKENS,
        "max_tokens_per_micro_batch": 48,
        "pass_rule": PassRule("exact"),
    }
    return LearnerSettings(**(defaults | changes))


def learn(policy: Any, steps: Steps, reference: Any = None, **changes: Any) -> tuple[Learner, dict[str, float]]:
    """Learn from the groups; return the learner and what it logs."""
    learner = Learner(policy, steps, settings(**changes), reference)
    return learner, learner.learn(groups())


# ---- checks, which the tests of planted mistakes call too -------------------------------------------------


def check_update(precision: torch.dtype | None = None) -> None:
    """The gradient is the CPU's; a micro-batch waits for nothing and is one copy, and a step waits once."""
    policy: Any = random_policy().train()
    steps = KeepsGradients(policy, precision)
    learn(policy, steps)
    with pretend_cuda() as gpu:
        there: Any = random_policy().train()
        there.to("cuda")
        steps_there = KeepsGradients(there, precision)
        learner = Learner(there, steps_there, settings())
        made, loss = [], learner.passes._loss

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            made.append(args or kwargs)
            return loss(*args, **kwargs)

        learner.passes._loss = counted
        assert prefix_refusal(there) is None  # as at the start of a run, with the trial of its attention
        gpu.reset()
        learner.learn(groups())
        waits = gpu.count("wait") - 1  # for the gradient that this reads
        copies, lines = (gpu.count("pinned copy"), gpu.count("unpinned copy")), [*gpu.noted]
    assert relative_error(steps_there.gradients[0], steps.gradients[0]) < 1e-5
    assert len(made) > 1 and waits == 1, lines
    assert copies == (len(made), 0), lines
