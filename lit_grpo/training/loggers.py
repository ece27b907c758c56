"""The loggers of a run: its own CSV file, TensorBoard and W&B, or those that the user names, such as trackio."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.process.files import replace_file
from lit_grpo.process.inputs import read_lines, read_text
from lit_grpo.process.packages import require
from lit_grpo.process.terminal import first_line
from lit_grpo.tools.dashboard import sections
from lit_grpo.tools.dashboard.tensorboard import hyperparameters, layout, scalars, tag
from lit_grpo.training.run_folder import RunConfig, versions


def make_loggers(config: RunConfig, settings: Mapping[str, Any], resumes: bool = False) -> list[Logger]:
    """Return the loggers of a run: CSV, TensorBoard if it is installed, and W&B if ``run.wandb`` asks for it.

    Args:
        config: Name and place of the run.
        settings: All settings of the run, nested; the boards show them.
        resumes: Whether the run continues in its folder, and so in its W&B run. Otherwise the folder may hold another
            run, which will be moved.
    """
    shown = {**settings, "versions": versions()}
    loggers: list[Logger] = [MetricsCSV(config.folder / "metrics.csv", config.name)]
    if util.find_spec("tensorboard"):
        loggers.append(TensorBoard(config.dir, shown, resumes, name=config.name, version=""))
    if config.wandb != "disabled":
        os.environ.setdefault("WANDB_SILENT", "true")
        loggers.append(
            WandB(
                config.folder / "wandb-id",
                resumes,
                name=config.name,
                project=config.wandb_project,
                save_dir=str(config.folder.absolute()),  # W&B's own process may have started in another folder
                offline=config.wandb == "offline",
                config=shown,
                tags=_tags(settings),
            )
        )
    return loggers


def with_table(config: RunConfig, given: Any) -> Any:
    """Return a user's loggers followed by that of the run's ``metrics.csv``, which other commands read.

    Args:
        config: Name and place of the run.
        given: One logger or several; False, or an empty list, is for a run that logs nothing.

    Raises:
        ValueError: Something else is given.
    """
    loggers = given if isinstance(given, list | tuple) else [given] if given else []
    for one in loggers:
        if not isinstance(one, Logger):
            raise ValueError(
                f"trainer.logger holds {one!r}, which is no Lightning Logger; give loggers, such as "
                "lightning.pytorch.loggers.MLFlowLogger(), or leave it out for those of every run."
            )
    return [*loggers, MetricsCSV(config.folder / "metrics.csv", config.name)] if loggers else False


def _tags(settings: Mapping[str, Any]) -> list[str]:
    """Return W&B's tags of a run: policy, objective and generator."""
    model = settings.get("model", {})
    objective, generator = model.get("objective") or {}, model.get("generator") or {}
    tags = [str(model.get("policy", "")).rstrip("/").rsplit("/")[-1], objective.get("loss")]
    tags.append(str(generator.get("class_path", "slots")).rsplit(".")[-1])
    return [tag[:64] for tag in tags if tag]


MAX_ID_BYTES = 1000
RESERVED = 100
"""W&B steps that are written down in advance, so that a killed run has used none of those after them."""


class WandB(WandbLogger):
    """Lightning's logger with the id of the W&B run in a file, so that a resumed run continues the same W&B run.

    W&B counts its own step for each call that logs, and offline it would count from 0 again in a resumed run. So the
    next free step is in the file ``wandb-step``.

    Args:
        id_file: The file of the id; ``wandb-step`` is beside it.
        resumes: Whether to continue the W&B run that the file names, if there is one.
        kwargs: Arguments of Lightning's logger.
    """

    def __init__(self, id_file: Path, resumes: bool, **kwargs: Any) -> None:
        if resumes and id_file.is_file():
            kwargs |= {"id": read_text(id_file, MAX_ID_BYTES).strip(), "resume": "allow"}
        super().__init__(**kwargs)
        if self._offline:  # Lightning sets an environment variable, which W&B reads only once in a process
            self._wandb_init["mode"] = "offline"
        self._wandb_init.pop("anonymous")  # W&B warns of this argument, whatever its value
        self._id_file, self._step_file = id_file, id_file.with_name("wandb-step")
        self._first_step = 0
        if "id" in kwargs and self._step_file.is_file():
            told = read_text(self._step_file, MAX_ID_BYTES).strip()
            if not told.isdecimal():
                raise ValueError(f"{self._step_file} has {told!r}, and not W&B's next step; write that, or delete it.")
            self._first_step = int(told)
        self._free_step = self._first_step

    @property
    def experiment(self) -> Any:
        """W&B's run.

        Raises:
            ValueError: W&B cannot be reached, or refuses the key.
        """
        from wandb.errors import Error

        begins = self._experiment is None
        try:
            run = super().experiment
        except Error as error:
            raise ValueError(
                f"W&B does not take the run ({first_line(error)}); set run.wandb to offline, and sync later."
            ) from error
        if begins and self._experiment is not None:  # on the first rank
            replace_file(self._id_file, f"{run.id}\n".encode())
            if self._first_step > run.step:
                run.log({}, step=self._first_step, commit=False)
            for name, best in _with_a_best():
                run.define_metric(name, step_metric="trainer/global_step", step_sync=True, summary=f"last,{best}")
        return run

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        if self.experiment.step + RESERVED // 2 > self._free_step:
            self._write_step(self.experiment.step + RESERVED)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the log; no more steps are used."""
        if self._experiment is not None:
            self._write_step(self.experiment.step)
        super().finalize(status)

    def _write_step(self, step: int) -> None:
        self._free_step = step
        replace_file(self._step_file, f"{step}\n".encode())


def _with_a_best() -> Iterator[tuple[str, str]]:
    """Yield each metric that has a best value, with ``min`` or ``max``, for W&B's summary."""
    for section in sections():
        for metric in section.metrics:
            if metric.best:
                yield metric.name, metric.best


class TensorBoard(TensorBoardLogger):
    """Lightning's logger with the metrics in the sections of our boards, a layout, and the settings as HParams.

    The events of a resumed run replace those of later updates in its folder. All values of a step are one event, which
    is many times faster than Lightning's one event for each value.

    Args:
        save_dir: The folder of all runs.
        settings: All settings of the run.
        resumes: Whether the folder may hold updates after the run's last checkpoint, which a resumed run repeats.
        kwargs: Arguments of Lightning's logger.
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
        """Write the metrics of a step."""
        if self._resumes and step is not None:
            self._resumes = False
            # The first step may lack only its validation.
            self._hide(step if "reward" in metrics else step + 1)
        writer = self.experiment._get_file_writer()  # begins a new file if the last one has been closed
        writer.add_summary(scalars({tag(name): float(value) for name, value in metrics.items()}), step)

    def _hide(self, from_step: int) -> None:
        """Begin a file that makes TensorBoard hide the events of other files from a step on.

        TensorBoard reads files in the order of their names, which begin with the second that they were begun in. Within
        a second the order is that of no clock, so that this waits for the next one.
        """
        writer = self.experiment
        writer.close()
        time.sleep(1 - time.time() % 1)
        writer.purge_step = from_step
        writer.add_custom_scalars(layout())  # begins a file

    @rank_zero_only
    def save(self) -> None:
        """Flush the events. Lightning's logger would write the settings too, which the run's folder has already."""
        self.experiment.flush()


class Trackio(Logger):
    """Logs to trackio, on this machine or to a Space of the Hugging Face hub, by the names of docs/metrics.md.

    Set it as ``trainer.logger lit_grpo.training.loggers.Trackio``; ``trackio show`` opens the dashboard.

    Args:
        project: Name of the project; its dashboard compares the project's runs.
        name: Name of the run; by default trackio makes one up.
        init: Other arguments of ``trackio.init``, such as ``space_id``, or ``resume: allow`` to continue the run that
            has this name.
    """

    def __init__(self, project: str = "lit_grpo", name: str | None = None, init: dict[str, Any] | None = None) -> None:
        super().__init__()
        require("trackio", "trainer.logger is Trackio, and trackio is not installed; install lit_grpo[trackio].")
        self._init: dict[str, Any] = {"project": project, "name": name, "config": {}, **(init or {})}
        self._run: Any = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Trackio's run."""
        if self._run is None:
            import trackio

            self._run = trackio.init(**self._init)
            self._init |= {"name": self._run.name, "resume": "allow"}  # for metrics that come after the end of a fit
        return self._run

    @property
    def name(self) -> str:
        return self._init["project"]

    @property
    def version(self) -> str | None:
        return self._init["name"]

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._init["config"] |= {name: str(value) for name, value in dict(params or {}).items()}

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.log(dict(metrics), step)

    @rank_zero_only
    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int | None = None) -> None:
        """Log a table, as W&B's logger does."""
        import trackio

        self.experiment.log({key: trackio.Table(columns, data)}, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class MetricsCSV(Logger):
    """Writes metrics to a CSV file with one row for each step, however many calls log its values.

    Lightning's CSVLogger writes a row for each call, and deletes the file of a run that is resumed. Here a resumed run
    continues the file: it fills the row of its first step, which perhaps lacks only the validation, and replaces the
    rows after it. Only the last row is kept in memory; the others are read from the file when the columns change.

    Args:
        path: Path of the CSV file.
        name: The name of the run; by default that of the file's folder.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        super().__init__()
        self.path, self._name = path, name or path.parent.name
        self._columns = ["step"]
        self._last: dict[str, Any] | None = None  # the row of the newest step
        self._written_bytes = 0  # the size of the header and of all rows except the last
        self._started = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        """Empty: runs have names, not versions."""
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @property
    def log_dir(self) -> str:
        return self.save_dir

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run's folder has the config."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add metrics to the row of ``step``."""
        step = step or 0
        if not self._started:
            self._resume(step)
        if self._last is None or self._last["step"] != step:
            self._written_bytes = self.path.stat().st_size if self._written_bytes else 0
            self._last = {"step": step}
        if new := sorted(metrics.keys() - set(self._columns)):
            self._columns += new
            self._written_bytes = 0
        self._last |= metrics
        self._write(self._last)

    def _resume(self, first_step: int) -> None:
        """Go on with an existing file from ``first_step``, whose row may be there already."""
        self._started = True
        rows = self._read()
        if rows:
            self._columns = list(rows[0])
        own = [row for row in rows if int(row["step"]) == first_step]
        self._last = {**own[-1], "step": first_step} if own else None

    def _read(self) -> list[dict[str, Any]]:
        """Read the rows of the file, without an unfinished line at its end and lines that are no rows.

        Raises:
            ValueError: It is no file of metrics.
        """
        if not self.path.exists():
            return []
        lines = (line.decode("utf-8", "replace") for line in read_lines(self.path) if line.endswith(b"\n"))
        reader = csv.DictReader(line.replace("\0", "") for line in lines)
        if reader.fieldnames and reader.fieldnames[0] != "step":
            raise ValueError(
                f"Line 1 of {self.path} begins with {reader.fieldnames[0]!r:.60}, where metrics of a run have 'step'; "
                "move the file elsewhere, or copy it again."
            )
        return [row for row in reader if row["step"].isdecimal() and None not in row and None not in row.values()]

    def _write(self, last: dict[str, Any]) -> None:
        """Write the last row again, or all rows if the columns have changed or the last write has failed."""
        num_head, self._written_bytes = self._written_bytes, 0
        whole = num_head == 0
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        if whole:
            writer.writeheader()
            writer.writerows(row for row in self._read() if int(row["step"]) < last["step"])
            num_head = len(text.getvalue().encode())
        writer.writerow(last)
        data = text.getvalue().encode()
        if whole:
            replace_file(self.path, data)
        else:
            with self.path.open("r+b") as file:
                file.seek(num_head)
                file.truncate()
                file.write(data)
        self._written_bytes = num_head
