"""Shows what the policy writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from lit_grpo.faults import forget_after
from lit_grpo.terminal import visible
from lit_grpo.types import PromptBatch, Rollout

_WIDTH = 60


class SampleLogger(pl.Callback):
    """Print a table of sampled completions now and then, and keep it in the loggers and in ``samples.jsonl``.

    Args:
        every_n_batches: How often; 0 never.
        num_samples: Rows of the table, from as many different prompts as there are.
    """

    def __init__(self, every_n_batches: int = 20, num_samples: int = 4) -> None:
        if every_n_batches < 0:
            raise ValueError(f"sample_logger.every_n_batches must be at least 0, not {every_n_batches}.")
        if num_samples < 1:
            raise ValueError(f"sample_logger.num_samples must be at least 1, not {num_samples}.")
        self.every_n_batches = every_n_batches
        self.num_samples = num_samples

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget, of a run that is resumed, what it is going to write again."""
        if trainer.is_global_zero and trainer.global_step:
            forget_after(Path(trainer.default_root_dir) / "samples.jsonl", trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        """Log a table of this batch's completions."""
        if not self.every_n_batches or batch_idx % self.every_n_batches or not trainer.is_global_zero:
            return
        step = trainer.global_step
        rows = _same_columns([_row(step, rollout) for rollout in self._pick(batch)])
        self._print(trainer, step, rows)
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)  # of a Trainer of one's own it may not be there
        with (folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table("samples", columns=list(rows[0]), data=[list(row.values()) for row in rows])
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("samples", _markdown(rows), step)

    def _pick(self, batch: PromptBatch) -> list[Rollout]:
        """Take the best and the worst rollout of a prompt in turn, prompt by prompt."""
        picked = []
        for number in range(self.num_samples):
            group = batch.groups[number % len(batch.groups)]
            ranked = sorted(group.rollouts, key=lambda rollout: rollout.reward)
            picked.append(ranked[-1 if number % 2 == 0 else 0])
        return picked

    def _print(self, trainer: pl.Trainer, step: int, rows: list[dict[str, Any]]) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"samples at update {step}", title_justify="left", expand=False)
        for name in ("prompt", "completion", "tokens", "finish", "reward"):
            table.add_column(name, max_width=_WIDTH, overflow="ellipsis", no_wrap=name != "completion")
        for row in rows:
            table.add_row(
                *(Text(visible(str(row[name]))) for name in ("prompt", "completion", "tokens", "finish")),
                f"{row['reward']:.3g}",
            )
        console = Console()
        with console.capture() as capture:
            console.print(table)
        progress_bar = trainer.progress_bar_callback
        (print if progress_bar is None else progress_bar.print)(capture.get().rstrip())


def _row(step: int, rollout: Rollout) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_id": rollout.prompt.prompt_id,
        "prompt": rollout.prompt.text,
        "completion": rollout.completion.text,
        "tokens": rollout.completion.num_tokens,
        "finish": rollout.completion.finish_reason,
        "reward": rollout.reward,
        **rollout.extra,
    }


def _same_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reward functions may have logged a column of some prompts alone: it is null in the other rows."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return [columns | row for row in rows]


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(str(value).replace("|", "\\|").replace("\n", " ") for value in row.values()) for row in rows]
    return "\n".join(lines)
