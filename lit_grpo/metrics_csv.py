"""A run's metrics as one table."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


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

    @property
    @rank_zero_experiment
    def experiment(self) -> Path:
        """The file."""
        return self.path

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
