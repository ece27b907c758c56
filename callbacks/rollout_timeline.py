"""Draws when each slot decoded which completion."""

from __future__ import annotations

import json
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from lit_grpo.display.due import is_due
from lit_grpo.faults import forget_after
from lit_grpo.faults.observers import Observer
from lit_grpo.limits import Number, checks_arguments
from lit_grpo.scheduling.recording import timeline_row
from lit_grpo.scheduling.timeline import draw_timeline, recorded_timeline
from lit_grpo.types import GroupKey, PromptBatch


class RolloutTimeline(Observer):
    """Draw some rollouts as ``timelines/update-N.png`` and in the loggers.

    In a picture a row is a slot and a bar a completion, colored by group; a white part is an idle slot. The same data
    is a line of ``timeline.jsonl``, from which ``python -m lit_grpo report`` draws a timeline that zooms.

    Args:
        every_n_updates: Draw the first rollout, and one whenever the policy's version reaches or passes a multiple of
            this number; 0 never draws any.
        record_trace: Write a line for each completion to ``trace.jsonl``, for ``python -m lit_grpo simulate --trace``;
            ``tokens`` with token ids, from which ``simulate --drafts`` counts the steps that drafts would save.
    """

    @checks_arguments("rollout_timeline.")
    def __init__(self, every_n_updates: Number = 50, record_trace: bool | Literal["tokens"] = False) -> None:
        self.every_n_updates = every_n_updates
        self.record_trace = record_trace
        self._version = 0  # the policy's version before this batch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop the rows that a resumed run will write again."""
        self._version = trainer.global_step
        if trainer.is_global_zero and trainer.global_step:
            for name in ("trace.jsonl", "timeline.jsonl"):
                forget_after(Path(trainer.default_root_dir) / name, trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero or batch.without_rollouts:
            return
        if self.record_trace:
            with (Path(trainer.default_root_dir) / "trace.jsonl").open("a", encoding="utf-8") as file:
                rows = _rows(trainer.global_step, batch, self.record_trace == "tokens")
                file.writelines(json.dumps(row) + "\n" for row in rows)
        before, self._version = self._version, trainer.global_step
        if is_due(self.every_n_updates, before, self._version):
            self._draw(trainer, batch)

    def _draw(self, trainer: pl.Trainer, batch: PromptBatch) -> None:
        step, folder = trainer.global_step, Path(trainer.default_root_dir)
        row = timeline_row(step, batch, _seconds(trainer, batch))
        with (folder / "timeline.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        if find_spec("matplotlib") is None:  # timeline.jsonl has the data
            return
        steps_over_bound = batch.metrics["rollout/steps_over_bound"]
        title = (
            f"update {step}: {batch.metrics['rollout/steps']:.0f} steps, {steps_over_bound:.2f} times the lower bound"
        )
        figure = draw_timeline([recorded_timeline(title, row)], "seconds", row["slots_kept"])
        path = folder / "timelines" / f"update-{step}.png"
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("timeline", [str(path)], step)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment._get_file_writer().add_summary(_png_summary("timeline", path.read_bytes()), step)


def _seconds(trainer: pl.Trainer, batch: PromptBatch) -> dict[str, float]:
    """Return the seconds of each phase; the update is without the sync, which ``time/update_s`` includes."""
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("time/")}
    sync_s = logged.get("time/weight_sync_s", 0.0)
    return {
        "rollout": batch.metrics["time/rollout_s"],
        "reward_wait": batch.metrics["time/reward_wait_s"],
        "update": max(logged.get("time/update_s", 0.0) - sync_s, 0.0),
        "weight_sync": sync_s,
    }


def _rows(step: int, batch: PromptBatch, with_tokens: bool) -> list[dict[str, Any]]:
    rows, shown = list[dict[str, Any]](), set[GroupKey]()
    for rollout in batch.rollouts:
        completion, prompt = rollout.completion, rollout.prompt
        predicted = batch.predicted.get(completion.request.key)
        row: dict[str, Any] = {
            "step": step,
            "prompt_id": prompt.prompt_id,
            "visit": prompt.visit,
            "sample_id": completion.request.path[0],
            "prompt_tokens": len(prompt.token_ids),
            "tokens": completion.num_sampled,
            "predicted": None if predicted is None else round(predicted, 1),
        }
        if with_tokens:
            row["token_ids"] = completion.sampled_ids
            if completion.request.group not in shown:
                row["prompt_token_ids"] = list(prompt.token_ids)
                shown.add(completion.request.group)
        rows.append(row)
    return rows


def _png_summary(tag: str, png: bytes) -> Any:
    """Make a summary of a finished picture; drawing it again would take as long as the first time."""
    from tensorboard.compat.proto import summary_pb2

    summary: Any = summary_pb2.Summary  # pyrefly: ignore[missing-attribute]
    width, height = struct.unpack(">II", png[16:24])  # of the header
    image = summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
    return summary(value=[summary.Value(tag=tag, image=image)])
