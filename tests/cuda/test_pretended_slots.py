"""The slots on the pretended GPU: graphs and plain steps, all shelves; the CPU's completions, and one wait a step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from conftest import random_policy, table_rows
from on_gpu import PROMPTS, closeness, off, sample, started

from lit_grpo.plugins import Listener, ObservationPoint
from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots import binding
from lit_grpo.rollout.slots.drafts.suffix import SuffixDrafter
from lit_grpo.types import SamplingParams
from tests.doubles import pretend_cuda as pretended
from tests.doubles.pretend_cuda import pretend_cuda

MAX_TOKENS = 70  # of several shelves
SIZES: dict[str, Any] = {
    "vocab_size": 34, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
PRECISIONS = [
    pytest.param(None, marks=pytest.mark.nightly, id="float32"),
    pytest.param(torch.bfloat16, id="bf16-mixed"),
]


def make(kind: str) -> Any:
    """A policy: with graphs, one that has none because it is no Llama, one with a sliding window, one with adapters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "plain":
            return tf.Gemma2ForCausalLM(tf.Gemma2Config(**SIZES, sliding_window=8)).eval()
        if kind == "window":
            return tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=8)).eval()
        if kind == "lora":
            policy: Any = random_policy()
            add_adapters(policy, LoraSettings(r=4))
            for name, weight in policy.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.02)
            return policy.eval()
    return random_policy()


@pytest.mark.filterwarnings("ignore:.*is decoded without CUDA graphs")
@pytest.mark.parametrize("autocast", PRECISIONS)
@pytest.mark.parametrize("kind", table_rows(["graphs", "plain", "window", "lora"], ["graphs"]))
def test_completions_are_those_of_the_cpu_for_one_wait_and_one_copy_a_step(
    kind: str, autocast: torch.dtype | None, policy_folder: Path
) -> None:
    expected, _ = sample(started(make(kind), policy_folder), autocast=autocast, max_tokens=MAX_TOKENS)
    with pretend_cuda() as gpu:
        generator = started(make(kind).to("cuda"), policy_folder)
        assert (generator._graphs is not None) == (kind != "plain")
        actual, counts = sample(generator, gpu, MAX_TOKENS, autocast)
        assert off(actual, expected) < closeness(autocast)
        assert set(counts.waits) == {1} and set(counts.unpinned) == {0}, counts.lines
        assert sorted(counts.pinned)[len(counts.pinned) * 3 // 4] == 1  # and one for each prefill
        again, _ = sample(generator, gpu, MAX_TOKENS, autocast)
        assert off(again, expected) < closeness(autocast)
    assert max(len(ids) for ids, _ in expected) > 32


@pytest.mark.parametrize("kind", table_rows(["graphs", "plain", "window", "lora"], ["graphs"]))
@pytest.mark.filterwarnings("ignore:.*is decoded without CUDA graphs")
def test_steps_with_drafts_have_recordings_of_their_own_and_one_wait(kind: str, policy_folder: Path) -> None:
    """And those before and after run ahead; the drafts are copies of a run without any, every third token wrong."""
    expected, _ = sample(started(make(kind), policy_folder), max_tokens=MAX_TOKENS)

    class Copies(SuffixDrafter):
        num_asked = num_accepted = 0

        def most(self, rows: Any, num_rows: int, room: int) -> Any:
            self.num_asked += 1
            return super().most(rows, num_rows, room) * (self.num_asked % 8 < 5)

        def draft(self, rows: Any, most_B: Any, cache: Any, sampling: Any) -> Any:
            begun = [rows.token_ids(row).tolist() for row in range(len(most_B))]
            found = [next(ids for ids, _ in expected if ids[: len(had)] == had)[len(had) :] for had in begun]
            return [[*ids[:2], 5] for ids in found]

        def took(self, rows: Any, step: Any, accepted_B: Any) -> dict[str, int]:
            self.num_accepted += int(accepted_B.sum())
            return {}

    with pretend_cuda() as gpu:
        generator = started(make(kind).to("cuda"), policy_folder, drafts=3)
        generator._drafter = drafter = Copies(3)
        actual, counts = sample(generator, gpu, MAX_TOKENS)
        assert off(actual, expected) < closeness(None)
        assert set(counts.waits) == {1} and set(counts.unpinned) == {0}, counts.lines
        assert drafter.num_accepted > 20
        if generator._graphs is not None:
            assert {is_drafted for _, is_drafted in generator._graphs._recordings} == {False, True}


class Looks(Listener):
    """Looks at the hidden states of prompts, and of completions after some tokens."""

    def __init__(self) -> None:
        self.num_seen = 0

    @property
    def observes(self) -> ObservationPoint:
        return ObservationPoint(4)

    def on_step(self, events: StepEvents) -> None:
        self.num_seen += sum(len(each.keys) for each in events.observations)


@pytest.mark.parametrize("kind", table_rows(["graphs", "lora"], ["graphs"]))
def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_read(kind: str, policy_folder: Path) -> None:
    """Whoever looks: the host waits for a step's event alone, and each time the next step is in the queue."""
    with pretend_cuda() as gpu:
        generator = started(make(kind).to("cuda"), policy_folder)
        sample(generator, max_tokens=40)  # records
        gpu.reset()
        looks = Looks()
        _, stats = RolloutLoop(generator, listeners=[looks]).collect(PROMPTS, 2, SamplingParams(max_tokens=40), 0)
        order = "".join({"replay": "r"}.get(each, "w") for each in gpu.order)
        lines = gpu.lines("wait")
    assert len(lines) == 1 and " x event at rollout/slots/generator.py" in lines[0], lines
    # The first tokens come from prompts, so the first replay is of the second step. The last tokens have no next step.
    assert re.fullmatch("(rw)+w?", order) and order.count("w") == stats.num_steps > 20, order
    assert looks.num_seen > 3


def test_weights_in_bfloat16_decode_with_log_probs_of_the_models_forward(policy_folder: Path) -> None:
    policy: Any = random_policy()
    with pretend_cuda() as gpu:
        actual, counts = sample(started(policy.bfloat16().to("cuda"), policy_folder), gpu)
    assert set(counts.waits) == {1}
    policy = random_policy().bfloat16()
    for prompt, (ids, logprobs) in zip([each for each in PROMPTS for _ in range(2)], actual, strict=True):
        logits_TV = policy(torch.tensor([[*prompt.token_ids, *ids]])).logits[0, len(prompt.token_ids) - 1 : -1].float()
        expected_T = logits_TV.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected_T, atol=0.1, rtol=0)


def test_heads_without_a_kernel_are_decoded_without_graphs_and_the_run_says_why(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy: Any = random_policy()
    expected, _ = sample(started(policy, policy_folder))
    with pretend_cuda(), monkeypatch.context() as patch:
        patch.setattr(binding, "_KERNEL_SIZES", (128,))
        with pytest.warns(UserWarning, match="decoded without CUDA graphs, .* no kernel attends with heads of"):
            generator = started(policy.to("cuda"), policy_folder)
        actual, _ = sample(generator)
    assert generator._graphs is None and off(actual, expected) < 1e-4


def test_scarce_memory_sets_aside_and_goes_on(policy_folder: Path) -> None:
    expected, _ = sample(started(random_policy(), policy_folder))
    with pretend_cuda():
        policy: Any = random_policy()
        generator = started(policy.to("cuda"), policy_folder, kv_memory="48KiB")
        actual, _ = sample(generator)
    assert off(actual, expected) < 1e-4


def test_hidden_states_are_observed_as_on_the_cpu(policy_folder: Path) -> None:
    expected, _ = sample(started(random_policy(), policy_folder), points=(0, 4))
    with pretend_cuda():
        policy: Any = random_policy()
        actual, _ = sample(started(policy.to("cuda"), policy_folder), points=(0, 4))
    assert off(actual, expected) < 1e-4


@pytest.mark.parametrize("kind", table_rows(["graphs", "lora"], ["lora"]))
@pytest.mark.parametrize("autocast", PRECISIONS)
def test_new_weights_are_decoded_with(kind: str, autocast: torch.dtype | None, policy_folder: Path) -> None:
    """Recordings and copies in bfloat16 are of the weights as they were."""

    def change(policy: Any) -> None:
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.1)

    def run(policy: Any) -> tuple[Any, Any]:
        generator = started(policy, policy_folder)
        before, _ = sample(generator, autocast=autocast)
        change(policy)
        generator.load_weights(policy.named_parameters(), 1)
        after, _ = sample(generator, autocast=autocast)
        return before, after

    expected = run(make(kind))
    with pretend_cuda():
        actual = run(make(kind).to("cuda"))
    assert max(map(off, actual, expected)) < closeness(autocast)
    assert off(actual[1], actual[0]) > 1e-3


@pytest.mark.parametrize("kind", table_rows(["graphs", "lora"], ["lora"]))
def test_a_step_casts_no_weight(kind: str, policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_cuda() as gpu:
        policy = make(kind).to("cuda")
        generator = started(policy, policy_folder)
        sample(generator, gpu, 6, torch.bfloat16)  # records, and casts once
        weights = {weight.data_ptr() for weight in policy.parameters()}
        cast: list[bool] = []

        def noting(func: Any, args: Any, kwargs: Any) -> Any:
            if func is torch.ops.aten._to_copy.default:
                cast.append(args[0].data_ptr() in weights)
            return computed(func, args, kwargs)

        computed = pretended._computed
        monkeypatch.setattr(pretended, "_computed", noting)
        sample(generator, gpu, 6, torch.bfloat16)
    assert len(cast) > 20 and not any(cast)
