"""Logs the peak memory of rollout and update."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lit_grpo.checks import check_order
from lit_grpo.faults.observers import Observer
from lit_grpo.memory import PeakMemory

from .rollout_scheduler import RolloutScheduler
from .weight_sync import WeightSync


class MemoryMonitor(Observer):
    """Log ``memory/rollout_peak_gib`` and ``memory/update_peak_gib`` of every batch, and the memory in use after it.

    The figures are the allocator's on a GPU, and the process's resident set on a CPU. The callback comes after
    :class:`lit_grpo.callbacks.RolloutScheduler` and ``WeightSync`` in the list, so that for it a batch starts when the
    rollout ends, and ends when the update ends.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_order(trainer, RolloutScheduler, WeightSync, MemoryMonitor)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._peak = PeakMemory(pl_module.device)
        self._peak.reset()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Log the rollout's peak; begin the update phase."""
        self._rollout_gib = self._peak.peak_gib()
        pl_module.log("memory/rollout_peak_gib", self._rollout_gib)
        self._peak.reset()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the update's peak; begin the next rollout phase."""
        update_gib = self._peak.peak_gib()
        pl_module.log_dict({"memory/update_peak_gib": update_gib, **self._peak.state_gib()})
        pl_module.log("peak_GiB", max(self._rollout_gib, update_gib), prog_bar=True, logger=False)
        self._peak.reset()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave validation out of the next rollout's peak."""
        if trainer.training:
            self._peak.reset()
