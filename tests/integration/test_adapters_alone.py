"""LoRA adapters that travel alone to a vLLM server: a run, its bytes, its proofs, and a restarted server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import SERVER_ARGUMENTS, by_text, full_logprobs, make_module, make_trainer, save_policy_for_vllm, sgd
from lightning.pytorch.callbacks import Callback

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.vllm.arguments import lora_arguments
from lit_grpo.rollout.vllm.guard import TOKEN_VARIABLE
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.weights.adapters import AdapterWeights
from lit_grpo.rollout.weights.tensors import WeightSyncError, check_arrival
from lit_grpo.types import Prompt, SamplingParams

PROMPTS = [Prompt("a", (2, 3, 4), ""), Prompt("c", tuple(2 + i * 7 % 30 for i in range(40)), "")]
SAMPLING = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy_for_vllm(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def generator(forked_servers: None) -> Iterator[VLLMServerGenerator]:
    generator = VLLMServerGenerator(4, adapters="alone", server_args=SERVER_ARGUMENTS)
    yield generator
    generator.close()


class Syncs(Callback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.logs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(folder: Path, generator: VLLMServerGenerator, *callbacks: Callback) -> Any:
    """Take three updates; return the trained policy."""
    data = PromptDataModule(str(folder), train=str(folder / "train.jsonl"), batch_size=2)
    module = make_module(
        folder,
        generator=generator,
        lora=LoraSettings(r=1, target_modules=["q_proj", "down_proj"]),
        optimizer=sgd(0.3),
        sampling=SamplingParams(max_tokens=9),
        rewards=[by_text()],
    )
    trainer = make_trainer(RolloutScheduler(), WeightSync(), *callbacks, max_steps=3, max_epochs=-1)
    trainer.fit(module, datamodule=data)
    return module.policy


def sampled_right(generator: VLLMServerGenerator, policy: Any, version: int) -> bool:
    groups, _ = RolloutLoop(generator).collect(PROMPTS, 4, SAMPLING, seed=version)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert all(rollout.completion.versions_T.unique().tolist() == [version] for rollout in rollouts)
    return all(torch.allclose(r.completion.logprobs_T, full_logprobs(policy, r), atol=1e-4) for r in rollouts)


@pytest.mark.nightly
def test_a_run_sends_its_weights_once_and_then_its_adapters(folder: Path, generator: VLLMServerGenerator) -> None:
    syncs = Syncs()
    policy = train(folder, generator, syncs).eval()
    adapters = sum(parameter.nbytes for parameter in policy.parameters() if parameter.requires_grad)
    everything = sum(parameter.nbytes for parameter in policy.parameters())
    assert adapters < everything / 50
    assert len(syncs.logs) == 3 and generator.version == 3
    for log in syncs.logs:
        assert log["sync/mib"] == pytest.approx(adapters / 2**20)
        assert log["sync/changed_share"] == pytest.approx(adapters / everything)
        assert log["sync/logprob_gap"] < 1e-5 and log["sampling/logprob_gap_max"] < 1e-4
        assert log["time/weight_sync_s"] > 0
    assert any(parameter.abs().max() > 0.05 for name, parameter in policy.named_parameters() if "lora_B" in name)
    (server,) = generator._fleet.alive
    models = [model["id"] for model in server.client.ask("GET", "/v1/models")["data"]]
    assert len(models) == 2 and server.adapter in models  # the old ones are gone


@pytest.fixture
def policy(folder: Path, generator: VLLMServerGenerator) -> Any:
    """A policy with random adapters, as version 5 on the server."""
    policy: Any = load_policy(str(folder)).eval()  # as the run before: its server is kept
    add_adapters(policy, LoraSettings(r=1, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    generator.start(PolicySpec(policy, load_tokenizer(str(folder))))
    weights = generator.weights()
    report = generator.load_weights(weights, 5)
    check_arrival(weights.digests, report.digests)
    assert report.changed_share == 1.0  # another start: nothing that the server holds is relied on
    return policy


@pytest.mark.nightly
def test_a_server_that_lost_its_weights_is_sent_them_again(generator: VLLMServerGenerator, policy: Any) -> None:
    (server,) = generator._fleet.alive
    assert not generator._fleet.lacks_base()
    server.client.ask("POST", "/update_weight_version", {"new_version": "default"})  # as a restarted server has it
    assert generator._fleet.lacks_base()
    with pytest.raises(WeightSyncError, match="No vLLM server took the policy's weights"):
        generator.load_weights(AdapterWeights(policy, with_base=False), 6)
    everything = sum(parameter.nbytes for parameter in policy.parameters())
    assert generator.load_weights(generator.weights(), 7).num_bytes == everything
    generator.invalidate_weights()
    assert generator.load_weights(generator.weights(), 8).num_bytes == everything
    assert generator.load_weights(generator.weights(), 9).num_bytes < everything / 50
    assert sampled_right(generator, policy, 9)


@pytest.mark.nightly
def test_a_named_server_must_take_the_rank(
    generator: VLLMServerGenerator, policy: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(str(folder))
    monkeypatch.setenv(TOKEN_VARIABLE, generator._fleet.token)
    generator.close()  # gives it back
    urls = [server.client.url for server in generator._fleet._servers]
    named = VLLMServerGenerator(4, urls=urls, adapters="alone")
    named.start(PolicySpec(policy, tokenizer))
    weights = named.weights()
    check_arrival(weights.digests, named.load_weights(weights, 0).digests)
    assert sampled_right(named, policy, 0)
    named.close()
    wider: Any = random_policy(head_dim=32)
    add_adapters(wider, LoraSettings(r=2))
    with pytest.raises(ValueError, match="does not take LoRA adapters of rank 8; start it with --max-lora-rank 8"):
        VLLMServerGenerator(4, urls=urls, adapters="alone").start(PolicySpec(wider, tokenizer))


@pytest.mark.nightly
def test_a_server_that_takes_adapters_decodes_with_whole_weights_before_any_have_come(
    folder: Path, forked_servers: None
) -> None:
    """As ``serve --max-lora-rank`` does for a run with ``adapters: merged``: its head is computed plainly at once."""
    policy: Any = load_policy(str(folder)).eval()
    add_adapters(policy, LoraSettings(r=2))
    merged = VLLMServerGenerator(4, adapters="merged", server_args=SERVER_ARGUMENTS | lora_arguments(2))
    merged.start(PolicySpec(policy, load_tokenizer(str(folder))))
    weights = merged.weights()
    check_arrival(weights.digests, merged.load_weights(weights, 0).digests)
    (scores,) = merged.score([[2, 3, 4], [5, 6]]).values()
    assert len(scores) == 3 and sampled_right(merged, policy, 0)
    merged.close()
