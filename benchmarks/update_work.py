"""Common parts of the benchmarks of the update: groups to train on, their loader, and a count of the work."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

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


class BatchOnDemand:
    """A loader that gives a first batch at once, then the same groups again for each line of standard input.

    Args:
        work: The groups.
        first: How many completions of each group the first batch has, which is smaller where it only warms up.
    """

    def __init__(self, work: Work, first: int | None = None) -> None:
        self.groups, self.first = work.groups(), first

    def __len__(self) -> int:
        return 10**6  # more than are asked for; a loader without a length would be asked for the next one early

    def __iter__(self) -> Iterator[PromptBatch]:
        yield self._batch([RolloutGroup(group.prompt, group.rollouts[: self.first]) for group in self.groups])
        for _ in iter(sys.stdin.readline, ""):
            yield self._batch(list(self.groups))

    def _batch(self, groups: list[RolloutGroup]) -> PromptBatch:
        batch = PromptBatch([group.prompt for group in groups])
        batch.groups = groups
        return batch


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
