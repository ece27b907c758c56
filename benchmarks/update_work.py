"""What the benchmarks of the update phase share: groups to learn from, policies, and a count of the work."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lit_grpo.types import Completion, Prompt, PromptBatch, Request, Rollout, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIGMA = 0.6  # of the logarithm of completion lengths


@dataclass(frozen=True)
class Work:
    """Groups of one optimizer step: completion lengths are log-normal, from a fixed seed.

    ``max_tokens`` is the limit on a completion; by default eight times the mean, which next to none reaches.
    """

    prompt_tokens: int
    mean_tokens: int
    group_size: int
    num_groups: int = 1
    vocab_size: int = 4096
    sigma: float = SIGMA
    seed: int = 0
    max_tokens: int | None = None

    @property
    def limit(self) -> int:
        """The most tokens of a completion."""
        return self.max_tokens or 8 * self.mean_tokens

    def lengths(self) -> list[list[int]]:
        """Tokens of each completion, by group."""
        rng = random.Random(self.seed)
        mu = math.log(self.mean_tokens) - self.sigma**2 / 2
        return [
            [min(max(1, round(rng.lognormvariate(mu, self.sigma))), self.limit) for _ in range(self.group_size)]
            for _ in range(self.num_groups)
        ]

    def groups(self) -> list[RolloutGroup]:
        """Random tokens, and rewards of which no two of a group are equal."""
        rng = random.Random(self.seed + 1)
        return [self._group(rng, f"train/{row}", lengths) for row, lengths in enumerate(self.lengths())]

    def _group(self, rng: random.Random, prompt_id: str, lengths: list[int]) -> RolloutGroup:
        tokens = [rng.randrange(2, self.vocab_size) for _ in range(self.prompt_tokens)]
        prompt = Prompt(prompt_id, tuple(tokens), "")
        sampling = SamplingParams(max_tokens=self.limit)
        rollouts = []
        for sample, length in enumerate(lengths):
            ids_T = torch.tensor([rng.randrange(2, self.vocab_size) for _ in range(length)])
            logprobs_T = torch.full((length,), -math.log(self.vocab_size))
            completion = Completion(
                Request(prompt, (sample,), sampling), ids_T, logprobs_T, torch.zeros_like(ids_T), "stop"
            )
            rollouts.append(Rollout(prompt, completion, {}, sample / len(lengths)))
        return RolloutGroup(prompt, rollouts)

    @property
    def num_completion_tokens(self) -> int:
        """Completion tokens of the step."""
        return sum(map(sum, self.lengths()))


class SameBatch:
    """A loader that gives the same groups again and again.

    Args:
        work: The groups.
        number: How many batches.
    """

    def __init__(self, work: Work, number: int) -> None:
        self.groups, self.number = work.groups(), number

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[PromptBatch]:
        for _ in range(self.number):
            batch = PromptBatch([group.prompt for group in self.groups])
            batch.groups = list(self.groups)
            yield batch


POLICIES: dict[str, dict[str, Any]] = {
    "34M": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 64},
    "demo": {"hidden_size": 128, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 8,
             "num_key_value_heads": 4, "head_dim": 16},
    "7M": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
           "num_key_value_heads": 4, "head_dim": 32},
    "smallest": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 16},
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip
"""Qwen3 of these sizes, with random weights and tied embeddings."""


def save_update_policy(folder: Path, size: str, vocab_size: int, device: str = "cpu") -> None:
    """Save a random Qwen3 with a tokenizer that knows sixteen of its tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from lit_grpo.policy.tiny import EOS, PAD, make_tokenizer

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=vocab_size,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[EOS],
        pad_token_id=tokenizer.get_vocab()[PAD],
        **POLICIES[size],
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def floor_flops(policy: PreTrainedModel, work: Work) -> float:
    """The floating-point operations that no method can do without: two per multiply-add, backward twice the forward.

    Every token that predicts goes through every matrix once, every completion token meets the head, and attention meets
    each pair of a query and a key that it may see. Norms, activations and the optimizer are left out.
    """
    config = policy.config.get_text_config()
    layers = cast(torch.nn.ModuleList, policy.get_decoder().layers)
    matrices = sum(parameter.numel() for parameter in layers.parameters() if parameter.dim() == 2)
    tokens, pairs, prompt = 0, 0, work.prompt_tokens
    for lengths in work.lengths():
        tokens += prompt + sum(length - 1 for length in lengths)
        pairs += prompt * (prompt + 1) // 2
        pairs += sum((length - 1) * prompt + (length - 1) * length // 2 for length in lengths)
    attention = 2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers * pairs
    head = config.vocab_size * config.hidden_size * work.num_completion_tokens
    return 2.0 * 3.0 * (matrices * tokens + attention + head)
