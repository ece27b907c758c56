"""Where a run keeps what it makes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from lit_grpo.metrics_csv import MetricsCSV


@dataclass(frozen=True)
class RunConfig:
    """Name and place of a run, and who logs it.

    Args:
        name: The run's folder is ``DIR/NAME``: config, metrics.csv, checkpoints, samples and the policy.
        dir: Folder of all runs.
        wandb: Log to Weights & Biases as well: ``online``, ``offline`` (no account or network needed) or
            ``disabled``.
        wandb_project: The project it appears under there.
    """

    name: str = "grpo"
    dir: str = "runs"
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "lit_grpo"

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.dir) / self.name


def prepare_folder(folder: Path, resumes: bool) -> Path | None:
    """Make the run's folder; move one that an earlier run has left out of the way, unless this run resumes it.

    Returns:
        Where the earlier run's folder is now, if there was one.

    Raises:
        ValueError: The folder cannot be written to.
    """
    moved = None
    try:
        if not resumes and (folder / "metrics.csv").exists():
            number = 1
            while (moved := folder.with_name(f"{folder.name}-{number}")).exists():
                number += 1
            folder.rename(moved)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".write-test"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"The run folder {str(folder)!r} is not writable ({error.strerror}); choose another with run.dir."
        ) from error
    return moved


def make_loggers(config: RunConfig) -> list[Logger]:
    """Return the loggers of a run: CSV and TensorBoard, and W&B if asked for."""
    loggers: list[Logger] = [
        MetricsCSV(config.folder / "metrics.csv"),
        TensorBoardLogger(config.dir, name=config.name, version=""),
    ]
    if config.wandb != "disabled":
        os.environ.setdefault("WANDB_SILENT", "true")
        loggers.append(
            WandbLogger(
                name=config.name,
                project=config.wandb_project,
                save_dir=str(config.folder),
                offline=config.wandb == "offline",
            )
        )
    return loggers
