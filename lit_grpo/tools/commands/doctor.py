"""``python -m lit_grpo doctor``: checks a run's settings in the time of a few updates."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, cast

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lit_grpo.cli.command_line import GROUPS, MISTAKES, LikeFitCLI, cli_arguments, quieten
from lit_grpo.cli.parsing.errors import InputParser, one_sentence, own_frames
from lit_grpo.cli.parsing.mistakes import parse_or_exit
from lit_grpo.cli.parsing.places import with_place
from lit_grpo.cli.parsing.refusals import SETTINGS, check_values, find_checkpoint
from lit_grpo.cli.parsing.sentences import exit_with
from lit_grpo.tools.doctor import CheckResult, CheckUp, Examined, Report
from lit_grpo.training.run_folder import RunConfig, RunFolder

ONE_UPDATE = {
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "min_epochs": None,
    "min_steps": None,
    "max_steps": 1,
    "max_time": None,
    "logger": False,
    "enable_progress_bar": False,
}


class DoctorCLI(LikeFitCLI):
    """Sets up a run as ``fit`` does, on one device and in a temporary folder, and examines it.

    Args:
        folders: Removes the temporary folder at the end.
        report: Report that collects the findings.
        kwargs: Keyword arguments that are passed on to LightningCLI.
    """

    def __init__(self, folders: ExitStack, report: Report, **kwargs: Any) -> None:
        self._folders, self._report = folders, report
        self._disk: Path | None = None
        self._disk_error = ""
        super().__init__(RunFolder(), **kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; name all mistakes that this finds."""
        command, *given = args
        parse_or_exit(lambda those: super(DoctorCLI, self).parse_arguments(parser, [command, *those]), given)

    def before_instantiate_classes(self) -> None:
        """Check the settings, and make a temporary folder on the run's disk the folder of everything."""
        settings = self._settings
        check_values(settings, GROUPS)
        find_checkpoint(settings)
        for check, instead in SETTINGS:
            try:
                check(settings, True)
            except ValueError as error:
                self._fail(error, "W&B" if "run.wandb" in instead else "settings")
                for name, value in instead.items():  # so that the rest can be examined
                    settings[name] = value
        settings["weights_only"] = True
        self.save_config_callback = None
        for name, value in ONE_UPDATE.items():
            settings["trainer"][name] = value
        try:
            folder = self._scratch(_existing(RunConfig(**settings["run"]).folder.absolute().parent))
            self._disk = folder
        except OSError as error:
            self._disk_error = f"nothing can be written to run.dir {settings['run']['dir']!r} ({error.strerror})"
            folder = self._scratch(None)
        settings["trainer"]["default_root_dir"] = str(folder)

    def _scratch(self, parent: Path | None) -> Path:
        return Path(self._folders.enter_context(tempfile.TemporaryDirectory(prefix=".doctor-", dir=parent)))

    def instantiate_classes(self) -> None:
        """Make the objects; if one cannot be made, try each group of settings by itself, and end."""
        try:
            super().instantiate_classes()
        except MISTAKES:
            parser, settings = self._parser(self.subcommand), self._settings
            for group in [name for name in (*GROUPS, "trainer") if name in settings]:  # a class without fields is none
                try:
                    parser.instantiate_classes(Namespace({group: settings[group]}))
                except MISTAKES as error:
                    self._fail(error)
            if not self._report.names("fail"):  # none fails by itself
                raise
            self._end()

    def _fail(self, error: Exception, name: str = "settings") -> None:
        finding = CheckResult("fail", name, one_sentence(str(error)) + own_frames(error))
        if finding not in self._report.findings:  # data and policy both read the policy's folder
            self._report.add(finding)

    def _end(self) -> NoReturn:
        self._report.close()
        raise Examined(self._report.exit_code)

    def before_fit(self) -> None:
        """Find all mistakes that ``fit`` refuses; if there is none, replace the callbacks by the check-up.

        Only the callbacks that make rollouts stay; the others would write files.
        """
        broken: set[str] = set()
        for stage in self._stages(self._settings.get("ckpt_path")):
            if broken.intersection(stage.needs):
                broken.add(stage.name)
                continue
            try:
                stage.run()
            except MISTAKES as error:
                broken.add(stage.name)
                self._fail(error)
        if broken:
            self._end()
        name = type(cast(Any, self.model).generator).__name__
        self._report.add(CheckResult("pass", "settings", f"data, rewards, policy, optimizer and {name} can be set up"))
        folder = None if self._disk is None else self._disk / self._settings["checkpoint"]["folder"]
        scheduler, sync = (self._get(self.config_init, name) for name in ("rollout", "weight_sync"))
        checkup = CheckUp(self._report, scheduler, sync, folder, self._disk_error)
        cast(Any, self.trainer).callbacks = [checkup, scheduler, sync]


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(one for one in (folder, *folder.parents) if one.exists())


def main(arguments: Sequence[str]) -> NoReturn:
    """Examine the run that ``fit`` would start; exit with 0, with 1 if a check failed, with 2 on a mistake."""
    quieten()
    try:
        with ExitStack() as folders:
            DoctorCLI(folders, Report(), **cli_arguments(["fit", *arguments]))
    except MISTAKES as error:
        if os.environ.get("LIT_GRPO_TRACEBACK"):
            raise
        exit_with(
            f"{with_place(one_sentence(str(error)), InputParser.given)}{own_frames(error)}\n"
            "(LIT_GRPO_TRACEBACK=1 shows where)"
        )
    raise AssertionError("a check-up ends in Examined")
