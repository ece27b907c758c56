"""Weights that did not arrive stop a run: faults between a real Trainer and a real vLLM engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hand_made import by_text, make_module, make_trainer, save_policy_for_vllm, sgd

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.policy import load_policy, load_tokenizer
from lit_grpo.policy.adapters import LoraSettings
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.weights.tensors import WeightSyncError, check_arrival
from lit_grpo.types import Request, SamplingParams
from lit_grpo.update.metrics import LogprobGapError

pytestmark = pytest.mark.usefixtures("forked_inspections")
Weights = Iterable[tuple[str, torch.Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy_for_vllm(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def generator() -> VLLMGenerator:
    return VLLMGenerator(4, kv_memory="8MiB", engine_args={"max_model_len": 64, "block_size": 32})


def make_task(folder: Path, generator: VLLMGenerator, **options: Any) -> Any:
    settings: dict[str, Any] = {"optimizer": sgd(0.3), "sampling": SamplingParams(max_tokens=9)} | options
    return make_module(folder, generator=generator, rewards=[by_text()], **settings)


def train(folder: Path, generator: VLLMGenerator, num_updates: int = 2, **options: Any) -> Any:
    """Train on the folder's prompts; the policy is loaded from there each time."""
    data = PromptDataModule(str(folder), train=str(folder / "train.jsonl"), batch_size=2)
    trainer = make_trainer(RolloutScheduler(), WeightSync(), max_steps=num_updates, max_epochs=-1)
    trainer.fit(make_task(folder, generator, **options), datamodule=data)
    return trainer


def dropped(weights: Weights, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor does not travel."""
    for name, tensor in weights:
        if version < 1 or "layers.1.mlp.down_proj" not in name:
            yield name, tensor


def permuted(weights: Weights, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Two tensors of the same shape exchange their names."""
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    other = dict(zip(names, reversed(names), strict=True)) if version == 1 else {}
    for name, tensor in weights:
        yield other.get(name, name), tensor


class Old:
    """The first version's tensors travel again."""

    def __init__(self) -> None:
        self.first: dict[str, torch.Tensor] = {}

    def __call__(self, weights: Weights, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.first.setdefault(name, tensor.clone())
            yield name, self.first[name]


def test_without_a_fault_the_run_goes_through_and_the_gap_is_logged(folder: Path, generator: VLLMGenerator) -> None:
    trainer = train(folder, generator)
    assert trainer.callback_metrics["sync/logprob_gap"] < 1e-5
    assert trainer.callback_metrics["sampling/logprob_gap_max"] < 1e-4
    assert generator.version == 2


def test_adapters_travel_merged(folder: Path, generator: VLLMGenerator) -> None:
    trainer = train(folder, generator, lora=LoraSettings(r=4))
    assert trainer.callback_metrics["sync/logprob_gap"] < 1e-5
    assert any(bool(p.any()) for name, p in trainer.model.policy.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize(
    "fault, said",
    [
        (dropped, "1 of 25 weights did not arrive"),
        pytest.param(permuted, "2 of 25 weights", marks=pytest.mark.nightly),
        pytest.param(Old(), "weights arrived with another", marks=pytest.mark.nightly),
    ],
    ids=["dropped", "permuted", "old"],
)
def test_a_fault_on_the_way_stops_the_run_and_poisons_the_generator(
    folder: Path, generator: VLLMGenerator, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Weights], said: str
) -> None:
    load = generator.load_weights
    monkeypatch.setattr(generator, "load_weights", lambda weights, version: load(fault(weights, version), version))
    with pytest.raises(WeightSyncError, match=said):
        train(folder, generator)
    refused(generator)


def test_a_version_that_is_not_the_policys_stops_the_run(
    folder: Path, generator: VLLMGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = generator.load_weights
    monkeypatch.setattr(generator, "load_weights", lambda weights, version: load(weights, max(version - 1, 0)))
    with pytest.raises(WeightSyncError, match="at version 0 where the policy is at 1"):
        train(folder, generator)
    refused(generator)


def test_weights_that_arrive_and_are_not_computed_with_stop_the_run(
    folder: Path, generator: VLLMGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digests are right, and one layer of the engine goes on with what it had."""

    def load(weights: Weights, version: int) -> Any:
        report = VLLMGenerator.load_weights(generator, weights, version)
        if version == 1:
            generator._engine.apply_model(lambda model: model.model.norm.weight.data.mul_(1.5))
        return report

    monkeypatch.setattr(generator, "load_weights", load)
    with pytest.raises(WeightSyncError, match="gives to given tokens differ from the policy's by"):
        train(folder, generator)
    refused(generator)


class Stale:
    """After a load of version 1 the engine computes with the weights of version 0, some times."""

    def __init__(self, generator: VLLMGenerator, times: int) -> None:
        self.generator, self.times = generator, times
        self.old: dict[str, torch.Tensor] = {}

    def __call__(self, weights: Weights, version: int) -> Any:
        report = VLLMGenerator.load_weights(self.generator, weights, version)
        self.old = self.old or {name: tensor.clone() for name, tensor in weights}
        if version == 1 and self.times:
            self.times -= 1
            self.generator._load(iter(self.old.items()), version)
        return report


def test_one_small_update_that_was_lost_is_sent_again(
    folder: Path, generator: VLLMGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = Stale(generator, times=1)
    monkeypatch.setattr(generator, "load_weights", stale)
    with pytest.warns(UserWarning, match="all weights are sent once more"):
        trainer = train(folder, generator, optimizer=sgd(1e-3))
    assert stale.times == 0
    assert trainer.callback_metrics["sync/logprob_gap"] < 1e-6


@pytest.mark.nightly
def test_an_update_that_is_lost_again_stops_the_run(
    folder: Path, generator: VLLMGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "load_weights", Stale(generator, times=2))
    with pytest.raises(WeightSyncError, match="gives to given tokens differ"), pytest.warns(UserWarning):
        train(folder, generator, optimizer=sgd(1e-3))
    refused(generator)


@pytest.mark.nightly
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "as they came"])
def test_what_the_engine_holds_is_digested_where_it_can_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """Something changes behind the transfer; what a CPU computes with in a packed form cannot be read."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    if not packed:
        monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
        monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)
    generator = VLLMGenerator(2, kv_memory="4MiB", engine_args={"max_model_len": 64, "block_size": 32})
    policy, tokenizer = load_policy(str(folder)), load_tokenizer(str(folder))
    generator.start(PolicySpec(policy, tokenizer))
    from lit_grpo.rollout.vllm.worker import WorkerExtension

    end = WorkerExtension.end_update
    names = ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"]
    if not packed:
        names += ["model.layers.1.self_attn.qkv_proj.weight", "model.layers.0.mlp.down_proj.weight"]
    for name in names:

        def change(worker: Any, name: str = name) -> dict[str, str]:
            parameter = dict(worker.get_model().named_parameters())[name]
            parameter.data[:2] += 1.0
            return end(worker)

        monkeypatch.setattr(WorkerExtension, "end_update", change)
        weights = generator.weights()
        report = generator.load_weights(weights, 1)
        with pytest.raises(WeightSyncError, match="weights arrived with another content"):
            check_arrival(weights.digests, report.digests)
    monkeypatch.setattr(WorkerExtension, "end_update", end)
    weights = generator.weights()
    check_arrival(weights.digests, generator.load_weights(weights, 2).digests)


class Intruder(pl.Callback):
    """Loads foreign weights into the engine after the sync that follows the first update."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            pl_module.generator._load(((name, tensor * 1.5) for name, tensor in pl_module.generator.weights()), 1)
            self.weights = {name: tensor.clone() for name, tensor in pl_module.policy.state_dict().items()}


def test_a_batch_that_was_sampled_with_other_weights_is_not_trained_on(folder: Path, generator: VLLMGenerator) -> None:
    intruder = Intruder()
    module = make_task(folder, generator)
    trainer = make_trainer(intruder, RolloutScheduler(), WeightSync(), max_steps=4, max_epochs=-1)
    data = PromptDataModule(str(folder), train=str(folder / "train.jsonl"), batch_size=1)
    with pytest.raises(LogprobGapError, match="so it is not trained on"):
        trainer.fit(module, datamodule=data)
    assert module.policy_version == 1
    assert all(torch.equal(tensor, intruder.weights[name]) for name, tensor in module.policy.state_dict().items())


def generator_prompt() -> Any:
    from lit_grpo.types import Prompt

    return Prompt("long", tuple(2 + i % 30 for i in range(40)), "")


def refused(generator: VLLMGenerator) -> None:
    """Nothing is sampled with weights that are not the policy's."""
    assert generator.version == -1
    with pytest.raises(WeightSyncError):
        generator.submit([Request(generator_prompt(), (0,), SamplingParams(max_tokens=9))])
