"""Saves the trained policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl

from lit_grpo.module import GRPOModule
from lit_grpo.policy.sharding import rest


class PolicyExporter(pl.Callback):
    """At the end of training save policy and tokenizer where ``from_pretrained`` loads them.

    Args:
        folder: Where to, within the run's folder.
    """

    def __init__(self, folder: str = "policy") -> None:
        self.folder = folder

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save, also where a resumed run had nothing left to do; an interrupted run has its checkpoint instead."""
        assert isinstance(pl_module, GRPOModule)
        rest(pl_module.policy)
        if not trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            pl_module.export(Path(trainer.default_root_dir) / self.folder)
