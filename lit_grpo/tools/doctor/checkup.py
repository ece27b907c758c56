"""All checks of the check-up in their order, in place of a run's first update."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import lightning.pytorch as pl

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.tools.doctor.checkpoint import check_checkpoint, check_export
from lit_grpo.tools.doctor.largest_step import check_memory
from lit_grpo.tools.doctor.logprobs import check_dropout, check_gap
from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.tools.doctor.prompts import check_prompts, check_tokenizer
from lit_grpo.tools.doctor.report import CheckResult, Report
from lit_grpo.tools.doctor.rewards import check_rewards
from lit_grpo.tools.doctor.samples import check_ends, check_generator, check_samples, check_states, check_sync
from lit_grpo.tools.doctor.step import check_rate, check_step

FAULTS = (ValueError, RuntimeError, ArithmeticError, OSError, MemoryError)
"""Errors of a run; another error is a defect of the check-up."""


class Check(NamedTuple):
    """A check: the name of its finding if it fails as a whole, its function, and the check that must pass before."""

    name: str
    run: Callable[[Patient], Iterator[CheckResult]]
    needs: str = ""


CHECKS = (
    Check("prompts", check_prompts),
    Check("tokenizer", check_tokenizer),
    Check("generator", check_generator),
    Check("weight sync", check_sync, "generator"),
    Check("samples", check_samples, "weight sync"),
    Check("states", check_states, "samples"),
    Check("end tokens", check_ends, "samples"),
    Check("rewards", check_rewards, "samples"),
    Check("log-prob gap", check_gap, "samples"),
    Check("dropout", check_dropout, "samples"),
    Check("memory", check_memory, "generator"),
    Check("learning rate", check_rate),
    Check("step", check_step, "samples"),
    Check("checkpoint", check_checkpoint),
    Check("export", check_export),
)


class Examined(SystemExit):
    """The check-up has ended; the exit code is 1 if a check failed."""


class CheckUp(pl.Callback):
    """Examines a run in place of its first update, and ends it.

    Each check gives findings, which are printed at once as a line each:

    .. code-block:: text

        pass prompts            2048 of 7 to 7 tokens
        warn samples            16 of 12 to 64 tokens in 1.2 s, 40% ended: raise sampling.max_tokens, ...
        fail step               changes no weight: raise model.optimizer.lr, ...
        skip export             not examined, because checkpoint failed

    Args:
        report: Takes and prints the findings.
        scheduler: RolloutScheduler of the run.
        sync: WeightSync of the run.
        folder: A folder for checkpoints on the run's disk; None if nothing can be written there.
        folder_error: The reason for None.
    """

    def __init__(
        self,
        report: Report,
        scheduler: RolloutScheduler,
        sync: WeightSync,
        folder: Path | None,
        folder_error: str = "",
    ) -> None:
        self.report, self._scheduler, self._sync = report, scheduler, sync
        self._folder, self._folder_error = folder, folder_error

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make all checks, and end the run.

        Raises:
            Examined: Always.
        """
        assert isinstance(pl_module, GRPOModule)
        data = trainer.datamodule  # pyrefly: ignore[missing-attribute]
        assert isinstance(data, PromptDataModule)
        patient = Patient(
            trainer=trainer,
            module=pl_module,
            data=data,
            scheduler=self._scheduler,
            sync=self._sync,
            report=self.report,
            folder=self._folder,
            folder_error=self._folder_error,
        )
        for signum in (signal.SIGTERM, signal.SIGHUP):  # a run saves first, but here there is nothing to save
            signal.signal(signum, _end)
        try:
            examine(patient)
        finally:
            self._scheduler.teardown(trainer, pl_module, "fit")
        self.report.close()
        raise Examined(self.report.exit_code)


def _end(signum: int, frame: FrameType | None) -> None:
    raise Examined(128 + signum)


def examine(patient: Patient) -> None:
    """Make all checks; skip a check if the one that it needs failed."""
    broken: set[str] = set()
    for check in CHECKS:
        if check.needs in broken:
            broken.add(check.name)
            patient.report.add(CheckResult("skip", check.name, f"not examined, because {check.needs} failed"))
            continue
        try:
            for finding in check.run(patient):
                patient.report.add(finding)
        except FAULTS as error:
            broken.add(check.name)
            patient.report.add(CheckResult("fail", check.name, " ".join(str(error).split()) or type(error).__name__))
