"""Where a run keeps what it makes, and its metrics as one table."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only


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


class MetricsCSV(Logger):
    """Write metrics to a CSV file with one row a step, whatever logged it and when.

    Lightning's own CSVLogger writes a row a call and deletes the file of the run that it resumes. Here a
    resumed run goes on with the file: rows from its first step on are replaced.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._columns = ["step"]
        self._rows: list[dict[str, Any]] = []
        self._written_bytes = 0  # what holds the header and all rows but the last
        self._started = False

    @property
    def name(self) -> str:
        """Of the run."""
        return self.path.parent.name

    @property
    def version(self) -> str:
        """Runs have names, not versions."""
        return ""

    @property
    def save_dir(self) -> str:
        """Folder of the file."""
        return str(self.path.parent)

    @property
    def log_dir(self) -> str:
        """Folder of the file."""
        return self.save_dir

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The config is saved beside the file already."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add metrics to the row of ``step``."""
        step = step or 0
        if not self._started:
            self._resume(step)
        if not self._rows or self._rows[-1]["step"] != step:
            self._written_bytes = self.path.stat().st_size if self._written_bytes else 0
            self._rows.append({"step": step})
        if new := sorted(metrics.keys() - set(self._columns)):
            self._columns += new
            self._written_bytes = 0
        self._rows[-1] |= metrics
        self._write()

    def _resume(self, first_step: int) -> None:
        """Take over the rows before ``first_step`` of a file that is there."""
        self._started = True
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self._rows = [row | {"step": int(row["step"])} for row in reader if int(row["step"]) < first_step]
                self._columns = list(reader.fieldnames or self._columns)

    def _write(self) -> None:
        """Write the last row again, or all rows where the columns have changed."""
        whole = self._written_bytes == 0
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        if whole:
            writer.writeheader()
            writer.writerows(self._rows[:-1])
            head = text.getvalue().encode()
            self._written_bytes = len(head)
        writer.writerow(self._rows[-1])
        data = text.getvalue().encode()
        with self.path.open("wb" if whole else "r+b") as file:
            if not whole:
                file.seek(self._written_bytes)
                file.truncate()
            file.write(data)
