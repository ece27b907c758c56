"""For which models the short way to decode is taken."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from conftest import random_policy

from lit_grpo.policy.architecture.decoder import hidden_states
from lit_grpo.rollout.slots import binding
from lit_grpo.rollout.slots.attention import use_slot_attention
from lit_grpo.rollout.slots.binding import _NUM_TOKENS, _decode, check_slot_support
from lit_grpo.rollout.slots.forward import FusedDecoder

SIZES: dict[str, Any] = {
    "vocab_size": 34, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": None,
}  # fmt: skip
TAKEN = ["Qwen3", "Qwen2", "Llama", "Mistral"]
REFUSED = ["Gemma2", "Gemma3", "Olmo2", "Phi3"]


def make(family: str) -> Any:
    config = getattr(tf, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    sizes = SIZES | ({"attn_logit_softcapping": None} if family == "Gemma2" else {})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(tf, f"{family}ForCausalLM")(config(**sizes)).eval()


@pytest.mark.parametrize("family", TAKEN)
def test_it_is_taken_for_decoders_built_like_llama(family: str) -> None:
    assert isinstance(check_slot_support(make(family))[1], FusedDecoder)


@pytest.mark.parametrize("family", TAKEN)
def test_under_autocast_it_computes_what_the_model_does(family: str) -> None:
    model = make(family)
    shape, fused = check_slot_support(model)
    input_ids_BT = torch.arange(_NUM_TOKENS)[None]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = hidden_states(model, input_ids_BT)[0, -1]
        before = use_slot_attention(model)
        lowered = replace(shape, dtype=torch.bfloat16)
        own, actual = (_decode(model, input_ids_BT, lowered, short) for short in (None, fused))
        model.set_attn_implementation(before)
    assert torch.equal(actual, own)
    assert actual.dtype == torch.float32  # between the layers
    assert float((actual - expected).norm() / expected.norm()) < 0.02


def test_a_deep_model_in_bfloat16_is_taken_although_two_right_ways_differ_by_more() -> None:
    policy: Any = random_policy(num_hidden_layers=24)
    assert isinstance(check_slot_support(policy.bfloat16())[1], FusedDecoder)


@pytest.mark.parametrize("family", REFUSED)
def test_others_run_their_own_forward(family: str) -> None:
    assert check_slot_support(make(family))[1] is None


def test_it_is_refused_where_it_comes_out_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FusedDecoder.__call__
    monkeypatch.setattr(FusedDecoder, "__call__", lambda *arguments: original(*arguments) * 1.1)
    policy: Any = random_policy()
    assert check_slot_support(policy)[1] is None


def test_tables_of_positions_double_where_they_are_short_and_nowhere_else() -> None:
    fused: Any = check_slot_support(make("Qwen3"))[1]
    sizes = []
    for num_positions, dtype in (1, "float32"), (1, "bfloat16"), (1, "float32"), (1025, "float32"), (2049, "float32"):
        fused.tabulate(num_positions, torch.empty(0, dtype=getattr(torch, dtype)))
        sizes.append(len(fused.tables[0]))
    assert sizes == [1024, 1024, 1024, 2048, 4096]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_tokens_that_amplify_rounding_are_no_reason_to_refuse_a_policy(
    is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that was trained in bf16-mixed may do that for tokens that it has never seen, such as its first ones."""

    def other(model: Any, input_ids_BT: torch.Tensor, *more: Any) -> torch.Tensor:
        return _decode(model, input_ids_BT, *more) * (1.4 if is_wrong or input_ids_BT[0, 0] == 0 else 1)

    monkeypatch.setattr(binding, "_decode", other)
    with pytest.raises(ValueError, match=r"come out 40\.0% off") if is_wrong else nullcontext():
        assert isinstance(check_slot_support(random_policy())[1], FusedDecoder)
