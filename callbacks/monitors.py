"""Logs tokens per second, the seconds of each phase, and the memory of rollout and update."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from transformers import PreTrainedModel

from lit_grpo.checks import check_order
from lit_grpo.faults import StallWatch
from lit_grpo.faults.observers import Observer
from lit_grpo.limits import NotNegative, checks_arguments
from lit_grpo.memory import PeakMemory, held_bytes
from lit_grpo.module import GRPOModule
from lit_grpo.policy.loading import embeddings
from lit_grpo.process.files import replace_file
from lit_grpo.types import PromptBatch

from .rollout_scheduler import RolloutScheduler
from .weight_sync import WeightSync


class ThroughputMonitor(Observer):
    """Log tokens and completions so far, completion tokens per second, and the seconds of each phase.

    ``num_tokens`` is TRL's: for each completion the tokens of its prompt, with what ``reset`` of an environment added,
    and those that were sampled. The figures of the rollout, of the update and of both count the completion tokens of
    all ranks, so they can be compared. A step lasts from the end of the step before to its own end, so a validation
    counts as part of the step after it. The callback comes after ``RolloutScheduler`` and ``WeightSync`` in the list;
    the sync counts as part of the update.

    Args:
        stall_minutes: Number of minutes without progress (no decoding step, micro-batch or change of phase) after which
            each waiting rank prints once its phase and what it is doing; nothing is stopped. 0 never prints.
    """

    @checks_arguments("throughput_monitor.")
    def __init__(self, stall_minutes: NotNegative = 30.0) -> None:
        self.stall_minutes = stall_minutes
        self._watch: StallWatch | None = None
        self._totals: dict[str, float] = {"num_tokens": 0.0, "num_completions": 0.0, "time/total_s": 0.0}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_order(trainer, RolloutScheduler, WeightSync, ThroughputMonitor)
        assert isinstance(pl_module, GRPOModule)
        if self.stall_minutes and self._watch is None:
            self._watch = StallWatch(lambda: pl_module.phases, self.stall_minutes, trainer.global_rank)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop_watching()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._watch = None

    def state_dict(self) -> dict[str, float]:
        return dict(self._totals)

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._totals = dict(state_dict)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        self._flops_per_token = _flops_per_token(pl_module.policy)
        self._peak_flops = _peak_flops(pl_module.device, _compute_dtype(trainer, pl_module.policy.dtype))
        pl_module.phases.take()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GRPOModule)
        self._update_start = time.perf_counter()
        self._batch: PromptBatch | None = batch  # until its rollouts have been counted
        if batch.arriving is None:
            self._see(pl_module, batch)
            pl_module.log_dict({name: self._totals[name] + value for name, value in self._sampled.items()})

    def _see(self, module: GRPOModule, batch: PromptBatch) -> None:
        """Count tokens and completions of the rollout on all ranks."""
        rollouts, prefilled, prompts, trained = batch.rollouts, 0, 0, 0
        for group in batch.groups:
            prefilled += len(group.prompt.token_ids)
        for rollout in rollouts:
            trained += rollout.completion.num_sampled
            prompts += len(rollout.completion.request.prompt.token_ids)
            for segment in rollout.completion.segments[:1]:
                prompts += segment.num_tokens if segment.version is None else 0  # said by reset, before an answer
        local = torch.tensor([trained, prompts, len(rollouts), prefilled])
        trained, prompts, completions, self._prefilled = module.ranks.sum(local).tolist()
        sampled = batch.metrics.get("rollout/tokens")
        self._tokens = float(trained if sampled is None else sampled)
        self._sampled = {"num_tokens": self._tokens + prompts, "num_completions": completions}

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Add the rollout to the totals; not earlier, because a batch that stops before is sampled again."""
        assert isinstance(pl_module, GRPOModule)
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if batch.arriving is not None:  # by now all of its groups have arrived
            self._see(pl_module, batch)
        for name, value in self._sampled.items():
            self._totals[name] += value

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GRPOModule)
        rollout_s = batch.metrics.get("time/rollout_s", 0.0)
        update_s = time.perf_counter() - self._update_start - (rollout_s if batch.arriving is not None else 0.0)
        seconds = pl_module.phases.take()
        step_s, aside_s = sum(seconds.values()), {name: seconds.get(name, 0.0) for name in ("validation", "checkpoint")}
        self._totals["time/total_s"] += step_s
        tokens = self._tokens
        trained = float(trainer.callback_metrics["update/tokens"])
        both_s, generation_s = rollout_s + update_s, batch.metrics.get("time/generation_s", rollout_s)
        flops = self._flops_per_token * (self._prefilled + tokens + 3 * trained)
        pl_module.log_dict(
            {
                "time/total_s": self._totals["time/total_s"],
                **({} if batch.arriving is None else self._totals),
                "perf/rollout_tokens_per_s": tokens / generation_s if generation_s else 0.0,  # nothing was decoded
                "perf/update_tokens_per_s": tokens / update_s,
                "perf/tokens_per_s": tokens / both_s,
                "perf/tokens_per_s_per_device": tokens / both_s / trainer.world_size,
                "perf/mfu": flops / (both_s * self._peak_flops * trainer.world_size),
                "time/step_s": step_s,
                "time/update_s": update_s,
                **{f"time/{name}_s": value for name, value in aside_s.items()},
                "time/other_s": max(step_s - both_s - sum(aside_s.values()), 0.0),
            }
        )
        pl_module.log("tokens/s", tokens / both_s, prog_bar=True, logger=False)


class MemoryMonitor(Observer):
    """Log ``memory/rollout_peak_gib`` and ``memory/update_peak_gib`` of every batch, and the memory in use after it.

    The figures are the allocator's on a GPU, and the process's resident set on a CPU. The callback comes after
    :class:`lit_grpo.callbacks.RolloutScheduler` and ``WeightSync`` in the list, so that for it a batch starts when the
    rollout ends, and ends when the update ends.

    After the first update, the first rank writes ``memory.json`` to the run's folder: the bytes of weights, gradients,
    optimizer states and a token in the KV cache, the bytes of everything else that was in use before the first rollout,
    and the estimate of ``fit-check``. ``report`` draws both.

    Attributes:
        forecast: Returns the estimate of ``fit-check`` for this run; None if the run has no settings to estimate from.
    """

    forecast: Callable[[], Mapping[str, Any]] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_order(trainer, RolloutScheduler, WeightSync, MemoryMonitor)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Estimate and measure what is in use before the first rollout."""
        assert isinstance(pl_module, GRPOModule)
        self._peak = PeakMemory(pl_module.device)
        self._estimate, self._other_bytes, self._num_states = None, 0.0, -1
        self._peak.reset()
        if self.forecast is not None and trainer.is_global_zero:
            self._estimate = self.forecast()
        before = held_bytes(pl_module.policy, trainer.optimizers)
        in_use = self._peak.current_gib() * 2**30
        self._other_bytes = max(in_use - before["weights"] - before["optimizer"], 0.0)
        self._peak.reset()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._rollout_gib = self._peak.peak_gib()
        pl_module.log("memory/rollout_peak_gib", self._rollout_gib)
        self._peak.reset()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the update's peak, write the parts after the first step; begin the next rollout phase."""
        update_gib = self._peak.peak_gib()
        pl_module.log_dict({"memory/update_peak_gib": update_gib, **self._peak.state_gib()})
        pl_module.log("peak_GiB", max(self._rollout_gib, update_gib), prog_bar=True, logger=False)
        num_states = sum(len(optimizer.state) for optimizer in trainer.optimizers)
        if num_states != self._num_states and trainer.is_global_zero:  # a batch without a signal takes no step
            self._num_states = num_states
            self._write_parts(trainer, pl_module)
        self._peak.reset()

    def _write_parts(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, GRPOModule)
        budget = getattr(module.generator, "budget", None)
        parts = {
            "device": module.device.type,
            "update": trainer.global_step,
            "measured": {
                **held_bytes(module.policy, trainer.optimizers),
                "other": self._other_bytes,
                "kv_token": None if budget is None else budget.bytes_per_token,
            },
            "forecast": self._estimate,
        }
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)  # with a user's own Trainer it may be missing
        replace_file(folder / "memory.json", (json.dumps(parts, indent=1) + "\n").encode())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.training:
            self._peak.reset()


def _flops_per_token(policy: PreTrainedModel) -> float:
    """Return two FLOPs for each weight that a token is multiplied with: all except the input embeddings."""
    table, *head = embeddings(policy)
    looked_up = table.numel() if head and head[0] is not table else 0
    return 2.0 * (policy.num_parameters() - looked_up)


def _compute_dtype(trainer: pl.Trainer, dtype: torch.dtype) -> torch.dtype:
    names = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-mixed": torch.float16}
    return names.get(str(trainer.precision), dtype)


def _peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the device's FLOPs per second from its data sheet, or else measured in a product of two matrices."""
    if device.type == "cuda" and (known := get_available_flops(device, dtype)):
        return float(known)
    size = 1024
    matrix = torch.randn(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
