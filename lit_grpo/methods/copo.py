"""COPO (arXiv 2508.04138): groups that agree with themselves are compared with the groups of other prompts.

A group whose rewards are all equal has no advantages of its own. Here an advantage is blended of two::

    A_i = w A_i(local) + (1 - w) A(global),   w = sigmoid(gamma (H - rho)),   H = -sum_a p(a) log2 p(a)

``A(local)`` is the advantage of the run's estimator (the paper's is ``grpo``). ``A(global)``, the same for the whole
group, is the group's mean reward less the mean over the groups of the batch, divided by their standard deviation plus
1e-4. ``p(a)`` is the share of the group's completions that give answer ``a``. So where answers differ, a group learns
by itself; where they agree, it grows where others of the batch are worse, and shrinks where they are better.

In the first step on a batch it equals the paper's code (hijih/copo-code, f66883f, ``only-soft``), which says the base
of the logarithm. What deviates: the paper blends two clipped losses, which differs where a ratio is clipped later; the
code's epsilon is 1e-6; and the code's last script, which has ``gamma`` 5 and ``rho`` 1 where the paper has the defaults
here, gives completions of reward 0 ``A(global)`` alone.

Note that a completion's own outcome does not count in ``A(global)``: in an easy prompt wrong answers are pushed up by
it, where ``w`` is small.

Evidence: the formula in float64, in ``tests/test_copo.py``. It has not been shown to help (docs/methods.md).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Annotated, ClassVar

from lit_grpo.limits import Limit
from lit_grpo.plugins import AllGather, GroupBatch, Plugin, RunFacts
from lit_grpo.rewards.builtin import compile_pattern, last_answer
from lit_grpo.types import RolloutGroup
from lit_grpo.update.advantages.functions import EPSILON
from lit_grpo.update.plugin import Batch


@dataclass
class Blended(Plugin):
    r"""Blends advantages within groups with those between groups, by how much a group agrees with itself.

    For example, with answers after a word, and a middle for groups of 2, whose H is at most 1::

        rollout: {plugins: [{copo: {pattern: 'answer is (\S+)', rho: 0.5}}]}
    """

    writes: ClassVar[frozenset[str]] = frozenset({"advantage"})
    needs: ClassVar[frozenset[str]] = frozenset({"all_ranks", "whole_groups", "plain_rewards"})

    pattern: str | None = None
    """Regular expression; group 1 of its last match is a completion's answer. All completions without a match have the
    same answer. By default the whole completion is its answer.
    """
    gamma: Annotated[float, Limit(gt=0, finite=True)] = 20.0
    """Slope of the weight's sigmoid; the larger, the sharper the change between the two kinds of advantage."""
    rho: Annotated[float, Limit(infinite=True)] = 1.5
    """Entropy H, in bits, at which both kinds of advantage have the weight one half; at most the base-2 logarithm of
    ``model.num_generations``, the H of a group without two equal answers. ``-.inf`` is the estimator's rule, ``.inf``
    compares groups only with other groups.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pattern is not None:
            compile_pattern("pattern", self.pattern, needs_group=True)

    def check(self, run: RunFacts) -> None:
        """Check that groups are large enough to learn by themselves, or none by intention."""
        largest = math.log2(run.num_generations)
        if largest < self.rho < math.inf:
            raise ValueError(
                f"rho is {self.rho:g} bits, and the answers of model.num_generations {run.num_generations} completions "
                f"have an entropy of at most {largest:.3g} bits, so that no group would learn by itself; give a rho of "
                f"at most {largest:.3g}, such as {largest / 2:.2g}, or .inf to compare groups with others alone."
            )

    def setup(self) -> None:
        self._weights: list[float] = []

    def add_members(self, batch: GroupBatch) -> None:
        """Weigh each group that may be trained on, and add none."""
        self._weights = [self.local(group) for group in batch.groups if group.rollouts]

    def metrics(self, all_gather: AllGather) -> dict[str, float]:
        """Return the mean weight of a batch's own advantages on all ranks, how much of them is local."""
        weights = [weight for of_rank in all_gather(self._weights) for weight in of_rank]
        return {"copo/local": fmean(weights) if weights else math.nan}

    def on_batch(self, batch: Batch) -> None:
        means = [mean_reward(group) for group in batch.groups]
        known = [mean for part in batch.all_gather(means) for mean in part if not math.isnan(mean)]
        middle = fmean(known) if known else 0.0
        spread = stdev(known) if len(known) > 1 else 0.0
        for group, mean in zip(batch.groups, means, strict=True):
            between = 0.0 if math.isnan(mean) else (mean - middle) / (spread + EPSILON)
            local = self.local(group)
            for rollout in group.rollouts:
                if not math.isnan(rollout.advantage):
                    batch.set("advantage", rollout, local * rollout.advantage + (1 - local) * between)

    def local(self, group: RolloutGroup) -> float:
        """Return the weight of a group's own advantages, from 0 to 1."""
        pattern = None if self.pattern is None else compile_pattern("pattern", self.pattern, needs_group=True)
        answers = Counter(last_answer(pattern, group.prompt.given + each.completion.text) for each in group.rollouts)
        shares = [count / answers.total() for count in answers.values()]
        entropy = math.fsum(-share * math.log2(share) for share in shares)
        return (1 + math.tanh(self.gamma * (entropy - self.rho) / 2)) / 2  # the sigmoid, without overflow


def mean_reward(group: RolloutGroup) -> float:
    """Return the mean of the rewards that there are; NaN without any."""
    rewards = [rollout.reward for rollout in group.rollouts if not math.isnan(rollout.reward)]
    return fmean(rewards) if rewards else math.nan


PLUGINS = {"copo": Blended()}
