"""The defaults of a run, both from the command line and from Python."""

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
    SavedByRun,
    ThroughputMonitor,
    WeightSync,
)

TRAINER_DEFAULTS: dict[str, Any] = {
    # fit validates the policy before the first update; the sanity check would run before the generator has weights.
    "num_sanity_val_steps": 0,
    # Groups must stay whole; PromptDataModule gives each rank its own prompts.
    "use_distributed_sampler": False,
    "log_every_n_steps": 1,
    "max_epochs": -1,
    "check_val_every_n_epoch": None,
    "enable_model_summary": False,
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
"""The callbacks of every run by the names of their settings, in the order of their calls.

RunCheckpoint, whose settings are called ``checkpoint``, is called before all of them.
"""


def default_callbacks(
    settings: Mapping[str, Mapping[str, Any] | None] | None = None, own: Sequence[pl.Callback] = ()
) -> list[pl.Callback]:
    """Make the callbacks of every run in their order, for your own Trainer.

    Callbacks make the rollouts and send the weights, so a Trainer without them trains nothing. Give the Trainer
    ``TRAINER_DEFAULTS`` too.

    Args:
        settings: The settings of each callback by its name on the command line, such as ``{"rollout": {"plan":
            "lpt"}}``; None leaves a callback out.
        own: Further callbacks. They are called after the checkpoint and before the callbacks that make rollouts.

    Raises:
        ValueError: There is no callback of a name.
    """
    kinds = {"checkpoint": RunCheckpoint, **CALLBACKS}
    given = settings or {}
    for name in given:
        if name not in kinds:
            raise ValueError(f"callbacks has no {name!r}; it has {', '.join(kinds)}.")
    made: dict[str, Any] = {
        name: kind(**(given.get(name) or {})) for name, kind in kinds.items() if given.get(name, {}) is not None
    }
    checkpoint = made.pop("checkpoint", None)
    first = [] if checkpoint is None else [checkpoint]
    return [*first, *own, *made.values(), SavedByRun(checkpoint)]
