"""Who is told of a run's metrics: a table of its own, TensorBoard, and W&B."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.tools.dashboard import sections
from lit_grpo.tools.dashboard.tensorboard import hyperparameters, layout, scalars, tag
from lit_grpo.training.run_folder import RunConfig, is_first_rank, versions


def make_loggers(config: RunConfig, settings: Mapping[str, Any], resumes: bool = False) -> list[Logger]:
    """Return the loggers of a run: CSV, TensorBoard if it is installed, and W&B if asked for.

    Args:
        config: Of the run.
        settings: All that the run was told, for the boards; nested.
        resumes: Whether it goes on in its folder, with its own W&B run; otherwise what is there may be another's, who
            is to be moved.
    """
    shown = {**settings, "versions": versions()}
    loggers: list[Logger] = [MetricsCSV(config.folder / "metrics.csv", config.name)]
    if util.find_spec("tensorboard"):
        loggers.append(TensorBoard(config.dir, shown, resumes, name=config.name, version=""))
    elif is_first_rank():
        print("Nothing is written for TensorBoard, which is not installed: the extra is lit_grpo[tensorboard].")
    if config.wandb != "disabled":
        os.environ.setdefault("WANDB_SILENT", "true")
        loggers.append(
            WandB(
                config.folder / "wandb-id",
                resumes,
                name=config.name,
                project=config.wandb_project,
                save_dir=str(config.folder.absolute()),  # W&B's own process may have begun in another folder
                offline=config.wandb == "offline",
                config=shown,
                tags=_tags(settings),
            )
        )
    return loggers


def _tags(settings: Mapping[str, Any]) -> list[str]:
    """What runs are told apart by: policy, objective, generator."""
    model = settings.get("model", {})
    objective, generator = model.get("objective") or {}, model.get("generator") or {}
    tags = [str(model.get("policy", "")).rstrip("/").rsplit("/")[-1], objective.get("loss")]
    tags.append(str(generator.get("class_path", "slots")).rsplit(".")[-1])
    return [tag[:64] for tag in tags if tag]


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
        if self._offline:  # Lightning's says it in an environment variable, which W&B reads once in a process
            self._wandb_init["mode"] = "offline"
        self._wandb_init.pop("anonymous")  # W&B warns of it, whatever it is
        self._id_file = id_file

    @property
    def experiment(self) -> Any:
        """W&B's run.

        Raises:
            ValueError: W&B cannot be reached, or does not take the key.
        """
        from wandb.errors import Error

        begins = self._experiment is None
        try:
            run = super().experiment
        except Error as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ValueError(
                f"W&B does not take the run ({reason}); set run.wandb to offline, and sync later."
            ) from error
        if begins and self._experiment is not None:  # on the first rank
            self._id_file.write_text(f"{run.id}\n")
            for name, best in _with_a_best():
                run.define_metric(name, step_metric="trainer/global_step", step_sync=True, summary=f"last,{best}")
        return run


def _with_a_best() -> Iterator[tuple[str, str]]:
    """Metrics that have a better way, and which: W&B's summary then has the best beside the last."""
    for section in sections():
        for metric in section.metrics:
            if metric.best:
                yield metric.name, metric.best


class TensorBoard(TensorBoardLogger):
    """Lightning's logger, with metrics by the sections of our boards, a layout, and the settings as HParams.

    A run that resumes takes the place of what its folder has of later updates. All values of a step are one event,
    where Lightning's makes one of each, which takes many times as long.

    Args:
        save_dir: Of all runs.
        settings: All that the run was told.
        resumes: Whether the folder may hold updates that are taken again: a killed run's, behind its last checkpoint.
        kwargs: As Lightning's takes them.
    """

    def __init__(self, save_dir: str, settings: Mapping[str, Any], resumes: bool, **kwargs: Any) -> None:
        super().__init__(save_dir, default_hp_metric=False, **kwargs)
        self._settings, self._resumes = settings, resumes

    @property
    def experiment(self) -> Any:
        """TensorBoard's writer."""
        begins = self._experiment is None
        writer = super().experiment
        if begins and self._experiment is not None:  # on the first rank
            writer.add_custom_scalars(layout())
            for summary in hyperparameters(self._settings):
                writer.file_writer.add_summary(summary)
        return writer

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write."""
        if self._resumes and step is not None:
            self._resumes = False
            self._hide(step if "reward" in metrics else step + 1)  # a validation may be all that its step lacks
        writer = self.experiment._get_file_writer()  # which begins a file where the last has been closed
        writer.add_summary(scalars({tag(name): float(value) for name, value in metrics.items()}), step)

    def _hide(self, from_step: int) -> None:
        """Have TensorBoard leave out what other files have from a step on; a file that begins can say so."""
        writer = self.experiment
        writer.close()
        writer.purge_step = from_step
        writer.add_custom_scalars(layout())  # begins a file

    @rank_zero_only
    def save(self) -> None:
        """Write what is left; Lightning's writes settings to a file, which the run's folder has as config.yaml."""
        self.experiment.flush()


class MetricsCSV(Logger):
    """Write metrics to a CSV file with one row a step, whatever logged it and when.

    Lightning's own CSVLogger writes a row a call and deletes the file of the run that it resumes. Here a
    resumed run goes on with the file: rows behind its first step are replaced, and that of its first step is filled:
    a validation may be all that it lacks.

    Args:
        path: The file.
        name: Of the run; by default that of the file's folder.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        super().__init__()
        self.path, self._name = path, name or path.parent.name
        self._columns = ["step"]
        self._rows: list[dict[str, Any]] = []
        self._written_bytes = 0  # what holds the header and all rows but the last
        self._started = False

    @property
    def name(self) -> str:
        """Of the run."""
        return self._name

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
            aside.unlink(missing_ok=True)  # it may be a link to a file of the user's
            with aside.open("xb") as file:
                file.write(data)
            aside.replace(self.path)
            return
        with self.path.open("r+b") as file:
            file.seek(self._written_bytes)
            file.truncate()
            file.write(data)
