"""D3S (arXiv 2509.22115): learn from part of a batch's completions and of their tokens, few at first, many at last.

Completions: of the whole batch, on all ranks, those whose advantages have the largest variance, so that groups which
teach more keep more; advantages are not normalized again. Tokens: of those completions the ones with the largest
``|A_i| x H_it``, with H the entropy over the whole vocabulary under the policy that is about to be updated. Both
numbers move in a line over the run. The paper's first and last values are not known to us, so they are settings.

Evidence: ``benchmarks/results/budgets-2026-11-23.json`` has learning curves of 4 to 8 of 16 completions and a fifth to
four fifths of their tokens; docs/measurements.md, "Budgets", reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from lit_grpo.compatibility import Requirement
from lit_grpo.limits import Share
from lit_grpo.methods.shared.selection import Subset, between, candidates, check_end, max_variance_subset, nearest
from lit_grpo.plugins import Plugin, RunFacts
from lit_grpo.update.plugin import Batch
from lit_grpo.update.step import Step


@dataclass
class TokenShare(Plugin):
    """A share of the tokens of the completions that are trained on: the tokens with the largest ``|A_i| x H_it``.

    Any other choice of completions can have it too, by a class that derives from both:
    ``class PodsTokens(TokenShare, MaxVariance)``.
    """

    writes: ClassVar[frozenset[str]] = frozenset({"mask"})

    tokens: Share = 1.0
    """Fraction of a step's tokens to train on, over all ranks, above 0; 1 is all of them."""
    first_tokens: Share | None = None
    """Value of ``tokens`` at the beginning of the run, from which it changes linearly to ``tokens`` at the last update.
    By default it stays the same.
    """

    @property
    def _takes_tokens(self) -> bool:
        """True if, at any time of the run, a part of the tokens is trained on."""
        return min(self.tokens, self.first_tokens or 1.0) < 1

    def requirement(self, name: str) -> Requirement:
        if not self._takes_tokens:
            return super().requirement(name)
        said = f"chooses a share of them, tokens {self.tokens} and first_tokens {self.first_tokens}"
        return Requirement(name, self.needs | {"all_ranks"}, {"all_tokens": said})

    def check(self, run: RunFacts) -> None:
        super().check(run)
        check_end(self, run)

    def token_share(self, progress: float) -> float:
        return between(self.first_tokens, self.tokens, progress)

    def on_minibatch(self, step: Step) -> None:
        """Keep the share of tokens with the highest ``|A_i| x H_it``; entropies are measured where A_i is not 0."""
        share = self.token_share(step.progress)
        if share == 1:
            return
        measured = step.measure([rollout for rollout in step.rollouts if rollout.advantage], "entropy")
        scores = [
            measured[rollout.completion.request.key] * abs(rollout.advantage)
            if rollout.advantage
            else torch.zeros(rollout.completion.num_trained)
            for rollout in step.rollouts
        ]
        for rollout, mask_N in zip(step.rollouts, step.highest(scores, share), strict=True):
            step.set("mask", rollout, mask_N)


@dataclass
class D3S(TokenShare, Subset):
    """The completions of the whole batch whose advantages have the largest variance, and a share of their tokens.

    ``keep`` is the mean number of completions per group: the batch keeps ``keep`` times its number of groups.
    """

    writes: ClassVar[frozenset[str]] = frozenset({"trained", "mask"})
    needs: ClassVar[frozenset[str]] = frozenset({"all_ranks"})

    def on_batch(self, batch: Batch) -> None:
        """Train on those whose advantages have the largest variance, over all ranks."""
        own_R = torch.tensor([rollout.advantage for rollout in batch.rollouts], dtype=torch.float64)
        own_R = own_R.masked_fill(~candidates(batch), math.nan)
        parts, counts = zip(*batch.all_gather((own_R, len(batch.groups))), strict=True)
        advantages_R = torch.cat(parts)
        valid = (~advantages_R.isnan()).nonzero().flatten()
        size = nearest(self.keep_at(batch.progress) * sum(counts))
        chosen_R = torch.zeros(len(advantages_R), dtype=torch.bool)
        chosen_R[valid[max_variance_subset(advantages_R[valid], size)]] = True
        begin = sum(map(len, parts[: batch.rank]))
        for rollout, is_chosen in zip(batch.rollouts, chosen_R[begin:].tolist(), strict=False):
            batch.set("trained", rollout, is_chosen)


PLUGINS = {"d3s": D3S(), "d3s_tokens": TokenShare(0.2)}
