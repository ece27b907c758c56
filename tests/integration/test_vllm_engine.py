"""One vLLM engine a run, with as many requests in it as its memory holds, whatever breaks their decoding off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_policy, save_tokenizer, table_rows
from hand_made import by_text, chosen, make_module, make_trainer, save_policy_for_vllm, sgd

from lit_grpo.callbacks import RolloutScheduler, WeightSync
from lit_grpo.data.module import PromptDataModule
from lit_grpo.plugins import Listener
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.proof import given_logprobs
from lit_grpo.rollout.vllm.engine import VLLMGenerator
from lit_grpo.rollout.weights.tensors import check_arrival
from lit_grpo.scheduling.jobs import Job, NoLengths
from lit_grpo.types import Completion, Prompt, Request, SamplingParams
from tests.doubles.small_models import small_model

pytestmark = pytest.mark.usefixtures("forked_inspections")
BLOCK = 32
BLOCK_BYTES = BLOCK * 1024  # a token of the policy below takes 2 x 2 layers x 2 heads x 32 x 4 bytes
PROMPT = Prompt("c", tuple(2 + i * 7 % 30 for i in range(40)), "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy_for_vllm(tmp_path_factory.mktemp("policy"))


def start(folder: Path, num_slots: int, num_blocks: int, **engine_args: Any) -> VLLMGenerator:
    arguments = {"max_model_len": 128, "block_size": BLOCK, **engine_args}
    generator = VLLMGenerator(num_slots, kv_memory=f"{num_blocks * BLOCK_BYTES // 1024}KiB", engine_args=arguments)
    policy: Any = random_policy(head_dim=32)
    generator.start(PolicySpec(policy, load_tokenizer(str(folder))))
    generator.load_weights(generator.weights(), 0)
    return generator


class Short(NoLengths):
    """Expects eight tokens of every completion."""

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        return np.full(len(jobs), 8.0)


class Active(Listener):
    """Keeps how many requests each step decoded."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_step(self, events: StepEvents) -> None:
        self.numbers.append(events.num_active)


@pytest.mark.nightly
def test_as_many_are_admitted_as_its_blocks_hold_and_what_it_evicts_comes_to_the_same(folder: Path) -> None:
    sampling = SamplingParams(max_tokens=80)
    generator = start(folder, 64, 66)  # a block for nothing, one for what the prompt fills, and 64
    capacity = generator.capacity()
    assert capacity.kv_tokens == 65 * BLOCK and capacity.evicts
    active = Active()
    (group,), _ = RolloutLoop(generator, lengths=Short(), listeners=[active]).collect([PROMPT], 100, sampling, seed=0)
    assert active.numbers[0] == 64  # of which some come to a second block, and have to leave for a while
    assert generator.capacity().kv_tokens_in_use == 0
    roomy = start(folder, 64, 500)
    (expected,), _ = RolloutLoop(roomy).collect([PROMPT], 100, sampling, seed=0)
    assert max(rollout.completion.num_tokens for rollout in group.rollouts) > 2 * BLOCK
    for rollout, same in zip(group.rollouts, expected.rollouts, strict=True):
        assert rollout.completion.token_ids_T.tolist() == same.completion.token_ids_T.tolist()


def decode(generator: VLLMGenerator, request: Request) -> Completion:
    generator.submit([request])
    finished: list[Completion] = []
    while not finished:
        finished = generator.step().finished
    return finished[0]


@pytest.mark.nightly
def test_a_long_prefix_is_prefilled_in_parts(folder: Path) -> None:
    request = Request(PROMPT, (0,), SamplingParams(max_tokens=80))
    whole = decode(start(folder, 2, 100), request)
    generator = start(folder, 2, 100, max_num_batched_tokens=BLOCK)  # a seeded request of a CPU once failed here
    continued = decode(generator, request.after(whole.until(whole.num_tokens - 2)))
    assert continued.token_ids_T.tolist() == whole.token_ids_T.tolist()


@pytest.mark.nightly
def test_where_vllm_draws_in_its_own_way_a_break_is_said_to_change_random_numbers_and_changes_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lit_grpo.rollout.vllm.worker import WorkerExtension

    monkeypatch.setattr(WorkerExtension, "draw_by_position", lambda worker: False)
    request = Request(PROMPT, (0,), SamplingParams(max_tokens=24))
    with pytest.warns(UserWarning, match="does not let lit_grpo draw random numbers by position"):
        generator = start(folder, 2, 100)
    whole = decode(generator, request)
    continued = [decode(generator, request.after(whole.until(cut))) for cut in range(whole.num_tokens)]
    assert all(c.token_ids_T[:cut].tolist() == whole.token_ids_T[:cut].tolist() for cut, c in enumerate(continued))
    assert continued[0].token_ids_T.tolist() == whole.token_ids_T.tolist()
    assert len({tuple(completion.token_ids_T.tolist()) for completion in continued[2:]}) > 2
    greedy = Request(PROMPT, (0,), SamplingParams(0.0, max_tokens=24))
    whole = decode(generator, greedy)
    assert decode(generator, greedy.after(whole.until(5))).token_ids_T.tolist() == whole.token_ids_T.tolist()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[VLLMGenerator]:
    """The generators that have made an engine, one for each time."""
    made: list[VLLMGenerator] = []
    make = VLLMGenerator._make

    def noted(generator: VLLMGenerator, *args: Any) -> None:
        made.append(generator)
        make(generator, *args)

    monkeypatch.setattr(VLLMGenerator, "_make", noted)
    return made


def train(folder: Path, generator: VLLMGenerator, num_updates: int = 2, mode: str | None = None) -> None:
    """Validate, and train with a validation after each update."""
    rows = str(folder / "train.jsonl")
    module = make_module(
        folder,
        generator=generator,
        optimizer=sgd(0.3),
        sampling=SamplingParams(max_tokens=9),
        rewards=[by_text()],
    )
    data = PromptDataModule(str(folder), train=rows, validation=rows, batch_size=2)
    trainer = make_trainer(RolloutScheduler(plugins=chosen(mode)), WeightSync(), max_steps=num_updates, max_epochs=-1)
    trainer.validate(module, datamodule=data, verbose=False)
    assert generator.version == 0
    trainer.fit(module, datamodule=data)
    assert generator.version == num_updates


@pytest.mark.nightly
def test_a_run_that_validates_first_makes_one_engine(folder: Path, starts: list[VLLMGenerator]) -> None:
    generator = VLLMGenerator(4, kv_memory="8MiB", engine_args={"max_model_len": 64, "block_size": BLOCK})
    train(folder, generator)
    train(folder, generator, 5, "april:max_staleness=2,at_sync=keep")  # nor does another run of the same architecture
    assert starts == [generator]


@pytest.mark.nightly
def test_one_engine_at_a_time_lives_in_a_process(folder: Path, starts: list[VLLMGenerator]) -> None:
    arguments = {"max_model_len": 64, "block_size": BLOCK}
    first, second = (VLLMGenerator(slots, kv_memory="8MiB", engine_args=arguments) for slots in (4, 2))
    train(folder, first)
    train(folder, second)
    assert first.version == -1 and second.version == 2
    train(folder, first)  # starts anew
    assert first.version == 2 and second.version == -1
    assert starts == [first, second, first]


@pytest.mark.parametrize("expert_size", table_rows((64, 48), ()))  # the second is padded for the CPU's kernel
def test_experts_are_right_after_every_sync(expert_size: int, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    policy = small_model("qwen3_moe", {"moe_intermediate_size": expert_size}, width=4)
    generator = VLLMGenerator(2, kv_memory="8MiB", engine_args={"max_model_len": 64, "block_size": BLOCK})
    generator.start(PolicySpec(policy, load_tokenizer(str(tmp_path))))
    given = [list(PROMPT.token_ids)]
    for version in range(2):
        generator.load_weights(generator.weights(), version)
        (scored_T,) = generator.score(given).values()
        torch.testing.assert_close(scored_T, given_logprobs(policy, given), atol=1e-5, rtol=0)
        with torch.no_grad():
            for weight in policy.parameters():
                weight += 0.02 * torch.randn(weight.shape)


@pytest.mark.nightly
def test_a_family_whose_class_vllm_shares_with_transformers_is_trained_as_before(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    policy = small_model("glm", width=4)
    given = [list(PROMPT.token_ids)]
    expected_T = given_logprobs(policy, given)
    generator = VLLMGenerator(2, kv_memory="8MiB", engine_args={"max_model_len": 64, "block_size": BLOCK})
    generator.start(PolicySpec(policy, load_tokenizer(str(tmp_path))))
    generator.load_weights(generator.weights(), 0)
    (scored_T,) = generator.score(given).values()
    torch.testing.assert_close(scored_T, expected_T, atol=1e-5, rtol=0)
    called: list[str] = []
    policy.get_decoder().register_forward_hook(lambda *_: called.append("hook"))  # as fsdp2 has them
    torch.testing.assert_close(given_logprobs(policy, given), expected_T)
    assert called == ["hook"]
    another = small_model("glm", width=4)  # such as the one that an export is opened with
    torch.testing.assert_close(given_logprobs(another, given), expected_T)


@pytest.mark.nightly
def test_biases_that_vllm_holds_in_another_order_have_arrived(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    policy = small_model("gpt_neox", width=4)
    generator = VLLMGenerator(2, kv_memory="8MiB", engine_args={"max_model_len": 64, "block_size": BLOCK})
    generator.start(PolicySpec(policy, load_tokenizer(str(tmp_path))))
    weights = generator.weights()
    report = generator.load_weights(weights, 0)
    check_arrival(weights.digests, report.digests)


@pytest.mark.nightly
def test_what_vllm_cannot_start_is_said_in_a_sentence(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    generator = VLLMGenerator(2, kv_memory="8MiB", engine_args={"max_model_len": 64})
    policy = PolicySpec(small_model("deepseek_v32", width=4), load_tokenizer(str(tmp_path)))
    said = r"could not start an engine for DeepseekV32ForCausalLM: .*Sparse Attention .* or another policy\."
    with pytest.raises(ValueError, match=said):
        generator.start(policy)


def test_the_engine_starts_beside_a_policy_on_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own check of a GPU's memory takes what is passed; an H100 with a policy of 1.7B weights in float32."""
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.utils import request_memory

    passed: list[Any] = []

    def keep(arguments: Any) -> None:
        passed.append(arguments)
        raise RuntimeError("no engine here")

    monkeypatch.setattr(LLMEngine, "from_engine_args", keep)
    generator = VLLMGenerator(2, kv_memory="8MiB", engine_args={"max_model_len": 64})
    policy: Any = random_policy(head_dim=32)
    with pytest.raises(ValueError, match="no engine here"):
        generator.start(PolicySpec(policy, load_tokenizer(str(folder))))
    gib = 2**30
    gpu = MemorySnapshot(free_memory=int(72.1 * gib), total_memory=int(79.1 * gib), device="cpu", auto_measure=False)
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(gpu, CacheConfig())
    share = passed[0].gpu_memory_utilization
    assert request_memory(gpu, CacheConfig(gpu_memory_utilization=share)) <= gib
    assert passed[0].kv_cache_memory_bytes == 8 * 2**20
