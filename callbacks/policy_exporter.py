"""Saves the trained policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl

from lit_grpo.checkpoints import fault_of, read_state
from lit_grpo.module import GRPOModule
from lit_grpo.policy.saving import BrokenPolicyError, ExportError

from .run_checkpoint import RunCheckpoint


class PolicyExporter(pl.Callback):
    """Save policy and tokenizer at the end of training, for ``from_pretrained``.

    Args:
        folder: Folder of the saved policy, within the run's folder.
    """

    def __init__(self, folder: str = "policy") -> None:
        self.folder = folder

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the policy, even if a resumed run had no update left; an interrupted run has its checkpoint instead.

        Raises:
            ExportError: The saved files do not hold the policy, or its weights are not finite. The message names the
                checkpoint to continue from.
        """
        assert isinstance(pl_module, GRPOModule)
        if trainer.fast_dev_run:  # pyrefly: ignore[missing-attribute]
            return
        try:
            pl_module.export(Path(trainer.default_root_dir) / self.folder)
        except BrokenPolicyError as error:
            raise BrokenPolicyError(f"{error} {_before(trainer, pl_module.policy_version)}") from error
        except ExportError as error:
            raise ExportError(f"{error} {_kept(trainer)}") from error


def _checkpoints(trainer: pl.Trainer) -> Path:
    folders = [one.folder for one in trainer.callbacks if isinstance(one, RunCheckpoint)]  # pyrefly: ignore[missing-attribute]
    return Path(trainer.default_root_dir, *folders)


def _before(trainer: pl.Trainer, version: int) -> str:
    """Name the best checkpoint from before the policy collapsed."""
    path = _checkpoints(trainer) / "best.ckpt"
    if path.exists() and fault_of(path) is None and (update := read_state(path)["policy_version"]) < version:
        return f"{path} is the best one, of update {update}, and its weights are finite."
    return "The run has none from before it."


def _kept(trainer: pl.Trainer) -> str:
    """Name the checkpoint with the trained policy; save it first if there is none."""
    last = _checkpoints(trainer) / "last.ckpt"
    if not last.exists() and trainer.world_size == 1:
        trainer.save_checkpoint(last)
    return f"The run's last checkpoint is {last}." if last.exists() else "The run has no checkpoint."
