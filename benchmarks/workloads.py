"""Prompts, rewards and policies that several benchmarks share, so that they mean the same thing."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from lit_grpo.arithmetic import ArithmeticRows
from lit_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NOISE_REWARD = "benchmarks.workloads.noise_reward"


def arithmetic_rows(num_prompts: int) -> ArithmeticRows:
    """The demo's exercises. Workings are long-tailed: most are short, and a few are ten times as long."""
    return ArithmeticRows(num_rows=num_prompts)


def arithmetic_prompts(tokenizer: PreTrainedTokenizerBase, num_prompts: int) -> list[Prompt]:
    """The demo's exercises, tokenised as in training."""
    texts = [str(row["prompt"]) for row in arithmetic_rows(num_prompts).rows()]
    return [Prompt(f"train/{number}", tuple(tokenizer.encode(text)), text) for number, text in enumerate(texts)]


def noise_reward(completion: str) -> float:
    """A reward without meaning, spread evenly over [0, 1), so that no group is uniform and every rollout counts."""
    return zlib.crc32(completion.encode()) / 2**32


def save_random_policy(folder: Path) -> None:
    """Save a Qwen3 of 7 million random parameters with the demo's tokenizer.

    Its keys and values take 32 KiB a token, ten times the demo's and a third of those of Qwen3-0.6B in bfloat16.
    Every token is about equally likely, so the lengths of completions are geometric, with a mean of about 15.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from lit_grpo.tiny import EOS, PAD, make_tokenizer

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[EOS],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(policy: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a policy for decoding."""
    from lit_grpo.policy import load_policy, load_tokenizer

    return load_policy(policy).to(device).eval(), load_tokenizer(policy)  # pyright: ignore[reportArgumentType]


def random_qwen3(device: str) -> PreTrainedModel:
    """Return a Qwen3 of 31 million random parameters with the demo's vocabulary."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=16,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to(device).eval()  # pyright: ignore[reportArgumentType]
