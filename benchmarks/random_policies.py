"""Qwen3 models of random parameters and of the sizes that benchmarks need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Sizes = dict[str, int]

DEMO_VOCABULARY: Sizes = {"vocab_size": 16, "max_position_embeddings": 4096}
QWEN3_7M = DEMO_VOCABULARY | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
"""Its keys and values take 32 KiB a token, ten times the demo's and a third of those of Qwen3-0.6B in bfloat16."""
QWEN3_31M = DEMO_VOCABULARY | {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
QWEN3_WIDE = DEMO_VOCABULARY | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 28,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""The keys and values of Qwen3-0.6B (28 layers of 8 heads of 128: 224 KiB a token in float32), and little else."""
QWEN3_1_7B = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}
"""That of Qwen/Qwen3-1.7B, whose embedding is also its head."""


def random_qwen3(sizes: Sizes, device: str = "cpu", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a Qwen3 of random parameters in evaluation mode, made on ``device``; in float32 unless told otherwise.

    Its ends of sequence and padding are those of the demo's tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from lit_grpo.policy.tiny import EOS_ID, PAD_ID

    config = Qwen3Config(
        **sizes,  # pyright: ignore[reportArgumentType]
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=sizes == QWEN3_1_7B,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32).eval()


def save_random_policy(folder: Path) -> None:
    """Save a Qwen3 of 7 million random parameters with the demo's tokenizer.

    Every token is about equally likely, so the lengths of completions are geometric, with a mean of about 15.
    """
    from lit_grpo.policy.tiny import make_tokenizer

    random_qwen3(QWEN3_7M).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
