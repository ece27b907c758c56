"""Settings of a learner, and the protocol of what it leaves to others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from lit_grpo.compatibility import SHARDS, Requirement, check_together
from lit_grpo.limits import Count, Limit, NotNegative, check_fields
from lit_grpo.plugins import (
    UPDATE_HOOKS,
    Plugin,
    ask,
    check_decisions,
    check_overrides,
    overriding,
    requirement_of,
    writing,
)
from lit_grpo.plugins.columns import in_order
from lit_grpo.types import PassRule
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.logprobs.checkpointing import Checkpointing
from lit_grpo.update.objective.objective import Objective

if TYPE_CHECKING:
    import torch

    from lit_grpo.types import Prompt


@dataclass
class LearnerSettings:
    """Settings of the update, its steps and micro-batches; :class:`lit_grpo.module.GRPOModule` says more.

    ``temperature`` and ``max_tokens`` are those of sampling, ``weights`` those of the reward functions by name,
    ``shares_prefix`` says whether prompts are computed once for all of their completions, ``pass_rule`` when a
    completion counts as passed, ``plugins`` decide what is trained on and how, ``total_updates`` says how
    many updates the run has, where that is known, and ``sequence_parallel_size`` how many ranks share the tokens of a
    micro-batch. ``ce_sources`` are the plug-ins that may give tokens a weight in the channel ``ce``: each adds a mean
    of its own to the loss. ``hooked`` has for each hook of the update the plug-ins that override it, in their order,
    and ``written`` the columns that plug-ins write.
    """

    objective: Objective
    advantages: Advantages
    weights: dict[str, float]
    temperature: float
    max_tokens: int
    num_iterations: Annotated[int, Limit(ge=1, le=1024)] = 1
    num_minibatches: Count = 1
    max_tokens_per_micro_batch: Count | Literal["auto"] = 8192
    max_grad_norm: NotNegative = 1.0
    gradient_checkpointing: Checkpointing = False
    max_skipped_updates: Count = 3
    plugins: Sequence[Plugin] = ()
    pass_rule: PassRule = field(default_factory=PassRule)
    sequence_parallel_size: Count = 1
    shares_prefix: bool = True
    total_updates: int | None = None
    updates_per_batch: int = field(default=1, init=False)
    learns_unrewarded: bool = field(default=False, init=False)
    has_rollouts: bool = field(default=True, init=False)
    ce_sources: Sequence[Plugin] = field(default=(), init=False)
    hooked: dict[str, list[Plugin]] = field(default_factory=dict, init=False)
    written: frozenset[str] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        check_fields(self, "model.")
        self.updates_per_batch = self.num_iterations * self.num_minibatches
        self.set_plugins(*self.plugins)

    def set_plugins(self, *plugins: Plugin) -> None:
        """Let those of these plug-ins decide that have hooks of the update; what none decides is as without any.

        Raises:
            ValueError: They and the objective do not go together, as where both choose tokens; or one overrides no
                hook.
        """
        for plugin in plugins:
            check_overrides(f"rollout.plugins {type(plugin).__name__}", plugin)
        learning = overriding(plugins, *UPDATE_HOOKS)
        named = [(type(plugin).__name__, plugin) for plugin in learning]
        check_decisions(named)
        needed = [requirement_of(plugin, f"rollout.plugins {name}") for name, plugin in named]
        check_together([*needed, *self.parts()])
        self.plugins, self.ce_sources = learning, writing(learning, "ce_weight", "examples")
        self.hooked = {hook: in_order(overriding(learning, hook), hook) for hook in UPDATE_HOOKS}
        self.written = frozenset(column for plugin in learning for column in plugin.writes)
        self.has_rollouts = not any(math.isinf(ask(plugin, "numbers").first_rollout) for plugin in learning)
        unrewarded = any("learns_unrewarded" in plugin.traits for plugin in learning)
        self.learns_unrewarded = unrewarded or not self.has_rollouts

    def source_of(self, plugin: Plugin) -> int:
        """Return the number of a plug-in among the sources of weights, 0 for one that is none.

        It is found by itself: plug-ins with the same fields that act on other data sets are equal.
        """
        return next((number for number, each in enumerate(self.ce_sources) if each is plugin), 0)

    @property
    def largest_chunk(self) -> int | None:
        """The most tokens of a chunk of a completion; None if no plug-in cuts completions."""
        sizes = [ask(plugin, "numbers").largest_chunk for plugin in writing(self.plugins, "chunks")]
        return max((size for size in sizes if size is not None), default=None)

    def learns_without_reward(self, prompt: Prompt) -> bool:
        unrewarded = (plugin for plugin in self.plugins if "learns_unrewarded" in plugin.traits)
        return not self.has_rollouts or any(prompt.is_of(plugin.datasets) for plugin in unrewarded)

    def parts(self) -> list[Requirement]:
        """Return what each setting needs of a run, and what it takes away from others; a selection is a plug-in.

        Example:
            ``Requirement("model.objective.loss vespo", needs={"whole_completions"})``
        """
        parts = [*self.objective.parts, *self.advantages.parts]
        if self.sequence_parallel_size > 1:
            name = f"model.sequence_parallel_size {self.sequence_parallel_size}"
            changes = {"own_rows": "lets ranks share the tokens of each"}
            parts.append(Requirement(name, frozenset({"all_ranks", "fixed_token_budget"}), changes))
        if self.max_tokens_per_micro_batch == "auto":
            changes = {"fixed_token_budget": "halves the number wherever the memory of a rank runs out"}
            parts.append(Requirement("model.max_tokens_per_micro_batch auto", changes=changes, remedy="give a number"))
        for weighing in writing(self.plugins, "ce_weight", "examples", "candidates"):  # ranks agree on them
            parts.append(Requirement(f"rollout.plugins {type(weighing).__name__}", frozenset({"all_ranks"})))
        return parts


def check_arriving(
    settings: LearnerSettings, num_ranks: int, has_shards: bool = False, plugins: Iterable[Requirement] = ()
) -> None:
    """Check that the gradient of one batch can be added up group by group.

    Args:
        settings: Settings of the update, with its estimator and objective.
        num_ranks: Number of ranks of the run.
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


class Optimization(Protocol):
    """Protocol of the loop that a learner runs in; ``policy_version`` counts the steps that were taken."""

    policy_version: int

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def add_gradient(self, compute_loss: Callable[[], torch.Tensor], exchange: bool) -> None:
        """Add a loss's gradient to that of the step; with ``exchange`` it becomes the sum over ranks."""
        ...

    def take_step(self, scale: float = 1.0) -> float:
        """Take the step at ``scale`` times the learning rate, and count it; return the rate that the schedule gave."""
        ...
