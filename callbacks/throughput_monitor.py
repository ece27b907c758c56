"""Logs tokens per second by phase."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from lit_grpo.checks import check_order
from lit_grpo.faults import StallWatch
from lit_grpo.module import GRPOModule
from lit_grpo.types import PromptBatch

from .rollout_scheduler import RolloutScheduler
from .weight_sync import WeightSync


class ThroughputMonitor(pl.Callback):
    """Log sampled tokens per second of the rollout, of the update and of both, and the seconds of each.

    Completion tokens are counted in all three, so the figures compare. The callback stands behind
    :class:`lit_grpo.callbacks.RolloutScheduler` and ``WeightSync`` in the list; the sync counts as part of the update.

    Args:
        stall_minutes: When nothing has moved for so long (no decoding step, micro-batch or change of phase), each rank
            that waits says once which phase it is in and what it is doing; nothing is stopped. 0 never.
    """

    def __init__(self, stall_minutes: float = 30.0) -> None:
        if not stall_minutes >= 0:
            raise ValueError(f"throughput_monitor.stall_minutes must be at least 0, not {stall_minutes}.")
        self.stall_minutes = stall_minutes
        self._watch: StallWatch | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the place in the list, and begin to watch."""
        check_order(trainer, RolloutScheduler, WeightSync, ThroughputMonitor)
        assert isinstance(pl_module, GRPOModule)
        if self.stall_minutes and self._watch is None:
            self._watch = StallWatch(lambda: pl_module.phases, self.stall_minutes, trainer.global_rank)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Watch no more."""
        self._stop_watching()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Watch no more."""
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._watch = None

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
