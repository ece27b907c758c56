"""Prints a card that describes a run before it begins, and a card with its results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from lit_grpo.checkpoints.resuming import PLUGINS, plugin_settings
from lit_grpo.data.module import loaded_prompts
from lit_grpo.data.overlap import REMEDY, shared_validation
from lit_grpo.display.cards import Card, near
from lit_grpo.display.lines import count, duration
from lit_grpo.display.screen import the_console
from lit_grpo.faults.observers import Observer
from lit_grpo.findings.rewards import NoSignalCount
from lit_grpo.module import GRPOModule
from lit_grpo.policy.loading import files_note
from lit_grpo.process.terminal import counted

from .rollout_scheduler import RolloutScheduler
from .run_checkpoint import Stopped, run_name

LIT_GRPO = "python -m lit_grpo"


class RunSummary(Observer):
    """Print a card that describes the run when its policy is loaded, and a card with its results when it ends.

    The second card has the first and last pass@1 of validation prompts and reward (of several reward functions those of
    each), what their curves show to be wrong, the number, time and peak memory of updates, the folder, and commands to
    continue with. A run that is stopped or fails prints it too, after its first update. Both cards are printed even
    with ``trainer.enable_progress_bar=false``. The callback comes before those that start the generator, which may take
    long.
    """

    def __init__(self) -> None:
        self._told = self._trains = self._over = False
        self._passed: list[tuple[int, float]] = []  # (update, pass@1)
        self._rewards: list[tuple[int, float]] = []
        self._functions: list[Mapping[str, float]] = []  # of the first and the last update
        self._held_out: list[Mapping[str, float]] = []  # of the first and the last validation
        self._peak_gib = 0.0
        self._lessons = NoSignalCount()
        self._began, self._version, self._read_at = time.monotonic(), 0, 0

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        if trainer.is_global_zero and not self._told:
            the_console().print(Card("", _facts(trainer, pl_module)))
        self._told = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_validation_start(trainer, pl_module)
        self._version, self._trains = trainer.global_step, True
        self._read_at = trainer.global_step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._read(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read(trainer)

    def _read(self, trainer: pl.Trainer) -> None:
        """Read the metrics of an update, once: Lightning collects all metrics again at each call."""
        if trainer.global_step == self._read_at:
            return
        metrics, self._read_at = trainer.callback_metrics, trainer.global_step
        self._lessons.add(cast(Mapping[str, float], metrics))
        self._peak_gib = max(self._peak_gib, float(metrics.get("peak_GiB", 0.0)))
        if "reward" in metrics:  # there have been rollouts
            self._rewards = [*self._rewards[:1], (trainer.global_step, float(metrics["reward"]))]
        module = trainer.lightning_module
        assert isinstance(module, GRPOModule)
        self._functions = [*self._functions[:1], module.reward_curves.latest]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        self._held_out = [*self._held_out[:1], pl_module.held_out_curves.latest]
        if "val/pass@1" in trainer.callback_metrics:
            self._passed.append((trainer.global_step, float(trainer.callback_metrics["val/pass@1"])))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Print the results; all files of the run are written by now."""
        if stage == "fit":
            self._tell(trainer, pl_module, "done")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Print the results if the run has made an update."""
        stopped = isinstance(exception, Stopped | KeyboardInterrupt)
        self._read(trainer)
        if self._trains and trainer.global_step > self._version:
            self._tell(trainer, pl_module, "stopped" if stopped else "failed")

    def _tell(self, trainer: pl.Trainer, module: pl.LightningModule, how: str) -> None:
        if self._over or not trainer.is_global_zero:
            return
        assert isinstance(module, GRPOModule)
        self._over = True
        folder = Path(trainer.default_root_dir)
        facts = {"updates": self._updates(trainer.global_step) if self._trains else _none(trainer)}
        if self._passed and module.rewards:
            best_update, best = max(self._passed, key=lambda each: each[1])
            passed = _from_to([f"{value:.1%} at update {update}" for update, value in self._passed])
            passed += f" (best {best:.1%} at {best_update})" if len(self._passed) > 2 else ""
            facts[f"pass@1 ({module.pass_rule})"] = passed
        if self._rewards and module.rewards:
            facts["reward"] = _from_to([f"{value:.3g} at update {update}" for update, value in self._rewards])
        facts |= _by_function("by function", self._functions)
        facts |= _by_function("by function, held out", self._held_out)
        schedulers = (each for each in _callbacks(trainer) if isinstance(each, RolloutScheduler))
        of_plugins = [found for each in schedulers for found in each.session.findings()]
        for finding in (*module.reward_curves.findings(), *module.held_out_curves.findings(), *of_plugins):
            facts[finding.name] = finding.sentence
        if self._lessons.is_worth_a_word:
            facts["no signal"] = str(self._lessons)
        if module.observers.failures:
            facts["failed"] = ", ".join(f"{name} {counted(n, 'time')}" for name, n in module.observers.failures.items())
        facts["folder"] = near(folder)
        if _offline(trainer):
            facts["W&B"] = "offline, nothing has been sent"
        the_console().print(Card(f"{run_name(trainer)}: {how}", facts, _commands(trainer, folder, how == "done")))

    def _updates(self, version: int) -> str:
        made = version - self._version
        again = f" (from {self._version} to {version})" if self._version else ""
        memory = f", peak memory {self._peak_gib:.3g} GiB" if self._peak_gib else ""
        return f"{made}{again} in {duration(time.monotonic() - self._began)}{memory}"


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    return trainer.callbacks  # pyrefly: ignore[missing-attribute]


def _by_function(name: str, rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return a line with the first and the last mean of each reward function, where there are several of both."""
    if not rows or len(rows[-1]) < 2:
        return {}
    first = {each: f"{value:.3g} to " for each, value in rows[0].items() if len(rows) > 1}
    return {name: ", ".join(f"{each} {first.get(each, '')}{value:.3g}" for each, value in rows[-1].items())}


def _none(trainer: pl.Trainer) -> str:
    at = f", where the checkpoint is at {trainer.global_step}; raise it to go on" if trainer.global_step else ""
    return f"none, trainer.max_steps is {trainer.max_steps}{at}"


def _facts(trainer: pl.Trainer, module: GRPOModule) -> dict[str, str]:
    """Return the facts of the card that describes a run."""
    weights = list(module.policy.parameters())
    name = module.policy_name if isinstance(module.policy_name, str) else type(module.policy).__name__
    if Path(name).is_absolute():  # shortened to fit a line
        name = near(name) if Path(name).is_relative_to(Path.cwd()) else str(Path("...", *Path(name).parts[-2:]))
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    device = torch.cuda.get_device_name(module.device) if module.device.type == "cuda" else str(module.device)
    data: Any = trainer.datamodule  # pyrefly: ignore[missing-attribute]
    slots = getattr(module.generator, "num_slots", None)
    samples = (
        f"{_rows(data, 'prompt')} x {counted(module.num_generations, 'completion')}",
        "" if slots is None else counted(slots, "slot"),
        type(module.generator).__name__,
    )
    parts = (
        *(samples if module.settings.has_rollouts else [_rows(data, "example")]),
        counted(trainer.max_steps, "update") if trainer.max_steps >= 0 else "",
        f"goes on from update {module.policy_version}" if module.policy_version else "",
    )
    all_weights = module.policy.num_parameters()
    few = f", {count(trained)} of them trained" if trained < all_weights else ""
    ranks = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    return {
        "policy": f"{name}, {count(all_weights)} parameters{few}, {module.policy_dtype} on {ranks}{device}",
        "step": ", ".join(filter(None, parts)),
        **_files(module),
        **_plugins(trainer),
        **_shared(trainer),
        **_rate(module),
        **_counter(module),
        "run": ", ".join([near(trainer.default_root_dir), *_boards(trainer)]),
    }


def _files(module: GRPOModule) -> dict[str, str]:
    note = files_note(module.policy_name, module.policy_dtype, module.policy)
    return {"weights": note} if note else {}


def _shared(trainer: pl.Trainer) -> dict[str, str]:
    shared = shared_validation(loaded_prompts(trainer))
    return {"held out": f"{shared}, so pass@1 tells nothing of new prompts; {REMEDY}"} if shared else {}


def _counter(module: GRPOModule) -> dict[str, str]:
    steps = module.settings.updates_per_batch
    if steps == 1:
        return {}
    return {"metrics": f"one row per batch of {steps} updates, so step is {steps}, {2 * steps}, {3 * steps} ..."}


def _rate(module: GRPOModule) -> dict[str, str]:
    unusual = module.unusual_rate
    return {} if unusual is None else {"learning rate": f"{unusual.figure}; {unusual.remedy}"}


def _rows(data: Any, noun: str) -> str:
    size = getattr(data, "batch_size", None)
    return f"? {noun}s" if size is None else counted(size, noun)


def _plugins(trainer: pl.Trainer) -> dict[str, str]:
    chosen = plugin_settings(trainer)[PLUGINS]
    return {"plugins": ", ".join(chosen)} if chosen else {}


def _boards(trainer: pl.Trainer) -> list[str]:
    """Return the commands and addresses that show the run's curves."""
    boards = []
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            boards.append(f"tensorboard --logdir {near(logger.save_dir)}")
        elif isinstance(logger, WandbLogger) and (url := getattr(logger.experiment, "url", None)):
            boards.append(str(url))
    return boards


def _offline(trainer: pl.Trainer) -> list[Path]:
    """Return W&B's folders of the run in their order, one of each time it was resumed; none if it is not offline."""
    runs = [logger.experiment for logger in trainer.loggers if isinstance(logger, WandbLogger)]
    for run in runs:
        if getattr(run, "offline", False):
            newest = Path(str(run.settings.sync_dir))
            return sorted(newest.parent.glob(f"offline-run-*-{run.id}")) or [newest]  # named by their times
    return []


def _commands(trainer: pl.Trainer, folder: Path, done: bool) -> list[list[str]]:
    """Return commands to continue with; RunCheckpoint has printed how to resume a stopped run."""
    config, policy, last = folder / "config.yaml", folder / "policy", folder / "checkpoints" / "last.ckpt"
    settings = [f"--config {near(config)}"] if config.is_file() else []
    commands = []
    if done and policy.is_dir():
        commands.append(
            [f"{LIT_GRPO} predict", *settings, f"--model.policy {near(policy)}", "--data.predict PROMPTS.jsonl"]
        )
    if (folder / "metrics.csv").is_file():
        commands.append([f"{LIT_GRPO} report", near(folder)])
    if offline := _offline(trainer):
        commands.append(["wandb sync", *map(near, offline)])
    if done and settings and last.exists() and trainer.max_steps > 0:
        more = f"--trainer.max_steps {2 * trainer.max_steps}"
        commands.append([f"{LIT_GRPO} fit", *settings, f"--ckpt_path {near(last)}", more])
    elif last.exists():
        commands.append([f"{LIT_GRPO} export", near(last), "FOLDER"])
    if done and policy.is_dir() and (folder / "metrics.csv").is_file():
        commands.append([f"{LIT_GRPO} finish", near(folder)])
    return commands


def _from_to(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{texts[0]}, {texts[-1]}"
