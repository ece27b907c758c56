"""Whole runs on the pretended GPU, through Lightning's Trainer: rollouts, updates, weight sync, memory, checkpoints."""

from __future__ import annotations

import logging
import math
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft  # noqa: F401  # it asks for CUDA when it is first imported under the pretended GPU
import pytest
import torch
from hand_made import make_trainer

from lit_grpo.callbacks import MemoryMonitor, RolloutScheduler, RunCheckpoint, WeightSync
from lit_grpo.data import PromptDataModule
from lit_grpo.module import GRPOModule
from lit_grpo.policy.adapters import LoraSettings
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.rewards import RewardSpec
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.training.quiet import quiet
from lit_grpo.types import SamplingParams
from tests.doubles.pretend_cuda import GPU, pretend_cuda

pytestmark = pytest.mark.nightly
Logs = list[dict[str, float]]
SAME = ("reward", "loss", "grad_norm", "entropy")


class Recorder(pl.Callback):
    """Keeps what is logged, and where the policy is."""

    def __init__(self) -> None:
        self.logs: Logs = []
        self.devices: set[torch.device] = set()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        self.logs.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.devices |= {weight.device for weight in pl_module.policy.parameters()}


def loaded(name: str = "tiny") -> Any:
    """The demo's policy and its tokenizer; transformers does not load whole models under the pretended GPU."""
    return load_policy(name), load_tokenizer(name)


def run(
    policy: Any,
    folder: Path,
    accelerator: str,
    precision: Any,
    max_steps: int,
    resume: str | None = None,
    **changes: Any,
) -> tuple[Recorder, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of adapters
        options: dict[str, Any] = {
            "rewards": [RewardSpec("benchmarks.workloads.noise_reward")],
            "generator": SlotGenerator(3),
            "num_generations": 4,
            "sampling": SamplingParams(max_tokens=6),
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            "max_grad_norm": 1.0,
        }
        module, recorder = GRPOModule(policy, **(options | changes)), Recorder()
        trainer = make_trainer(
            RunCheckpoint(1, asynchronous=True), RolloutScheduler(), WeightSync(), MemoryMonitor(), recorder,
            accelerator=accelerator, precision=precision, max_steps=max_steps, max_epochs=-1, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, PromptDataModule("tiny", train=ArithmeticRows(num_rows=8), batch_size=2), ckpt_path=resume)
    return recorder, module


def check_alike(actual: Logs, expected: Logs, exact: bool) -> None:
    """In bfloat16 attention rounds elsewhere than on the CPU, so that tokens and what follows them may differ."""
    assert len(actual) == len(expected) and all(logs["frac_reward_zero_std"] < 1 for logs in expected)
    for one, other in zip(actual, expected, strict=True) if exact else []:
        for name in SAME:
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=2e-3, nan_ok=True), name
    assert actual[0]["entropy"] == pytest.approx(expected[0]["entropy"], abs=0.1)
    for logs in actual:
        assert math.isfinite(logs["loss"]) and logs["grad_norm"] > 0 and logs["update/skipped"] == 0
        assert logs["sampling/logprob_gap_mean"] < (1e-4 if exact else 0.05)


@pytest.mark.filterwarnings("ignore:.*CUDA.*Tensor Cores", "ignore:.*The dataloader.*")
@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        pytest.param("32-true", {}, id="32-true"),
        pytest.param("bf16-mixed", {}, id="bf16-mixed"),
        pytest.param("bf16-mixed", {"lora": LoraSettings(r=4)}, id="lora"),
        pytest.param("bf16-mixed", {"gradient_checkpointing": True}, id="checkpointing"),
    ],
)
def test_a_run_resumes_and_learns_as_on_the_cpu(tmp_path: Path, precision: Any, changes: dict[str, Any]) -> None:
    whole, module = run(loaded(), tmp_path / "cpu", "cpu", precision, 3, **changes)
    first, second = loaded(), loaded()
    with pretend_cuda(free_gib=60, total_gib=80):
        begun, _ = run(first, tmp_path / "gpu", "cuda", precision, 2, **changes)
        last = tmp_path / "gpu" / "checkpoints" / "last.ckpt"
        resumed, there = run(second, tmp_path / "gpu", "cuda", precision, 3, str(last), **changes)
        assert begun.devices == resumed.devices == {GPU}
        assert begun.logs[0]["memory/capacity_gib"] == pytest.approx(80)
    kept = torch.load(last, weights_only=False, map_location="cpu")
    assert kept["policy_version"] == 3 and {each.device.type for each in kept["state_dict"].values()} == {"cpu"}
    check_alike([*begun.logs, *resumed.logs], whole.logs, exact=precision == "32-true")
    for one, other in zip(there.policy.parameters(), module.policy.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-3 if precision == "32-true" else 1e-2)


def test_a_hybrid_without_its_kernels_learns_too_and_the_run_says_what_to_install(tmp_path: Path) -> None:
    logging.Logger.warning_once.cache_clear()  # pyrefly: ignore[missing-attribute]
    with quiet(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warm = SamplingParams(max_tokens=16, temperature=2.0)  # cooler, all completions of a group are the same
        whole, _ = run(loaded("tiny_hybrid"), tmp_path / "cpu", "cpu", "32-true", 1, sampling=warm)
        policy = loaded("tiny_hybrid")
        assert not any("pip install" in str(each.message) for each in said)
        with pretend_cuda(free_gib=60, total_gib=80):
            there, _ = run(policy, tmp_path / "gpu", "cuda", "32-true", 1, sampling=warm)
            assert there.devices == {GPU}
    check_alike(there.logs, whole.logs, exact=True)
    (one,) = (str(each.message) for each in said if "pip install" in str(each.message))
    assert "Some layers of Qwen3_5ForCausalLM are computed in plain PyTorch" in one
