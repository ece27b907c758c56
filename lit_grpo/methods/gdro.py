"""GDRO (arXiv 2601.19280): prompts and completions by groups of equal difficulty, against the hardest of them.

``prompt_gdro`` chooses prompts, ``rollout_gdro`` divides completions; each works without the other, as in the paper.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, ClassVar

import numpy as np

from lit_grpo.budgets.allocation import greedy
from lit_grpo.budgets.history import Record
from lit_grpo.budgets.prompts import State
from lit_grpo.limits import Count, Limit, Positive, Share
from lit_grpo.methods.shared.division import Divided
from lit_grpo.plugins import Plugin
from lit_grpo.types import Prompt

Bins = Annotated[int, Limit(ge=2, remedy="with one bin all prompts are alike")]


@dataclass
class PromptGDRO(Plugin):
    """Ask prompts of hard groups more often, by exponential weights (Prompt-GDRO, arXiv 2601.19280, eq. 10 to 16).

    A prompt's group is the share of its last visits, 8 at most, at which anybody passed, cut into ``bins`` of equal
    width. The loss of a visit is the share that did not pass. After a batch with prompts of group b, whose mean loss is
    ``l``, the group's score is ``S_b <- (1 - smoothing) S_b + smoothing l``, and ``l`` itself the first time. A mean,
    not a sum, so that a rare group counts as much as a frequent one. With the weights ``w_b = exp(sharpness S_b)``

        ``q_b = (1 - exploration) w_b / sum of w + exploration / bins``

    where a group without a score yet has a weight of 1. A prompt is asked at a chance of ``q_b`` over the largest q.
    One that was never visited is always asked.

    The paper learns from prompts with ``w_b`` as a factor of their advantages, which it calls equal to asking them more
    often in expectation; here they are asked more often, and no gradient is scaled. Its loss is that of the clipped
    surrogate, whose value on fresh rollouts is about 0 whatever passes; ours is the share that fails. With
    ``exploration: 1`` all prompts are asked. For example::

        rollout:
          plugins:
            - prompt_gdro: {sharpness: 2.0}
    """

    needs: ClassVar[frozenset[str]] = frozenset({"revisits"})

    bins: Bins = 10
    """Number of groups of difficulty; 10 in the paper's code, and about 6 did best in its trials."""
    sharpness: Positive = 2.0
    """Factor of the loss in a group's weight. Losses are from 0 to 1, so the weights of two groups are at most
    ``exp(sharpness)`` apart.
    """
    smoothing: Share = 0.1
    """Weight of a batch in a group's score."""
    exploration: Share = 0.15
    """Fraction of the chances that all groups share evenly; 1 asks all prompts."""

    def prompt_chance(self, prompt: Prompt, record: Record, state: State) -> float:
        if not record.recent:
            return 1.0
        shares = self.shares(state)
        return shares[bin_of(record, self.bins)] / max(shares)

    def shares(self, state: State) -> list[float]:
        """Return each group's q."""
        scores = [state[f"loss_of_bin/{number}"] for number in range(self.bins)]
        weights = [math.exp(self.sharpness * max(score, 0.0)) for score in scores]
        total = sum(weights)
        return [(1 - self.exploration) * weight / total + self.exploration / self.bins for weight in weights]

    def prompt_state(
        self, prompts: Sequence[Prompt], records: Sequence[Record] = (), state: State | None = None
    ) -> State:
        """Move the scores of groups that the batch has prompts of, by their groups of before it; below 0 is none."""
        if state is None:
            return {f"loss_of_bin/{number}": -1.0 for number in range(self.bins)}
        losses: dict[str, list[float]] = defaultdict(list)
        for record in records:
            if len(record.recent) > 1:
                group = bin_of(record, self.bins, num_latest=1)
                losses[f"loss_of_bin/{group}"].append(1 - record.last_pass_rate)
        moved = {name: fmean(of_bin) for name, of_bin in losses.items()}
        return {name: score if name not in moved else self._score(score, moved[name]) for name, score in state.items()}

    def _score(self, before: float, loss: float) -> float:
        return loss if before < 0 else (1 - self.smoothing) * before + self.smoothing * loss


def bin_of(record: Record, bins: int, num_latest: int = 0) -> int:
    """Return the group of a prompt, from 0, the hardest, to ``bins - 1``, without its ``num_latest`` last visits."""
    counted = record.recent[: len(record.recent) - num_latest]
    share = fmean(outcome.pass_rate > 0 for outcome in counted)
    return min(int(share * bins), bins - 1)


@dataclass
class RolloutGDRO(Divided):
    """As many completions of a group of prompts as lessens the variance most (Rollout-GDRO, arXiv 2601.19280, eq. 30).

    The noise of a batch's gradient is about ``sum_b share_b v_b / n_b``, with ``v_b = p (1 - p)`` the variance of a
    reward in group b and n_b the completions of each of its prompts. Under a budget it is least where n_b is in
    proportion to ``sqrt(v_b)``, within ``least`` and ``most``; one completion after another goes to the group that it
    lessens the noise of most, which is exact for whole numbers. Groups are pass rates cut into ``bins`` of equal width,
    and p is the mean of a group's prompts in the batch. What a group's count leaves over goes to its first prompts.

    It deviates from the paper, whose law this is, not its algorithm: there, counts are learned by bandits, one
    for each group, from the loss and a price on completions, and the law is what they approximate (section 4.3). It
    leaves v open; p (1 - p) is ours. Its groups are of the share of visits at which anybody passed, as in
    ``prompt_gdro``, and here of the share of completions that passed, without which p would not be known. For example::

        rollout:
          plugins:
            - rollout_gdro: {budget: 128, most: 32}
    """

    bins: Count = 10
    """Number of groups of difficulty."""

    def divided(self, rates: np.ndarray, costs: np.ndarray, budget: float, most: int) -> list[int]:
        groups = np.minimum((rates * self.bins).astype(int), self.bins - 1)
        means = np.array([rates[groups == group].mean() for group in groups])
        return greedy(
            means.tolist(), budget, self.least, most, value=lambda n, p: -p * (1 - p) / n, costs=costs.tolist()
        )


PLUGINS = {"prompt_gdro": PromptGDRO(), "rollout_gdro": RolloutGDRO()}
