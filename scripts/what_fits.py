"""The way of training that fits for each model on each GPU, by fit-check's estimate, as the table of the docs.

``python -m scripts.what_fits`` prints it, in about two minutes. Sizes are those of models without numbers (torch's fake
tensors), so nothing is loaded and no memory is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    DeepseekV2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SmolLM3Config,
)

from lit_grpo.training.forecast import Demand, Sizes, forecast, largest

GIB = 2**30
MEMORIES_GB = (24, 48, 80)
SPARE = 0.95
"""The share of a GPU's memory that may be taken: allocators leave gaps."""


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, tied: bool = True) -> PreTrainedConfig:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )


def _qwen3_5(layers: int, hidden: int, intermediate: int, heads: int, tied: bool = True) -> PreTrainedConfig:
    return Qwen3_5TextConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        linear_num_value_heads=2 * heads,
        tie_word_embeddings=tied,
    )


def _llama3(layers: int, hidden: int, heads: int) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )


def _gemma3(
    vocabulary: int, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int
) -> PreTrainedConfig:
    return Gemma3TextConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=256,
    )


def _lfm2(hidden: int, intermediate: int, heads: int) -> PreTrainedConfig:
    return Lfm2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=16,
        num_attention_heads=heads,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
    )


def _granite4_h(
    layers: int, attention: Iterable[int], hidden: int, intermediate: int, heads: int, kv_heads: int, mamba_heads: int
) -> PreTrainedConfig:
    return GraniteMoeHybridConfig(
        vocab_size=100_352,
        hidden_size=hidden,
        intermediate_size=intermediate,
        shared_intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=mamba_heads,
        mamba_d_state=128,
        layer_types=["full_attention" if number in attention else "linear_attention" for number in range(layers)],
        tie_word_embeddings=True,
    )


MODELS: dict[str, PreTrainedConfig] = {
    "Qwen3.5 0.8B": _qwen3_5(24, 1024, 3584, 8),
    "Qwen3.5 4B": _qwen3_5(32, 2560, 9216, 16),
    "Qwen3.5 9B": _qwen3_5(32, 4096, 12_288, 16, tied=False),
    "Qwen3 0.6B": _qwen3(28, 1024, 3072, 16),
    "Qwen3 1.7B": _qwen3(28, 2048, 6144, 16),
    "Qwen3 4B": _qwen3(36, 2560, 9728, 32),
    "Qwen3 8B": _qwen3(36, 4096, 12_288, 32, tied=False),
    "Qwen2.5 0.5B": Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "Llama 3.2 1B": _llama3(16, 2048, 32),
    "Llama 3.2 3B": _llama3(28, 3072, 24),
    "Gemma 3 1B": _gemma3(262_144, 26, 1152, 6912, 4, 1),
    "Gemma 3 4B": _gemma3(262_208, 34, 2560, 10_240, 8, 4),
    "SmolLM3 3B": SmolLM3Config(),
    "LFM2 350M": _lfm2(1024, 6656, 16),
    "LFM2 1.2B": _lfm2(2048, 12_288, 32),
    "Granite 4.0 H 350M": _granite4_h(32, (10, 13, 17, 27), 768, 2048, 12, 4, 48),
    "Granite 4.0 H 1B": _granite4_h(40, (5, 15, 25, 35), 1536, 4096, 12, 4, 48),
    "Granite 4.0 H Micro": _granite4_h(40, (5, 15, 25, 35), 2048, 8192, 32, 8, 64),
    "Phi-4-mini": Phi3Config(
        vocab_size=200_064,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=24,
        num_key_value_heads=8,
        pad_token_id=None,
        tie_word_embeddings=True,
    ),
    "GPT-OSS 20B": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "DeepSeek-V2-Lite": DeepseekV2Config(
        hidden_size=2048,
        intermediate_size=10_944,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        first_k_dense_replace=1,
        moe_intermediate_size=1408,
        num_experts_per_tok=6,
    ),
}
"""The text part of each, as its config.json has it."""
MIXTURES = ("GPT-OSS 20B", "DeepSeek-V2-Lite")
"""Their experts are no linear layers: four bits pass over them, adapters of them are not counted here, and in float32
they are beyond 80 GB.
"""
DEMAND = Demand(0, 16, 512, 1024, 8192, device="cuda", mixed=True, checkpointing=True)
"""Prompts of 512 and completions of 1,024 tokens, 16 of each prompt, in bf16-mixed, with gradient checkpointing."""
WAYS: dict[str, tuple[Demand, str]] = {
    "all weights": (DEMAND, "`trainer.precision: bf16-mixed`"),
    "LoRA": (replace(DEMAND, lora_rank=32), "also `model.lora.r: 32`"),
    "LoRA, bf16": (
        replace(DEMAND, lora_rank=32, weight_bytes=2, mixed=False),
        "`model.lora.r: 32`, `model.dtype: bfloat16` and `trainer.precision: bf16-true`",
    ),
    "QLoRA": (replace(DEMAND, lora_rank=32, weight_bytes=2, mixed=False, nf4=True), "that with `model.lora.base: nf4`"),
}
"""By name, the settings; the first that fits stands in the table."""
LEAST_SLOTS, MOST_SLOTS = 8, 256


@cache
def sizes_of(model: str, mixed: bool, weight_bytes: int) -> Sizes:
    """Return the figures of a model that decide its memory."""
    with FakeTensorMode():
        return Sizes.of(MODELS[model], mixed, weight_bytes)


def what_fits(model: str, memory_gb: int) -> str:
    """Return the first way that leaves room for some slots, how many, and the peak that it has with them."""
    limit = SPARE * memory_gb * 1e9
    for name, (demand, _) in WAYS.items():
        if model in MIXTURES and name != "LoRA, bf16":
            continue
        sizes = sizes_of(model, demand.mixed, demand.weight_bytes)
        num_slots = largest(sizes, demand, "num_slots", limit, MOST_SLOTS)
        if num_slots >= LEAST_SLOTS:
            peak = forecast(sizes, replace(demand, num_slots=num_slots)).peak
            return f"{name}, {num_slots} slots, {peak / GIB:.0f} GiB"
    return "no"


def row(model: str) -> str:
    """Return the row of a model, in Markdown."""
    return f"| {model} | " + " | ".join(what_fits(model, memory) for memory in MEMORIES_GB) + " |"


def ways() -> str:
    """Return what the names of ways mean."""
    return "; ".join(f"*{name}* is {meaning}" for name, (_, meaning) in WAYS.items()) + "."


def table() -> str:
    """Return the table, in Markdown."""
    head = "| model | " + " | ".join(f"{memory} GB" for memory in MEMORIES_GB) + " |"
    return "\n".join([head, "|---" * (1 + len(MEMORIES_GB)) + "|", *map(row, MODELS), "", ways()]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
