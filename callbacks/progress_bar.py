"""Shows the progress of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lit_grpo.checks import total_updates
from lit_grpo.display.lines import Field, as_plain, as_text, count, duration
from lit_grpo.display.screen import Screen
from lit_grpo.module import GRPOModule
from lit_grpo.plugins import CoreListener
from lit_grpo.process.terminal import visible
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.types import Completion

PLAIN_EVERY_S = 60.0
"""Seconds between the plain lines of a long rollout, where live lines are not possible."""
COUNTED = {TrainerFn.FITTING: "updates", TrainerFn.PREDICTING: "batches predicted", TrainerFn.TESTING: "batches tested"}
UNDER_WAY = {
    "reward": "waiting for rewards",
    "update": "learning",
    "weight sync": "sending weights",
    "checkpoint": "saving a checkpoint",
}
"""Phases of a run in words; any other phase is called "getting ready"."""
VALIDATED_AT = "update of val/pass@1"
KNOWN = ("reward", "val/pass@1", VALIDATED_AT, "tokens/s", "peak_GiB")


class UpdateCount:
    """Counts the updates of a run, and measures how long they take.

    Attributes:
        done: Updates that have been made.
        ended: When the last of them ended, in seconds of a clock.
    """

    def __init__(self, done: int, total: int | None) -> None:
        self.done, self.total = done, total
        self._first, self._began = done, time.monotonic()
        self.ended = self._began

    @property
    def share(self) -> float | None:
        return None if not self.total else self.done / self.total

    @property
    def seconds_left(self) -> float:
        """Seconds until the last update at the speed so far, with validation; NaN before the first, after the last."""
        if self.total is None or self.done in (self._first, self.total):
            return math.nan
        each = (self.ended - self._began) / (self.done - self._first)
        return max((self.total - self.done) * each - (time.monotonic() - self.ended), 0.0)

    @property
    def text(self) -> str:
        return str(self.done) if self.total is None else f"{self.done}/{self.total}"


@dataclass
class RolloutCount:
    """Tokens and completions of a rollout so far.

    Args:
        ledger: The completions in work.
        expected: The mean length of completions in the last rollout of the kind; NaN if there was none.
        kind: Phase of the rollout: ``rollout`` or ``validation``.
        began: Time of the rollout's beginning, in seconds of a clock.
        tokens: Tokens that were sampled.
        done: Completions that have ended.
        done_tokens: Sampled tokens of these.
    """

    ledger: RequestLedger
    expected: float
    kind: str = "rollout"
    began: float = field(default_factory=time.monotonic)
    tokens: int = 0
    done: int = 0
    done_tokens: int = 0

    @property
    def total(self) -> int:
        return self.done + len(self.ledger.decoding) + self.ledger.num_queued + len(self.ledger.awaiting_env)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(time.monotonic() - self.began, 1e-6)

    @property
    def seconds_left(self) -> float:
        """A rough estimate at the speed so far, if completions are as long as in the last rollout; NaN at first.

        Without a last rollout, completions are expected to be as long as those that have ended.
        """
        expected = self.expected
        if math.isnan(expected) and self.done:
            expected = self.done_tokens / self.done
        tokens = max(self.total * expected - self.tokens, self.total - self.done)
        return tokens / self.tokens_per_s if self.tokens and not math.isnan(expected) else math.nan

    @property
    def _waiting(self) -> str:
        """Number of completions that wait for their environment, and the time of the longest wait."""
        away = len(self.ledger.awaiting_env)
        if not away:
            return ""
        return f"{away} of {self.total} wait for their environment, longest {duration(self.ledger.longest_env_wait_s)}"

    def fields(self, name: str, memory: str = "") -> list[Field]:
        """Return the fields of a line.

        The bar is left out first, then memory, slots, tokens/s and what waits, and the time to go.
        """
        return [
            Field(f"{name} {self.done}/{self.total} completions", 0, "cyan"),
            Field("", 5, "cyan", share=self.done / max(self.total, 1)),
            Field(f"{len(self.ledger.decoding)}/{self.ledger.num_slots} slots", 3),
            Field(self._waiting, 2),
            Field(f"{count(self.tokens_per_s)} tokens/s", 2),
            Field(_time(self.seconds_left, "to go"), 1),
            Field(memory, 4),
        ]


class GRPOProgressBar(ProgressBar, CoreListener):
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
        """Return the metrics logged with ``prog_bar=True``, and the newest pass@1 with its update."""
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
            kind = "rollout" if self.trainer.training else "validation"
            self._rollout = RolloutCount(ledger, self._mean_tokens.get(kind, math.nan), kind)
            self._next_line = time.monotonic() + PLAIN_EVERY_S

    def on_step(self, events: StepEvents) -> None:
        if self._rollout is not None:
            self._rollout.tokens += events.num_tokens
            if time.monotonic() > self._next_line:
                self._tell_rollout(self._rollout)

    def on_completion(self, completion: Completion) -> None:
        if self._rollout is not None:
            self._rollout.done += 1
            self._rollout.done_tokens += completion.num_sampled

    def on_rollout_end(self, failed: bool) -> None:
        if self._rollout is not None and self._rollout.done:
            self._mean_tokens[self._rollout.kind] = self._rollout.done_tokens / self._rollout.done
        self._rollout = None

    def _tell_rollout(self, rollout: RolloutCount) -> None:
        self._next_line = time.monotonic() + PLAIN_EVERY_S
        if not self.screen.is_terminal:
            name = f"{rollout.kind} after update {self.trainer.global_step}:"
            print(as_plain(rollout.fields(name)), flush=True)

    # ---- updates ----------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._updates = UpdateCount(trainer.global_step, _total(trainer, pl_module))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._tell_update()
        self._show()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._updates.done, self._updates.ended = trainer.global_step, time.monotonic()
        self._untold = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
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
            self._updates.done, self._updates.ended = self._updates.done + 1, time.monotonic()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print a line, unless Lightning prints a table."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._scores = {name: value for name, value in metrics.items() if name == "val/pass@1"}
        self._scores |= {VALIDATED_AT: float(trainer.global_step)} if self._scores else {}
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
    if isinstance(module, GRPOModule):
        return total_updates(trainer, module.settings.updates_per_batch)
    return trainer.max_steps if trainer.max_steps >= 0 else None


def run_fields(name: str, updates: UpdateCount, metrics: Mapping[str, float], passes: str = "") -> list[Field]:
    """Return the fields of the run's line.

    The rule of passing is left out first, then further metrics, the bar, pass@1, the reward and the time left.
    """
    share, passed = updates.share, pass_text(metrics)
    return [
        Field(f"{name} {updates.text}", 0, "bold"),
        *([] if share is None else [Field("", 4, "green", share=share)]),
        Field(reward_text(metrics), 2),
        Field(passed, 3),
        Field(f"({passes})" if passed and passes else "", 6),
        Field(_time(updates.seconds_left, "left"), 1),
        *(Field(text, 5) for text in _others(metrics)),
    ]


def function_fields(functions: Mapping[str, float]) -> list[Field]:
    """Return the fields of the line with the rewards by function; the last functions are left out first."""
    return [Field("rewards", 0, "dim"), *(Field(text, rank) for rank, text in enumerate(_each(functions), start=1))]


def phase_fields(phase: str, seconds: float, metrics: Mapping[str, float]) -> list[Field]:
    """Return the fields of a phase that counts nothing, with figures of the last update; memory is left out first."""
    return [
        Field(f"{UNDER_WAY.get(phase, 'getting ready')} {duration(seconds)}", 0, "cyan"),
        Field(speed_text(metrics), 1),
        Field(memory_text(metrics), 2),
    ]


def update_fields(
    updates: UpdateCount, metrics: Mapping[str, float], functions: Mapping[str, float] = {}
) -> list[Field]:
    """Return the fields of an update in a plain line."""
    texts = (
        *(f"update {updates.text}", reward_text(metrics, functions), pass_text(metrics), speed_text(metrics)),
        *(memory_text(metrics), _time(updates.seconds_left, "left"), *_others(metrics)),
    )
    return [Field(text) for text in texts]


def reward_text(metrics: Mapping[str, float], functions: Mapping[str, float] = {}) -> str:
    """Return ``reward 0.812``, or with several functions ``reward 0.812 (correct 0.75, short 0.124)``."""
    if math.isnan(metrics.get("reward", math.nan)):
        return ""
    each = f" ({', '.join(_each(functions))})" if len(functions) > 1 else ""
    return f"reward {metrics['reward']:.3g}{each}"


def pass_text(metrics: Mapping[str, float], passes: str = "") -> str:
    """Return ``pass@1 94.1%``, of validation prompts, or ``pass@1 (correct >= 1) 94.1%``.

    Beside metrics of a later update it is ``pass@1 94.1% at update 10``.
    """
    name = f"pass@1 ({passes})" if passes else "pass@1"
    at = f" at update {metrics[VALIDATED_AT]:.0f}" if VALIDATED_AT in metrics else ""
    return "" if math.isnan(metrics.get("val/pass@1", math.nan)) else f"{name} {metrics['val/pass@1']:.1%}{at}"


def speed_text(metrics: Mapping[str, float]) -> str:
    return f"{count(metrics['tokens/s'])} tokens/s" if "tokens/s" in metrics else ""


def memory_text(metrics: Mapping[str, float]) -> str:
    """Return ``0.51 GiB``, the peak of the last update."""
    return f"{metrics['peak_GiB']:.3g} GiB" if "peak_GiB" in metrics else ""


def _each(functions: Mapping[str, float]) -> list[str]:
    """Return the mean of each function; one that applied to no completion has none."""
    return [f"{visible(name)} {'none' if math.isnan(value) else f'{value:.3g}'}" for name, value in functions.items()]


def _time(seconds: float, what: str) -> str:
    return "" if math.isnan(seconds) else f"{duration(seconds)} {what}"


def _others(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.3g}" for name, value in metrics.items() if name not in KNOWN]
