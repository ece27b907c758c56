"""What a run has unless it is told otherwise, from the command line and from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl

from lit_grpo.callbacks import (
    CompletionWriter,
    MemoryMonitor,
    PolicyExporter,
    RolloutScheduler,
    RolloutTimeline,
    RunCheckpoint,
    SampleLogger,
    ThroughputMonitor,
    WeightSync,
)

TRAINER_DEFAULTS: dict[str, Any] = {
    # The policy is validated before the first update by validate_first, and the sanity check would run
    # before the generator has its weights.
    "num_sanity_val_steps": 0,
    # Groups must stay whole; PromptDataModule gives each rank its own prompts.
    "use_distributed_sampler": False,
    "log_every_n_steps": 1,
    "max_epochs": -1,
    "check_val_every_n_epoch": None,
    "enable_model_summary": False,
    "enable_checkpointing": False,  # RunCheckpoint saves
}
CALLBACKS: dict[str, type[pl.Callback]] = {
    "rollout": RolloutScheduler,
    "weight_sync": WeightSync,
    "memory_monitor": MemoryMonitor,
    "throughput_monitor": ThroughputMonitor,
    "sample_logger": SampleLogger,
    "rollout_timeline": RolloutTimeline,
    "policy_exporter": PolicyExporter,
    "completion_writer": CompletionWriter,
}
"""The callbacks of every run by the names of their settings, in the order in which they are called.

RunCheckpoint, whose settings are ``checkpoint``, stands before them all.
"""


def default_callbacks(
    settings: Mapping[str, Mapping[str, Any] | None] | None = None, own: Sequence[pl.Callback] = ()
) -> list[pl.Callback]:
    """Make the callbacks of every run in their order, for a Trainer of one's own.

    Rollouts and weight syncs are callbacks, so a Trainer without them trains nothing; give it ``TRAINER_DEFAULTS`` too.

    Args:
        settings: Of each by the name that the command line knows it by, such as ``{"rollout": {"plan":
            "lpt"}}``; None leaves a callback out.
        own: Further callbacks. They come behind the first, the checkpoint, and before those that make rollouts.

    Raises:
        ValueError: There is none of a name.
    """
    kinds = {"checkpoint": RunCheckpoint, **CALLBACKS}
    given = settings or {}
    for name in given:
        if name not in kinds:
            raise ValueError(f"callbacks has no {name!r}; it has {', '.join(kinds)}.")
    made = {name: kind(**(given.get(name) or {})) for name, kind in kinds.items() if given.get(name, {}) is not None}
    first = [made.pop("checkpoint")] if "checkpoint" in made else []
    return [*first, *own, *made.values()]
