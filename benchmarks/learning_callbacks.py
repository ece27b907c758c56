"""Callbacks of learning benchmarks: a clock, cores, an order of groups, and a generator with old weights."""

from __future__ import annotations

import copy
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.processes import stay_on
from lit_grpo.memory import PeakMemory
from lit_grpo.module import GRPOModule
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.policy.weights import PolicyWeights, digest
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.slots import SlotGenerator
from lit_grpo.rollout.weights.tensors import SyncReport
from lit_grpo.types import RolloutGroup

CLOCK, POLICIES = "clock.jsonl", "policies"
KEPT = 6  # policies of a run, and that of its start


class Stopwatch:
    """Seconds, CPU seconds and peak memory since it was made, without what happened while it stood still."""

    def __init__(self) -> None:
        self._memory = PeakMemory(torch.device("cpu"))
        self._idle_gib = self._memory.current_gib()
        self._memory.reset()
        self._most_gib = 0.0
        self._began: tuple[float, ...] = _now()
        self._stopped: tuple[float, float] | None = None

    def read(self) -> dict[str, float]:
        """Return all of it, and the memory that was in use when it was made."""
        wall_s, cpu_s = (now - began for now, began in zip(self._stopped or _now(), self._began, strict=True))
        if self._stopped is None:
            self._note_peak()
        return {"wall_s": wall_s, "cpu_s": cpu_s, "peak_gib": self._most_gib, "idle_gib": self._idle_gib}

    def stop(self) -> None:
        """Stand still."""
        self._note_peak()
        self._stopped = _now()

    def go_on(self) -> None:
        """Run again."""
        assert self._stopped is not None
        paused = (now - stopped for now, stopped in zip(_now(), self._stopped, strict=True))
        self._began = tuple(began + pause for began, pause in zip(self._began, paused, strict=True))
        self._stopped = None
        self._memory.reset()

    def _note_peak(self) -> None:
        self._most_gib = max(self._most_gib, self._memory.peak_gib())


class Clock(pl.Callback):
    """Write the seconds and the CPU seconds since training began after every update, validations left out."""

    def __init__(self) -> None:
        self._watch = Stopwatch()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin."""
        self._watch = Stopwatch()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop."""
        self._watch.stop()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on."""
        self._watch.go_on()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write."""
        write_time(self._watch, trainer.global_step)


class KeepPolicies(Clock):
    """A clock that keeps some of the policies too, in a folder each, while it stands still."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the policy of the start, and begin."""
        self._keep(trainer, pl_module)
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write, and keep."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._watch.stop()
        self._keep(trainer, pl_module)
        self._watch.go_on()

    def _keep(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, GRPOModule)
        if is_kept(trainer.global_step, trainer.max_steps):
            module.policy.save_pretrained(policy_folder(trainer.global_step))


def is_kept(update: int, updates: int) -> bool:
    """Whether the policy after this update is one of those that are kept: the first, the last and some between."""
    return update * KEPT % updates == 0


def policy_folder(update: int) -> Path:
    """Where the policy of this update is kept in the folder of its run."""
    return Path(POLICIES) / f"{update:04d}"


def write_time(watch: Stopwatch, update: int, **more: float) -> None:
    """Add a line to the clock's file."""
    with Path(CLOCK).open("a") as file:
        file.write(json.dumps({"update": update, **watch.read(), **more}) + "\n")


class TokenBudget(pl.Callback):
    """End a run at its first validation after so many tokens have been generated, those of validations not counted.

    Those that a teacher has sampled count.

    Args:
        tokens: Number of generated tokens at which the run ends.
    """

    def __init__(self, tokens: int) -> None:
        self._left = float(tokens)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count."""
        metrics = trainer.callback_metrics
        self._left -= float(metrics["rollout/tokens"]) + float(metrics.get("scope/teacher_tokens", 0.0))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End."""
        trainer.should_stop |= self._left <= 0


class ServersApart(pl.Callback):
    """Keep the servers that a run starts on the first of its cores, and the run on the others."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stay on the core that servers are to inherit."""
        stay_on(self._cores[:1])

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Leave it to them."""
        stay_on(self._cores[1:] or self._cores)


class ShortFirst(pl.Callback):
    """Learn from the groups of a batch in the order of their mean lengths, whatever order they were sampled in."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sort before each batch is trained on."""
        assert isinstance(pl_module, GRPOModule)
        learn = pl_module.learner.learn

        def learn_sorted(groups: Any, rewards: Any = None) -> dict[str, float]:  # rewards are in the order of groups
            return learn(sorted(groups, key=_mean_length))

        pl_module.learner.learn = learn_sorted


def _mean_length(group: RolloutGroup) -> float:
    return statistics.fmean(rollout.completion.num_tokens for rollout in group.rollouts)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class StaleSlots(SlotGenerator):
    """Samples with the policy's weights of ``lag`` updates ago; in the first ``lag`` updates with those of the start.

    It decodes on a copy of the policy. Tokens carry the version that has sampled them.

    Args:
        lag: Age of the sampling weights in updates.
        num_slots: Number of completions decoded at a time.
    """

    def __init__(self, lag: int, num_slots: int = 64) -> None:
        super().__init__(num_slots)
        self.lag = lag
        self._sent: deque[tuple[int, Mapping[str, torch.Tensor]]] = deque(maxlen=lag + 1)

    def start(self, policy: PolicySpec) -> None:
        """Bind a copy."""
        self._trained = policy.module
        super().start(replace(policy, module=copy.deepcopy(policy.module)))

    def weights(self) -> PolicyWeights:
        """Those of the policy that is trained."""
        return PolicyWeights(self._trained, merged=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Keep what has come, and take what came ``lag`` updates ago."""
        if not self._sent or self._sent[-1][0] != version:
            self._sent.append((version, {name: tensor.detach().clone() for name, tensor in weights}))
        sampled_by, old = self._sent[0]
        with torch.no_grad():
            for name, tensor in self.policy.named_parameters():
                tensor.copy_(old[name])
        super().load_weights(self.policy.named_parameters(), sampled_by)
        self.version = version
        return SyncReport({name: digest(tensor) for name, tensor in self._sent[-1][1].items()})

    def step(self) -> StepEvents:
        """Decode: tokens carry the version that samples them, though ``version`` is the last one that was sent."""
        sent = self.version
        self.version = min(sent, self._sent[0][0]) if self._sent else sent
        try:
            return super().step()
        finally:
            self.version = sent
