"""What a run has unless it is told otherwise, from the command line and from Python."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lit_grpo.callbacks import (
    CompletionWriter,
    MemoryMonitor,
    PolicyExporter,
    RolloutScheduler,
    RolloutTimeline,
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
    "rollout_scheduler": RolloutScheduler,
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
