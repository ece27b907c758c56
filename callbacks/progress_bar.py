"""Shows the progress of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lit_grpo.checks import total_updates
from lit_grpo.display.lines import as_plain, as_text
from lit_grpo.display.progress import (
    RolloutCount,
    UpdateCount,
    function_fields,
    memory_text,
    pass_text,
    phase_fields,
    reward_text,
    run_fields,
    update_fields,
)
from lit_grpo.display.screen import Screen
from lit_grpo.module import GRPOModule
from lit_grpo.plugins import Listener
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.types import Completion

PLAIN_EVERY_S = 60.0
"""Seconds between the plain lines of a long rollout, where live lines are not possible."""
COUNTED = {TrainerFn.FITTING: "updates", TrainerFn.PREDICTING: "batches predicted", TrainerFn.TESTING: "batches tested"}


class GRPOProgressBar(ProgressBar, Listener):
    """Show live lines at the foot of the terminal: the progress of the run, and that of its current phase.

    The first line has the updates made of ``trainer.max_steps`` (or of ``max_epochs``), the last batch's reward, the
    newest pass@1 of validation prompts, an estimate of the time left, and other metrics logged with ``prog_bar=True``.
    With several reward functions a line of its own has the mean of each over the last batch.
    During a rollout, for training or validation, the last line has the completions that have ended, the slots in use,
    tokens per second and a rough estimate of the time to go; in other phases, tokens per second and peak memory of the
    last update. On a narrow screen fields are left out, the least important first. Where live lines are not possible (a
    file, a pipe, a batch job, a notebook), there is a plain line for each update, and one a minute in a long rollout.
    Each validation always leaves a line. Only the first rank prints.

    As a :class:`lit_grpo.plugins.Listener` the callback is told of the steps of rollouts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True
        self.screen = Screen()
        self._updates = UpdateCount(0, None)
        self._rollout: RolloutCount | None = None
        self._mean_tokens: dict[str, float] = {}
        self._phase, self._phase_began, self._next_line = "", 0.0, 0.0
        self._metrics: Mapping[str, float] = {}
        self._functions: Mapping[str, float] = {}
        self._scores: dict[str, float] = {}
        self._untold = False  # whether the last batch has ended and its line is not printed yet

    def enable(self) -> None:
        self.is_enabled = True

    def disable(self) -> None:
        """Print nothing; Lightning calls this on all ranks except the first."""
        self.is_enabled = False
        self.screen.hide()

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return the metrics logged with ``prog_bar=True``, and the newest pass@1, perhaps from before the fit."""
        return self._scores | dict(trainer.progress_bar_metrics)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the live lines; the screen asks for them a few times a second, and in the middle of any print."""
        yield from self.lines(options.max_width, options.ascii_only) or ()

    def lines(self, width: int, ascii_only: bool) -> list[Text]:
        """Return the live lines, each of at most ``width`` columns."""
        counted = COUNTED.get(self.trainer.state.fn or TrainerFn.VALIDATING, "batches validated")
        module, rollout, now = self.trainer.lightning_module, self._rollout, time.monotonic()
        lines = [run_fields(counted, self._updates, self._metrics, _passes(module))]
        if len(self._functions) > 1:
            lines.append(function_fields(self._functions))
        phase = module.phases.name if isinstance(module, GRPOModule) else ""
        if phase != self._phase:
            self._phase, self._phase_began = phase, now
        if rollout is not None and phase in ("rollout", "validation"):
            lines.append(rollout.fields(phase, memory_text(self._metrics)))
        else:
            lines.append(phase_fields(phase, now - self._phase_began, self._metrics))
        return [as_text(fields, width, ascii_only) for fields in lines]

    # ---- rollouts ---------------------------------------------------------------------------------

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        if self.is_enabled and self._trainer is not None:
            self._rollout = RolloutCount(ledger, self._mean_tokens.get(self._kind, math.nan))
            self._next_line = time.monotonic() + PLAIN_EVERY_S

    def on_step(self, events: StepEvents) -> None:
        if self._rollout is not None:
            self._rollout.tokens += events.num_tokens
            if time.monotonic() > self._next_line:
                self._tell_rollout(self._rollout)

    def on_completion(self, completion: Completion) -> None:
        if self._rollout is not None:
            self._rollout.end_one(completion.num_sampled)

    def on_rollout_end(self, failed: bool) -> None:
        if self._rollout is not None and self._rollout.done:
            self._mean_tokens[self._kind] = self._rollout.mean_tokens
        self._rollout = None

    @property
    def _kind(self) -> str:
        return "rollout" if self.trainer.training else "validation"

    def _tell_rollout(self, rollout: RolloutCount) -> None:
        self._next_line = time.monotonic() + PLAIN_EVERY_S
        if not self.screen.is_terminal:
            name = f"{self._kind} after update {self.trainer.global_step}:"
            print(as_plain(rollout.fields(name)), flush=True)

    # ---- updates ----------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._updates = UpdateCount(trainer.global_step, _total(trainer, pl_module))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Print the line of the last update, whose metrics are complete by now, and show the next rollout."""
        self._tell_update()
        self._show()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._updates.move(trainer.global_step)
        self._untold = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the line of the final update."""
        self._tell_update()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.screen.hide()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._untold:  # false if the setup failed
            self._tell_update()
        self.screen.hide()

    def _show(self) -> None:
        if self.is_enabled:
            self.screen.show(lambda: self)

    def _tell_update(self) -> None:
        module = self.trainer.lightning_module
        self._metrics = self.get_metrics(self.trainer, module)
        self._functions = module.reward_curves.latest if isinstance(module, GRPOModule) else {}
        if self._untold and self.is_enabled and not self.screen.is_terminal:
            print(as_plain(update_fields(self._updates, self._metrics, self._functions)), flush=True)
        self._untold = False

    # ---- validation, test and predict ---------------------------------------------------------------

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the line of the last update; outside of fit, start to count batches."""
        self._tell_update()
        if trainer.state.fn != TrainerFn.FITTING:
            batches = trainer.num_predict_batches if trainer.predicting else trainer.num_test_batches
            batches = trainer.num_val_batches if trainer.validating else batches
            total = sum(batches) if isinstance(batches, list) else batches
            self._updates = UpdateCount(0, int(total) if math.isfinite(total) else None)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._show()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            self._updates.move(self._updates.done + 1)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print a line, unless Lightning prints a table."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._scores = {name: value for name, value in metrics.items() if name == "val/pass@1"}
        self._metrics = self.get_metrics(trainer, pl_module)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.is_enabled and (fitting or not trainer.validate_loop.verbose):
            scores = {"reward": metrics["val/reward"]} if "val/reward" in metrics else {}
            passed = pass_text(metrics, _passes(pl_module))
            functions = pl_module.held_out_curves.latest if isinstance(pl_module, GRPOModule) else {}
            texts = (f"validation at update {trainer.global_step}", passed, reward_text(scores, functions))
            print("  ".join(filter(None, texts)), flush=True)


def _passes(module: pl.LightningModule) -> str:
    """Return the rule by which a completion passes, such as ``correct >= 1``."""
    return str(module.pass_rule) if isinstance(module, GRPOModule) else ""


def _total(trainer: pl.Trainer, module: pl.LightningModule) -> int | None:
    """Return the updates of the whole run; None if nothing limits them."""
    if isinstance(module, GRPOModule):
        return total_updates(trainer, module.settings.updates_per_batch)
    return trainer.max_steps if trainer.max_steps >= 0 else None
