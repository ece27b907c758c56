"""What is found out of a model by running it: its logits, what its tokens see, and whether it can be a policy."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from conftest import random_policy

from lit_grpo.policy.architecture.attention import ALL, Sight, attention_calls
from lit_grpo.policy.architecture.decoder import LogitMap, decoder_of, hidden_states, logit_map, token_logits
from lit_grpo.policy.architecture.support import check_policy
from lit_grpo.policy.loading import attend_in_full
from lit_grpo.rollout.slots.binding import check_slot_support
from lit_grpo.update.logprobs.linear_head import linear_head
from lit_grpo.update.prefix.support import prefix_refusal
from tests.doubles.small_models import small_model


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", LogitMap()),
        ("granite", LogitMap(1 / 8)),  # divides what the head gives
        ("cohere2", LogitMap(1 / 16)),  # multiplies it
        ("minicpm3", LogitMap(0.25)),  # divides what the head gets
        ("falcon_h1", LogitMap(0.5)),
        ("gemma2", LogitMap(1.0, 30.0)),
        ("recurrent_gemma", LogitMap(1.0, 30.0)),
    ],
)
def test_what_a_model_makes_of_its_heads_outputs_is_found_in_its_own_forward(family: str, expected: LogitMap) -> None:
    model = small_model(family)
    assert logit_map(model) == expected
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(token_logits(model, hidden_states(model, ids)), own, rtol=1e-5, atol=1e-6)
    head = linear_head(model)
    assert head is not None and (head.scale, head.cap) == (expected.scale, expected.cap)
    assert "forward" not in vars(model.get_decoder()) | vars(model.get_output_embeddings())


def test_logits_that_go_another_way_are_refused() -> None:
    policy: Any = random_policy()
    forward = type(policy).forward

    def squared(**inputs: Any) -> Any:
        output = forward(policy, **inputs)
        output.logits = output.logits**2
        return output

    policy.forward = squared
    with pytest.raises(ValueError, match="logits of Qwen3ForCausalLM are not its output embedding applied"):
        check_policy(policy)


def test_what_tokens_see_is_read_off_the_models_own_masks() -> None:
    assert [call.sight for call in attention_calls(small_model("llama"), 128)] == [ALL, ALL]
    assert [call.sight for call in attention_calls(small_model("mistral"), 128)] == [Sight(window=6)] * 2
    assert [call.sight for call in attention_calls(small_model("mistral"), 6)] == [ALL, ALL]  # within the context
    assert {call.sight for call in attention_calls(small_model("gemma3_text"), 128)} == {ALL, Sight(window=6)}
    assert {call.sight for call in attention_calls(small_model("llama4_text"), 128)} == {ALL, Sight(chunk=6)}


def test_heads_that_differ_by_layer_caps_and_sinks_are_seen() -> None:
    calls = attention_calls(small_model("gemma4_text"), 128)
    assert {(call.num_kv_heads, call.key_size) for call in calls} == {(2, 8), (1, 16)}
    (latent,) = {(call.key_size, call.value_size) for call in attention_calls(small_model("deepseek_v3"), 128)}
    assert latent == (16, 8)
    assert all(call.has_sinks for call in attention_calls(small_model("gpt_oss"), 128))
    assert {call.cap for call in attention_calls(small_model("gemma2"), 128)} == {50.0}


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("bloom", "it does not use transformers' attention interface"),
        ("nemotron", "it hands its attention no arguments beside its own"),
        ("doge", "it masks its attention in a way of its own"),
        ("inkling_text", "it hands its attention position_bias beside queries, keys and values"),
    ],
)
def test_an_attention_that_cannot_be_replaced_is_refused_in_words(family: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        attention_calls(small_model(family), 128)


def test_a_cap_that_torchs_attention_leaves_out_is_kept() -> None:
    model = small_model("gemma2", {"attn_logit_softcapping": 0.5})
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        without = hidden_states(model, ids)
        attend_in_full(model)
        assert model.config._attn_implementation == "eager"
        assert float((hidden_states(model, ids) - without).abs().max()) > 0.01
    llama = small_model("llama")
    attend_in_full(llama)
    assert llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("bert-generation", {"is_decoder": False}, "a token's hidden state depends on those that follow it"),
        ("bert", {}, "logits of BertLMHeadModel are not its output embedding applied"),
        ("reformer", {}, "a forward over tokens and positions fails"),
        ("mixtral", {"router_jitter_noise": 0.5}, "training mode computes something else than evaluation mode"),
    ],
)
def test_a_model_that_cannot_be_a_policy_is_refused_in_words(family: str, changes: dict[str, Any], why: str) -> None:
    model = small_model(family, changes)
    with pytest.raises(ValueError, match=why):
        check_policy(model)
    assert not model.training


def test_a_decoder_is_found_where_the_library_gives_the_model_itself() -> None:
    model = small_model("llama4_text")
    assert model.get_decoder() is model and decoder_of(model) is model.model


def test_a_forward_that_ignores_positions_is_refused_as_such() -> None:
    model = small_model("bart")
    with pytest.raises(ValueError, match=r"% off those of its own forward, which ignores position_ids; let vLLM"):
        check_slot_support(model)
    assert str(prefix_refusal(model)).endswith("% off, and its forward ignores position_ids")


def test_layers_that_run_several_times_and_chunks_share_no_prefix() -> None:
    assert prefix_refusal(small_model("hrm_text")) == "some of its layers run several times"
    assert prefix_refusal(small_model("llama4_text")) == "its attention is cut into chunks"


def test_a_model_that_has_been_looked_at_is_freed() -> None:
    """Transformers keeps functions of attention and of masks for the whole process."""
    model = small_model("llama")
    attention_calls(model, 128)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
