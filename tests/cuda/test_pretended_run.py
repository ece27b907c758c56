"""Whole runs on the pretended GPU, through Lightning's Trainer: rollouts, updates, weight sync, memory, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hand_made import make_module, make_trainer

from benchmarks.pretend_cuda import GPU, pretend_cuda
from lit_grpo.callbacks import MemoryMonitor, RolloutScheduler, RunCheckpoint, WeightSync
from lit_grpo.data import PromptDataModule
from lit_grpo.policy.adapters import LoraSettings
from lit_grpo.rewards import RewardSpec
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.types import SamplingParams

Logs = list[dict[str, float]]
SAME = ("reward", "loss", "grad_norm", "entropy", "sampling/logprob_gap_mean", "rollout/num_steps")


class Recorder(pl.Callback):
    """Keeps what is logged, and where the policy is."""

    def __init__(self) -> None:
        self.logs: Logs = []
        self.devices: set[torch.device] = set()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        self.logs.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.devices |= {weight.device for weight in pl_module.policy.parameters()}


def run(
    folder: Path, accelerator: str, precision: Any, max_steps: int, resume: str | None = None, **changes: Any
) -> tuple[Recorder, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of adapters
        options: dict[str, Any] = {
            "rewards": [RewardSpec("lit_grpo.rewards.exact_match")],
            "generator": SlotGenerator(3),
            "num_generations": 4,
            "sampling": SamplingParams(max_tokens=40),
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            "max_grad_norm": 1.0,
        }
        module, recorder = make_module("tiny", **(options | changes)), Recorder()
        trainer = make_trainer(
            RunCheckpoint(1, asynchronous=True), RolloutScheduler(), WeightSync(), MemoryMonitor(), recorder,
            accelerator=accelerator, precision=precision, max_steps=max_steps, max_epochs=-1, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, PromptDataModule("tiny", train=ArithmeticRows(num_rows=8), batch_size=2), ckpt_path=resume)
    return recorder, module


def check_alike(actual: Logs, expected: Logs, tolerance: float) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        names = [name for name in SAME if name in other]
        assert len(names) >= 4
        for name in names:
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), name


@pytest.mark.filterwarnings("ignore:.*CUDA.*Tensor Cores", "ignore:.*The dataloader.*")
@pytest.mark.parametrize(
    ("precision", "changes"),
    [("32-true", {}), ("bf16-mixed", {}), ("bf16-mixed", {"lora": LoraSettings(r=4)}),
     ("bf16-mixed", {"gradient_checkpointing": True})],
    ids=["32-true", "bf16-mixed", "lora", "checkpointing"],
)  # fmt: skip
def test_a_run_resumes_and_learns_as_on_the_cpu(tmp_path: Path, precision: Any, changes: dict[str, Any]) -> None:
    whole, module = run(tmp_path / "cpu", "cpu", precision, 3, **changes)
    with pretend_cuda(free_gib=60, total_gib=80):
        begun, _ = run(tmp_path / "gpu", "cuda", precision, 2, **changes)
        last = tmp_path / "gpu" / "checkpoints" / "last.ckpt"
        resumed, there = run(tmp_path / "gpu", "cuda", precision, 3, str(last), **changes)
        assert begun.devices == resumed.devices == {GPU}
        assert begun.logs[0]["memory/capacity_gib"] == pytest.approx(80)
    kept = torch.load(last, weights_only=False, map_location="cpu")
    assert kept["policy_version"] == 3 and {each.device.type for each in kept["state_dict"].values()} == {"cpu"}
    check_alike([*begun.logs, *resumed.logs], whole.logs, 2e-3)
    for one, other in zip(there.policy.parameters(), module.policy.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-3)
