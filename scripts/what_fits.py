"""The way of training that fits for each Qwen3 on each GPU, by fit-check's estimate, as the table of the docs.

``python -m scripts.what_fits`` prints it. Sizes are those of models without numbers (torch's fake tensors), so
nothing is loaded and no memory is taken.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3Config

from lit_grpo.training.forecast import Demand, Sizes, forecast, largest

GIB = 2**30
MEMORIES_GB = (24, 48, 80)
SPARE = 0.95
"""The share of a GPU's memory that may be taken: allocators leave gaps."""
SHAPES = {  # layers, hidden, intermediate, heads, tied; all have 8 KV heads of 128
    "0.6B": (28, 1024, 3072, 16, True),
    "1.7B": (28, 2048, 6144, 16, True),
    "4B": (36, 2560, 9728, 32, True),
    "8B": (36, 4096, 12_288, 32, False),
}
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
    """Return the figures of a Qwen3 that decide its memory."""
    layers, hidden, intermediate, heads, tied = SHAPES[model]
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )
    with FakeTensorMode():
        return Sizes.of(config, mixed, weight_bytes)


def what_fits(model: str, memory_gb: int) -> str:
    """Return the first way that leaves room for some slots, how many, and the peak that it has with them."""
    limit = SPARE * memory_gb * 1e9
    for name, (demand, _) in WAYS.items():
        sizes = sizes_of(model, demand.mixed, demand.weight_bytes)
        num_slots = largest(sizes, demand, "num_slots", limit, MOST_SLOTS)
        if num_slots >= LEAST_SLOTS:
            peak = forecast(sizes, replace(demand, num_slots=num_slots)).peak
            return f"{name}, {num_slots} slots, {peak / GIB:.0f} GiB"
    return "no"


def table() -> str:
    """Return the table, in Markdown."""
    head = "| Qwen3 | " + " | ".join(f"{memory} GB" for memory in MEMORIES_GB) + " |"
    rows = [f"| {model} | " + " | ".join(what_fits(model, memory) for memory in MEMORIES_GB) + " |" for model in SHAPES]
    ways = "; ".join(f"*{name}* is {meaning}" for name, (_, meaning) in WAYS.items())
    return "\n".join([head, "|---" * (1 + len(MEMORIES_GB)) + "|", *rows, "", f"{ways}."]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
