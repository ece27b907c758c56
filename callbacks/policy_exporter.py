"""Saves the trained policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl

from lit_grpo.module import GRPOModule
from lit_grpo.policy.saving import ExportError
from lit_grpo.policy.sharding import rest

from .run_checkpoint import RunCheckpoint


class PolicyExporter(pl.Callback):
    """At the end of training save policy and tokenizer where ``from_pretrained`` loads them.

    Args:
        folder: Where to, within the run's folder.
    """

    def __init__(self, folder: str = "policy") -> None:
        self.folder = folder

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save, also where a resumed run had nothing left to do; an interrupted run has its checkpoint instead.

        Raises:
            ExportError: What was saved is not the policy; the sentence names the run's last checkpoint.
        """
        assert isinstance(pl_module, GRPOModule)
        rest(pl_module.policy)
        if trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            return
        try:
            pl_module.export(Path(trainer.default_root_dir) / self.folder)
        except ExportError as error:
            raise ExportError(f"{error} {_kept(trainer)}") from error


def _kept(trainer: pl.Trainer) -> str:
    """Where what was trained is."""
    folders = [one.folder for one in trainer.callbacks if isinstance(one, RunCheckpoint)]  # pyright: ignore[reportAttributeAccessIssue]
    last = Path(trainer.default_root_dir, *folders, "last.ckpt")
    if not last.exists() and trainer.world_size == 1:
        trainer.save_checkpoint(last)
    return f"The run's last checkpoint is {last}." if last.exists() else "The run has no checkpoint."
