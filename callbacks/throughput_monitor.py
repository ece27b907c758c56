"""Logs tokens per second by phase."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from lit_grpo.checks import check_order
from lit_grpo.types import PromptBatch

from .rollout_scheduler import RolloutScheduler
from .weight_sync import WeightSync


class ThroughputMonitor(pl.Callback):
    """Log sampled tokens per second of the rollout, of the update and of both, and the seconds of each.

    Completion tokens are counted in all three, so the figures compare. The callback stands behind
    :class:`lit_grpo.callbacks.RolloutScheduler` and ``WeightSync`` in the list; the sync counts as part of the update.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the place in the list."""
        check_order(trainer, RolloutScheduler, WeightSync, ThroughputMonitor)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the update phase."""
        self._update_start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Log the batch's throughput."""
        update_s = time.perf_counter() - self._update_start
        rollout_s = batch.metrics["time/rollout_s"]
        tokens = batch.metrics["rollout/tokens"]
        tokens_per_s = tokens / (rollout_s + update_s)
        pl_module.log_dict(
            {
                "perf/rollout_tokens_per_s": tokens / rollout_s,
                "perf/update_tokens_per_s": tokens / update_s,
                "perf/tokens_per_s": tokens_per_s,
                "time/update_s": update_s,
            }
        )
        pl_module.log("tokens/s", tokens_per_s, prog_bar=True, logger=False)
