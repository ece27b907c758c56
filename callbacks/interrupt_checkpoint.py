"""Ctrl-C without losing work."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lit_grpo.checks import check_order

from .rollout_scheduler import RolloutScheduler


class InterruptCheckpoint(pl.Callback):
    """On Ctrl-C save a checkpoint between two batches, from which the run resumes exactly.

    Until the first optimizer step of a batch nothing has changed, so the batch is broken off at once and
    sampled again on resuming. From then on the batch, and a validation after it, is finished first; a second
    Ctrl-C does not wait, and saves nothing. The callback stands first in the list, so that it stops before
    the next rollout begins.
    """

    def __init__(self) -> None:
        self._updating = False
        self._requested = False
        self._previous: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the place in the list."""
        check_order(trainer, InterruptCheckpoint, RolloutScheduler)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take over Ctrl-C."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if not self._updating or self._requested:
            raise KeyboardInterrupt
        self._requested = True
        print("\nFinishing this update, then saving a checkpoint; press Ctrl-C again to stop without.", flush=True)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Hold Ctrl-C back from here on."""
        self._updating = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Let Ctrl-C through again, one that came during the update included."""
        self._updating = False
        if self._requested:
            raise KeyboardInterrupt

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save ``checkpoints/last.ckpt`` on an interrupt between two updates."""
        if not isinstance(exception, KeyboardInterrupt) or trainer.state.fn != TrainerFn.FITTING:
            return
        if self._updating:
            print("Stopped in the middle of an update; resume from the last checkpoint there is.")
            return
        _take_back_batch(trainer)
        path = Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            print(f"Checkpoint saved; the same command with --ckpt_path {path} goes on from it.")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give Ctrl-C back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None


def _take_back_batch(trainer: pl.Trainer) -> None:
    """Count the batch that was broken off as not begun, or validation would come a batch early after resuming."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for count in (progress.total, progress.current):
        vars(count).update(ready=count.completed, started=count.completed, processed=count.completed)
