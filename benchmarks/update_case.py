"""Optimizer steps on given groups in a process of its own: how long they take, and how much memory.

Run by the benchmarks of the update phase; prints one line of JSON.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from benchmarks.report import ROOT, note
from benchmarks.update_work import SameBatch, Work, floor_flops, save_update_policy
from lit_grpo.memory import PeakMemory
from lit_grpo.module import GRPOModule
from lit_grpo.rewards import RewardSpec
from lit_grpo.types import SamplingParams
from lit_grpo.update.logprobs.checkpointing import Checkpointing

Figures = dict[str, Any]
TIMED_ROWS = 4  # of TRL's


@dataclass(frozen=True)
class Case:
    """What one process measures.

    ``size`` is tokens a micro-batch for lit_grpo, rows a micro-batch for TRL. ``share`` lays completions out behind a
    common prompt. ``warm`` counts gradients and the optimizer's state as part of the idle process.
    """

    system: Literal["lit_grpo", "trl"]
    size: int
    work: Work
    policy: str = "34M"
    device: str = "cpu"
    repeats: int = 1
    checkpointing: Checkpointing = False
    share: bool = True
    warm: bool = False


class Probe(pl.Callback):
    """Times the training steps but the first, and notes the peak of memory; ``warm`` leaves the first out of it."""

    def __init__(self, device: str, warm: bool) -> None:
        self.peak, self.warm = PeakMemory(torch.device(device)), warm
        self.device, self.seconds = device, list[float]()

    def begin(self) -> None:
        """The process is idle."""
        gc.collect()
        self.idle_gib = self.peak.current_gib()
        self.peak.reset()

    def clock(self) -> float:
        """Return the time when the device has finished."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Model and optimizer are loaded."""
        self.begin()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A step begins."""
        if self.warm and batch_idx == 1:
            self.begin()
            weights = [weight for weight in pl_module.parameters() if weight.requires_grad and weight.grad is None]
            self.idle_gib += sum(weight.nbytes for weight in weights) / 2**30  # gradients, freed between steps
        self.began = self.clock()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """A step has ended."""
        self.seconds.append(self.clock() - self.began)

    def figures(self) -> dict[str, Any]:
        """Return what was measured."""
        return {"seconds": self.seconds[1:], "peak_mib": (self.peak.peak_gib() - self.idle_gib) * 1024}


def run_lit_grpo(case: Case, folder: str) -> dict[str, Any]:
    """Steps of a real fit."""
    module = GRPOModule(
        policy=folder,
        rewards=[RewardSpec("lit_grpo.rewards.exact_match")],
        num_generations=max(case.work.group_size, 2),
        sampling=SamplingParams(max_tokens=case.work.limit),
        max_tokens_per_micro_batch=case.size,
        gradient_checkpointing=case.checkpointing,
        optimizer=partial(torch.optim.AdamW, fused=True),
    )
    probe = Probe(case.device, case.warm)
    callbacks: list[pl.Callback] = [probe] if case.share else [PlainRows(), probe]
    trainer = pl.Trainer(
        accelerator="gpu" if case.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if case.device == "cuda" else "32-true",
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, train_dataloaders=SameBatch(case.work, 1 + case.repeats))
    return probe.figures() | {"floor_tflop": floor_flops(module.policy, case.work) / 1e12}


class PlainRows(pl.Callback):
    """Makes the module lay out each completion behind a prompt of its own."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch."""
        assert isinstance(pl_module, GRPOModule)
        pl_module.settings.shares_prefix = False


def run_trl(case: Case, folder: str) -> dict[str, Any]:
    """TRL's own preparation, loss and backward, micro-batch after micro-batch, and AdamW.

    All of TRL's micro-batches are padded to one shape, so the first ``TIMED_ROWS`` rows of a group are timed and the
    time is scaled to all.
    """
    trainer, rows = _trl_trainer(case, folder)
    model: Any = trainer.model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.train()
    probe = Probe(case.device, warm=False)
    per_step = trainer.args.steps_per_generation
    timed = min(per_step, max(1, TIMED_ROWS // case.size))
    probe.begin()
    for repeat in range(1 + case.repeats):
        probe.began = probe.clock()
        for number in range(1 if repeat == 0 else timed):
            trainer._step = number
            loss = trainer._compute_loss(model, trainer._prepare_inputs(rows))
            loss.backward()
        spent = probe.clock() - probe.began
        probe.began = probe.clock()
        optimizer.step()
        optimizer.zero_grad()
        probe.seconds.append(spent * per_step / timed + probe.clock() - probe.began)
    return probe.figures()


def _trl_trainer(case: Case, folder: str) -> tuple[Any, list[dict[str, str]]]:
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    rollouts = [rollout for group in case.work.groups() for rollout in group.rollouts]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        per_device_train_batch_size=case.size,
        gradient_accumulation_steps=len(rollouts) // case.size,
        num_generations=case.work.group_size,
        max_completion_length=case.work.limit,
        use_cpu=case.device == "cpu",
        bf16=case.device == "cuda",
        report_to=[],
        gradient_checkpointing=bool(case.checkpointing),
    )

    def hand_over(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [list(rollout.prompt.token_ids) for rollout in rollouts],
            "completion_ids": [rollout.completion.token_ids_T.tolist() for rollout in rollouts],
            "logprobs": [rollout.completion.logprobs_T.tolist() for rollout in rollouts],
        }

    rows = [{"prompt": "1+1="} for _ in rollouts]
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=[lambda **_: [rollout.reward for rollout in rollouts]],  # pyright: ignore[reportArgumentType]
        args=config,
        train_dataset=Dataset.from_list(rows),
        rollout_func=hand_over,
    )
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    return trainer, rows


def matmul_tflops(device: str) -> float:
    """The best rate of a large matrix product, in the dtype that the steps multiply in."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = 8192 if device == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    probe, best = Probe(device, warm=False), 0.0
    for _ in range(8):
        began = probe.clock()
        left @ right
        best = max(best, 2 * size**3 / (probe.clock() - began) / 1e12)
    return best


def main(argument: str) -> None:
    """Run the case that is given as JSON."""
    fields = json.loads(argument)
    case = Case(**(fields | {"work": Work(**fields["work"])}))
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save_update_policy(Path(folder), case.policy, case.work.vocab_size, case.device)
        figures = {"lit_grpo": run_lit_grpo, "trl": run_trl}[case.system](case, folder)
    print(json.dumps(figures | {"matmul_tflops": matmul_tflops(case.device)}))


def measure(case: Case, environment: Mapping[str, str] | None = None) -> Figures:
    """Run a case in a fresh process and return its figures.

    Args:
        case: What to measure.
        environment: Variables of the process beside those of this one.
    """
    note(f"{case.system}, {case.size} a micro-batch, {case.policy}, {case.work}")
    command = [sys.executable, "-m", "benchmarks.update_case", json.dumps(asdict(case))]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | (environment or {}), capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"The case {case} failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    main(sys.argv[1])
