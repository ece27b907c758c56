"""Writes the completions of ``predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_grpo.display.cards import near
from lit_grpo.evaluation import EvaluationModule
from lit_grpo.faults import json_line
from lit_grpo.process.files import replace_file
from lit_grpo.process.terminal import counted, say


class CompletionWriter(pl.Callback):
    """Write a JSON line for each completion to ``completions.jsonl`` in the run's folder.

    Lines are written batch by batch. A line has the columns of the data as ``columns``; values that JSON lacks are
    written as text. Of several ranks each writes its own file, ``completions-RANK.jsonl``.

    Args:
        file: Path of the file; by default ``completions.jsonl`` in the run's folder.
    """

    def __init__(self, file: str | None = None) -> None:
        self.file = file

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        path = Path(self.file or Path(trainer.default_root_dir) / "completions.jsonl")
        if trainer.world_size > 1:
            path = path.with_stem(f"{path.stem}-{trainer.global_rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        replace_file(path, b"")
        self._rewards: dict[str, list[float]] = {}
        self._num_scored = self._num_passed = 0

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert isinstance(pl_module, EvaluationModule)
        for row in outputs:
            if pl_module.pass_rule.judges(row.get("rewards", {})):
                self._num_scored += 1
                self._num_passed += pl_module.pass_rule.passes(row["rewards"])
            for name, value in {"reward": row.get("reward"), **row.get("rewards", {})}.items():
                if value is not None:
                    self._rewards.setdefault(name, []).append(value)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json_line(row) for row in outputs)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the path of the completions, their mean rewards, and the share that passed."""
        say(f"Completions written to {near(self.path)}.")
        if self._rewards:
            means = [f"{name} {sum(values) / len(values):.3g}" for name, values in self._rewards.items()]
            num = len(self._rewards.get("reward", ()))
            say(f"Mean over {counted(num, 'completion')}: {', '.join(means)}.")
            assert isinstance(pl_module, EvaluationModule)
            if self._num_scored:
                share = f"{self._num_passed / self._num_scored:.1%}"
                say(f"Passed ({pl_module.pass_rule}): {share} of {counted(self._num_scored, 'completion')}.")
