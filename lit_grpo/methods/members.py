"""Two choices of each group's members to compare PODS with: those of the highest mean entropy, and random ones.

Evidence: ``benchmarks/results/budgets-2026-11-23.json`` has learning curves of 4 of 16 completions;
docs/measurements.md, "Budgets", reads them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lit_grpo.methods.shared.selection import CompletionSelection
from lit_grpo.plugins import RunFacts
from lit_grpo.ranks import Ranks
from lit_grpo.types import Key, Rollout
from lit_grpo.update.plugin import Measure


@dataclass
class MaxEntropy(CompletionSelection):
    """The members with the highest mean entropy of their tokens, under the policy that sampled them.

    Where the generator tells no entropies, they are measured, which sends every completion through the policy once
    more.
    """

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if run.abilities is not None and "entropies" not in run.abilities:
            Ranks(torch.device("cpu")).warn(
                f"rollout.plugins: {type(self).__name__} goes by entropies, and {run.generator} tells none: they are "
                "measured, for which every completion goes through the policy once more."
            )

    def values(self, rewards_N: torch.Tensor, rollouts: Sequence[Rollout], measure: Measure) -> torch.Tensor:
        """Return the mean entropies."""
        unknown = [each for each in rollouts if math.isnan(each.completion.entropy)]
        return mean_entropies(rollouts, measure(unknown, "entropy"))


@dataclass
class RandomCompletions(CompletionSelection):
    """Random members, the same in every run: those with the lowest hashes of their names."""

    def values(self, rewards_N: torch.Tensor, rollouts: Sequence[Rollout], measure: Measure) -> torch.Tensor:
        """Return how many have a higher hash, or an equal one and come later."""
        ascending = sorted(range(len(rollouts)), key=lambda n: _hash(rollouts[n]))
        values_N = torch.empty(len(rollouts), dtype=torch.float64)
        values_N[ascending] = torch.arange(len(rollouts), dtype=torch.float64).flip(0)
        return values_N


def mean_entropies(rollouts: Sequence[Rollout], measured: Mapping[Key, torch.Tensor]) -> torch.Tensor:
    """Return the mean entropy of each rollout's tokens in nats, float64, shape R.

    It is that of the distributions that they were sampled from, as the generator tells; where the generator tells none,
    it is that of the policy. A rollout without a token to learn from comes after all others.

    Args:
        rollouts: Rollouts to measure, R of them, in the order of the result.
        measured: The entropy of each token that is trained on, by completion, where the generator tells none.
    """
    entropies = []
    for completion in (rollout.completion for rollout in rollouts):
        own = completion.entropy
        if completion.num_trained and math.isnan(own):
            own = float(measured[completion.request.key].double().mean())
        entropies.append(own if completion.num_trained else -math.inf)
    return torch.tensor(entropies, dtype=torch.float64)


def _hash(rollout: Rollout) -> bytes:
    return hashlib.blake2b(repr(rollout.completion.request.key).encode(), digest_size=8).digest()


PLUGINS = {"max_entropy": MaxEntropy(), "random_members": RandomCompletions()}
