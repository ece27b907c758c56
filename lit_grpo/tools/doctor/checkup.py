"""All checks in their order, in place of a run's first update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.tools.doctor.checkpoint import check_checkpoint, check_export
from lit_grpo.tools.doctor.logprobs import check_dropout, check_gap
from lit_grpo.tools.doctor.memory import check_memory
from lit_grpo.tools.doctor.patient import Patient
from lit_grpo.tools.doctor.prompts import check_prompts, check_tokenizer
from lit_grpo.tools.doctor.report import Finding, Report
from lit_grpo.tools.doctor.rewards import check_rewards
from lit_grpo.tools.doctor.samples import check_ends, check_generator, check_samples
from lit_grpo.tools.doctor.step import check_step
from lit_grpo.tools.doctor.sync import check_sync

FAULTS = (ValueError, RuntimeError, ArithmeticError, OSError, MemoryError)
"""What a run fails with; anything else is a defect of the check-up."""


class Check(NamedTuple):
    """A check, its name where it fails as a whole, and what has to be there before."""

    name: str
    run: Callable[[Patient], Iterator[Finding]]
    needs: str = ""


CHECKS = (
    Check("prompts", check_prompts),
    Check("tokenizer", check_tokenizer),
    Check("generator", check_generator),
    Check("weight sync", check_sync, "generator"),
    Check("samples", check_samples, "weight sync"),
    Check("end tokens", check_ends, "samples"),
    Check("rewards", check_rewards, "samples"),
    Check("log-prob gap", check_gap, "samples"),
    Check("dropout", check_dropout, "samples"),
    Check("memory", check_memory, "generator"),
    Check("step", check_step, "samples"),
    Check("checkpoint", check_checkpoint),
    Check("export", check_export),
)


class Examined(SystemExit):
    """The check-up is over; the exit code is 1 where something failed."""


class CheckUp(pl.Callback):
    """Examine a run where its first update would be, and end it there.

    Args:
        report: Takes the findings.
        scheduler: The run's.
        sync: The run's.
        folder: For checkpoints, on the disk that the run would write to; None where nothing can be written there.
        folder_error: Why not.
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
        """Examine.

        Raises:
            Examined: Always.
        """
        assert isinstance(pl_module, GRPOModule)
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(data, PromptDataModule)
        patient = Patient(
            trainer, pl_module, data, self._scheduler, self._sync, self.report, self._folder, self._folder_error
        )
        try:
            examine(patient)
        finally:
            self._scheduler.teardown(trainer, pl_module, "fit")
        self.report.close()
        raise Examined(self.report.exit_code)


def examine(patient: Patient) -> None:
    """Make all checks; what one of them needs and did not come about is skipped."""
    broken: set[str] = set()
    for check in CHECKS:
        if check.needs in broken:
            broken.add(check.name)
            patient.report.add(Finding("skip", check.name, f"not looked at, for {check.needs} failed"))
            continue
        try:
            for finding in check.run(patient):
                patient.report.add(finding)
        except FAULTS as error:
            broken.add(check.name)
            patient.report.add(Finding("fail", check.name, " ".join(str(error).split()) or type(error).__name__))
