"""Shows which slot decoded which completion when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from lit_grpo.display.due import is_due
from lit_grpo.faults import forget_after
from lit_grpo.scheduling.timeline import Timeline, draw_timeline
from lit_grpo.types import PromptBatch


class RolloutTimeline(pl.Callback):
    """Draw rollouts now and then, as ``timelines/update-N.png`` and in the loggers, and keep the lengths of all.

    In the picture a row is a slot and a bar a completion, coloured by group; white is a slot that idles.
    ``trace.jsonl`` gets a line a completion, which ``python -m lit_grpo simulate --trace`` reads.

    Args:
        every_n_updates: Draw the first rollout, and one whenever the policy's version reaches or passes a multiple of
            this; 0 never.
        record_trace: Whether to write ``trace.jsonl``.
    """

    def __init__(self, every_n_updates: int = 0, record_trace: bool = False) -> None:
        if every_n_updates < 0:
            raise ValueError(f"rollout_timeline.every_n_updates must be at least 0, not {every_n_updates}.")
        self.every_n_updates = every_n_updates
        self.record_trace = record_trace
        self._version = 0  # of the policy before this batch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget, of a run that is resumed, what it is going to write again."""
        self._version = trainer.global_step
        if trainer.is_global_zero and trainer.global_step:
            forget_after(Path(trainer.default_root_dir) / "trace.jsonl", trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Draw this batch's rollout, and append it to the trace."""
        if not trainer.is_global_zero:
            return
        if self.record_trace:
            with (Path(trainer.default_root_dir) / "trace.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in _rows(trainer.global_step, batch))
        before, self._version = self._version, trainer.global_step
        if is_due(self.every_n_updates, before, self._version):
            self._draw(trainer, batch)

    def _draw(self, trainer: pl.Trainer, batch: PromptBatch) -> None:
        step = trainer.global_step
        steps_over_bound = batch.metrics["rollout/steps_over_bound"]
        title = (
            f"update {step}: {batch.metrics['rollout/steps']:.0f} steps, {steps_over_bound:.2f} times the lower bound"
        )
        figure = draw_timeline([Timeline(title, "active slots", [span for _, span in batch.spans])])
        path = Path(trainer.default_root_dir) / "timelines" / f"update-{step}.png"
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("timeline", [str(path)], step)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("timeline", figure, step)


def _rows(step: int, batch: PromptBatch) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "prompt_id": rollout.prompt.prompt_id,
            "visit": rollout.prompt.visit,
            "sample_id": rollout.completion.request.path[0],
            "prompt_tokens": len(rollout.prompt.token_ids),
            "tokens": rollout.completion.num_tokens,
            "predicted": round(batch.predicted[rollout.completion.request.key], 1),
        }
        for rollout in batch.rollouts
    ]
