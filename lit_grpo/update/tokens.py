"""The completion tokens of a micro-batch as the objectives see them, and sums over completions."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tokens:
    """What an objective is computed from; the N axis holds the completions one after another, each of them whole.

    ``logprobs_N`` carries the gradient, ``entropy_N`` (nats) where an entropy bonus asks for it, and nothing else does.
    ``sampled_logprobs_N`` are those of the policy that sampled, ``old_logprobs_N`` those that ratios are taken to:
    the same, or the trainer's own before the first update on the rollouts, where a correction bridges the two.
    ``reference_logprobs_N`` are there where a KL term needs them. ``advantages_C`` and ``lengths_C``: one a completion.
    """

    logprobs_N: torch.Tensor
    sampled_logprobs_N: torch.Tensor
    old_logprobs_N: torch.Tensor
    entropy_N: torch.Tensor
    advantages_C: torch.Tensor
    lengths_C: torch.Tensor
    reference_logprobs_N: torch.Tensor | None = None

    @property
    def advantages_N(self) -> torch.Tensor:
        """The advantage of the completion that each token belongs to."""
        return spread(self.advantages_C, self.lengths_C)


def spread(values_C: torch.Tensor, lengths_C: torch.Tensor) -> torch.Tensor:
    """Give each token the value of its completion: C to N."""
    return values_C.repeat_interleave(lengths_C)


def completion_sums(values_N: torch.Tensor, lengths_C: torch.Tensor) -> torch.Tensor:
    """Sum up each completion's tokens: N to C; 0 for a completion without tokens."""
    if not len(lengths_C):
        return values_N  # of no token, and part of the graph
    return torch.segment_reduce(values_N, "sum", lengths=lengths_C, unsafe=True)


def completion_means(values_N: torch.Tensor, lengths_C: torch.Tensor) -> torch.Tensor:
    """Average each completion's tokens: N to C; 0 for a completion without tokens."""
    return completion_sums(values_N, lengths_C) / lengths_C.clamp(min=1)
