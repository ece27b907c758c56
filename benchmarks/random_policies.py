"""Qwen3 and Qwen3.5 models of random parameters and of the sizes that benchmarks need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Sizes:
    """Of a Qwen3. The vocabulary is the demo's unless told otherwise; ``tied``: its embedding is also its head.

    A ``hybrid`` is a Qwen3.5: three of four layers are gated DeltaNet, with as many heads, as large, as attention.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int = 16
    tied: bool = False
    hybrid: bool = False


QWEN3_1_7B = Sizes(28, 2048, 6144, 16, 8, 128, vocab_size=151_936, tied=True)
"""That of Qwen/Qwen3-1.7B."""
QWEN3_WIDE = Sizes(28, 64, 128, 8, 8, 128)
"""The keys and values of Qwen3-0.6B (28 layers of 8 heads of 128: 224 KiB a token in float32), and little else."""
QWEN3_7M = Sizes(8, 256, 512, 4, 4, 128)
"""Its keys and values take 32 KiB a token, ten times the demo's and a third of those of Qwen3-0.6B in bfloat16."""
QWEN3_31M = Sizes(8, 512, 2048, 8, 4, 64)
TO_UPDATE = {
    "smallest": Sizes(2, 64, 128, 4, 2, 16, tied=True),
    "7M": Sizes(6, 256, 1024, 8, 4, 32, tied=True),
    "34M": replace(QWEN3_31M, tied=True),
    "76M": Sizes(12, 640, 2560, 10, 5, 64, tied=True),
    "Qwen3-1.7B": QWEN3_1_7B,
    "smallest hybrid": Sizes(4, 64, 128, 4, 2, 16, tied=True, hybrid=True),
    "hybrid, 7M": replace(QWEN3_7M, tied=True, hybrid=True),
    "hybrid, 31M": replace(QWEN3_31M, tied=True, hybrid=True),
}
"""Policies of the update phase, whose vocabulary is that of their work."""


def random_qwen3(sizes: Sizes, device: str = "cpu", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return a model of random parameters in evaluation mode, made on ``device``; in float32 unless told otherwise.

    Its ends of sequence and padding are those of the demo's tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

    from scripts.make_tiny import EOS_ID, PAD_ID

    linear: dict[str, Any] = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), sizes.heads)
    linear |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), sizes.head_dim)
    config = (Qwen3_5TextConfig if sizes.hybrid else Qwen3Config)(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=sizes.tied,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        **linear if sizes.hybrid else {},
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32).eval()


def kv_bytes(policy: PreTrainedModel) -> int:
    """Return the bytes of one token's keys and values."""
    config = policy.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * policy.dtype.itemsize


def save_random_policy(folder: Path, sizes: Sizes, device: str = "cpu") -> None:
    """Save a Qwen3 of random parameters with the demo's tokenizer, which knows sixteen of its tokens.

    With the demo's vocabulary every token is about equally likely, so that the lengths of completions are geometric,
    with a mean of about 15.
    """
    from scripts.make_tiny import make_tokenizer

    random_qwen3(sizes, device).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
