"""SlotGenerator beside Hugging Face ``generate`` and a plain forward, on models of many architectures."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import random_policy, table_rows

from lit_grpo.policy.architecture.decoder import hidden_states, token_logits
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.attention import ATTENTION_NAME
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import Completion, Prompt, SamplingParams

SIZES = {
    "vocab_size": 35,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
# Ragged prompts, and 24 tokens to follow: much longer than the sliding windows of 8 and 5.
PROMPTS = [
    Prompt("one token", (7,), ""),
    Prompt("short", (2, 3, 4), ""),
    Prompt("middling", tuple(2 + i * 7 % 30 for i in range(12)), ""),
    Prompt("long", tuple(2 + i * 11 % 30 for i in range(30)), ""),
]
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 80,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, some layers slide": (
        "Qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3 moe": ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama, scaled rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "mistral, all layers slide": ("Mistral", {"sliding_window": 8}),
    "gemma2 without caps": (
        "Gemma2",
        {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": None, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2}),
    "smollm3": ("SmolLM3", {}),
    "granite": ("Granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.2}),
    "phi3": ("Phi3", {"sliding_window": 8}),
    "phi3, long rope": ("Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 80}),
    "olmo2": ("Olmo2", {}),
    "gpt2": ("GPT2", {"n_inner": 64}),
    "gemma2, capped scores": ("Gemma2", {"head_dim": 8, "sliding_window": 5}),
    "llama4, chunks": ("Llama4Text", {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 8}),
    "gpt oss, sinks": (
        "GptOss",
        {"head_dim": 8, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "deepseek v3, latent attention": (
        "DeepseekV3",
        {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
         "moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
         "qk_nope_head_dim": 8, "v_head_dim": 16},
    ),
    "qwen3.5, gated DeltaNet": (
        "Qwen3_5Text",
        {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    ),
    "lfm2, short convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "falcon h1, both in a layer": (
        "FalconH1",
        {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 4},
    ),
    "mamba, no attention": ("Mamba", {"expand": 2, "state_size": 8}),
    "phimoe, all layers slide": ("Phimoe", {"sliding_window": 8, "num_local_experts": 2}),
}  # fmt: skip


def build(name: str, changes: dict[str, Any]) -> Any:
    """A random model of few parameters, in evaluation mode."""
    head = {"Gemma3Text": "Gemma3ForCausalLM", "Llama4Text": "Llama4ForCausalLM", "GPT2": "GPT2LMHeadModel"}
    head["Qwen3_5Text"] = "Qwen3_5ForCausalLM"
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, head.get(name, f"{name}ForCausalLM"))(config).eval()


@pytest.fixture(scope="module")
def tokenizer(policy_folder: Path) -> Any:
    return load_tokenizer(str(policy_folder))


def collect(
    model: Any, tokenizer: Any, sampling: SamplingParams, num_slots: int = 3, group: int = 1
) -> list[Completion]:
    generator = SlotGenerator(num_slots)
    generator.start(PolicySpec(model, tokenizer))
    generator.load_weights(model.named_parameters(), 0)
    groups, _ = RolloutLoop(generator).collect(PROMPTS, group, sampling, seed=0)
    return [rollout.completion for one in groups for rollout in one.rollouts]


def generate(model: Any, max_tokens: int) -> list[list[int]]:
    """Greedy completions by Hugging Face, up to and with the end token."""
    longest = max(len(prompt.token_ids) for prompt in PROMPTS)
    rows = [[0] * (longest - len(prompt.token_ids)) + list(prompt.token_ids) for prompt in PROMPTS]
    masks = [[0] * (longest - len(prompt.token_ids)) + [1] * len(prompt.token_ids) for prompt in PROMPTS]
    output = model.generate(
        input_ids=torch.tensor(rows),
        attention_mask=torch.tensor(masks),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=1,
        pad_token_id=0,
    )
    completions = [row[longest:].tolist() for row in output]
    return [row[: row.index(1) + 1] if 1 in row else row for row in completions]


def double(model: Any) -> Any:
    """A copy in float64; experts by the implementation that knows float64, attention by the one that caps scores."""
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    exact.set_experts_implementation("eager")
    return exact


def exact_logprobs(model: Any, completion: Completion) -> torch.Tensor:
    """The completion's log-probs by a plain forward in float64."""
    prompt_ids = completion.request.prompt.token_ids
    input_ids = torch.tensor([[*prompt_ids, *completion.token_ids_T.tolist()]])
    with torch.no_grad():
        logits_TV = model(input_ids=input_ids, use_cache=False).logits[0].double()
    logprobs_TV = logits_TV.log_softmax(-1)[len(prompt_ids) - 1 : -1]
    return logprobs_TV.gather(-1, completion.token_ids_T[:, None])[:, 0]


QUICK = (
    *("qwen3", "qwen3, some layers slide", "llama, scaled rope", "gemma2, capped scores", "gpt2"),
    *("llama4, chunks", "gpt oss, sinks", "deepseek v3, latent attention"),
    *("qwen3.5, gated DeltaNet", "mamba, no attention"),
)


@pytest.mark.parametrize("name", table_rows(MODELS, QUICK))
def test_greedy_tokens_are_those_of_generate_and_sampled_logprobs_those_of_a_forward(name: str, tokenizer: Any) -> None:
    model = build(*MODELS[name])
    greedy = collect(model, tokenizer, SamplingParams(temperature=0, max_tokens=24))
    assert [completion.token_ids_T.tolist() for completion in greedy] == generate(model, 24)

    sampled = collect(model, tokenizer, SamplingParams(max_tokens=24), num_slots=5, group=3)
    assert max(completion.num_tokens for completion in sampled) > 8
    exact = double(model)
    for completion in sampled:
        expected_T = exact_logprobs(exact, completion)
        assert torch.allclose(completion.logprobs_T.double(), expected_T, rtol=0, atol=1e-5)


def test_long_rope_is_decoded_up_to_the_original_context_only(tokenizer: Any) -> None:
    model = build(*MODELS["phi3, long rope"])
    with pytest.raises(ValueError, match="the model's context is 80"):
        collect(model, tokenizer, SamplingParams(max_tokens=51))
    assert len(collect(model, tokenizer, SamplingParams(max_tokens=50))) == len(PROMPTS)


def test_a_bfloat16_policy_decodes_close_to_its_own_forward(tokenizer: Any) -> None:
    model: Any = random_policy().to(torch.bfloat16)  # pyrefly: ignore[bad-argument-type]
    for completion in collect(model, tokenizer, SamplingParams(max_tokens=40), group=3):
        assert completion.logprobs_T.dtype == torch.float32
        gap_T = (completion.logprobs_T.double() - exact_logprobs(model, completion)).abs()
        assert gap_T.mean() < 0.05  # the rounding of bfloat16 logits between 1 and 8 is up to 0.016


def test_under_autocast_it_decodes_close_to_the_trainers_forward(tokenizer: Any) -> None:
    model: Any = random_policy()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        completions = collect(model, tokenizer, SamplingParams(max_tokens=40), group=3)
        for completion in completions:
            prompt_ids = completion.request.prompt.token_ids
            input_ids_BT = torch.tensor([[*prompt_ids, *completion.token_ids_T.tolist()]])
            with torch.no_grad():
                logits_TV = token_logits(model, hidden_states(model, input_ids_BT)[0, len(prompt_ids) - 1 : -1])
            expected_T = logits_TV.log_softmax(-1).gather(-1, completion.token_ids_T[:, None])[:, 0]
            assert (completion.logprobs_T - expected_T).abs().mean() < 0.05
    exact = double(model)
    gaps = [(c.logprobs_T.double() - exact_logprobs(exact, c)).abs().max().item() for c in completions]
    assert max(gaps) > 1e-4  # it did run in bfloat16


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Bloom", {}, "does not use transformers' attention interface"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_model_that_the_slots_cannot_decode_is_refused_at_the_start(
    name: str, changes: dict[str, Any], reason: str, tokenizer: Any
) -> None:
    model = build(name, changes).train()
    before = model.config._attn_implementation
    with pytest.raises(ValueError) as caught:
        SlotGenerator().start(PolicySpec(model, tokenizer))
    assert str(caught.value).startswith("SlotGenerator cannot decode")
    assert reason in str(caught.value)
    assert str(caught.value).endswith("let vLLM decode it: --model.generator lit_grpo.rollout.vllm.VLLMGenerator.")
    assert "\n" not in str(caught.value)
    assert model.training
    assert model.config._attn_implementation == before != ATTENTION_NAME


def test_a_model_whose_layers_remember_more_than_keys_and_values_is_refused(tokenizer: Any) -> None:
    model: Any = random_policy()

    def remember(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.cumsum(1)  # a recurrence that no cache holds

    model.get_decoder().layers[1].mlp.register_forward_hook(remember)
    with pytest.raises(ValueError, match="remember more than keys and values"):
        SlotGenerator().start(PolicySpec(model, tokenizer))
