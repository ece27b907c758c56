"""One progress bar for the whole run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar


class GRPOProgressBar(TQDMProgressBar):
    """Count optimizer updates up to ``trainer.max_steps``, with reward, tokens/s and peak memory beside them.

    Without ``max_steps`` it counts the batches of an epoch, as Lightning's own bar does.
    """

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Leave out the version number and round."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {
            name: f"{value:.3g}" if isinstance(value, float) and abs(value) < 1e3 else value
            for name, value in metrics.items()
        }

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Set up the bar once for all epochs."""
        if trainer.max_steps < 0:
            super().on_train_epoch_start(trainer, *_)
            return
        bar = self.train_progress_bar
        bar.total = trainer.max_steps
        bar.n = trainer.global_step
        bar.set_description("updates")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move on."""
        if trainer.max_steps < 0:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            return
        bar = self.train_progress_bar
        bar.n = trainer.global_step
        if not bar.disable:
            bar.set_postfix(self.get_metrics(trainer, pl_module))
        bar.refresh()
