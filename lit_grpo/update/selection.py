"""Which rollouts of a batch are learnt from: down-sampling, after all have been rewarded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lit_grpo.ranks import Ranks
from lit_grpo.types import Rollout
from lit_grpo.update.advantages.estimator import GroupRewards

Rule = Literal["all", "max_variance", "batch_variance", "random"]
Statistics = Literal["group", "kept"]
STATISTICS: dict[Rule, tuple[Statistics, ...]] = {  # the first is the default
    "all": ("group",),
    "max_variance": ("kept", "group"),
    "batch_variance": ("group",),
    "random": ("group", "kept"),
}


@dataclass(frozen=True)
class Selection:
    """Which rollouts are learnt from; the others were sampled and rewarded, and count in statistics alone, or not even.

    Args:
        rule: ``all``; ``max_variance``, the members of each group whose rewards have the largest variance (PODS, arXiv
            2504.13818); ``batch_variance``, as many of the whole batch by the variance of their advantages (D3S, arXiv
            2509.22115, without its choice of tokens); or ``random`` members of each group, by a hash of their names.
        keep: How many members of each group; with ``batch_variance`` on average.
        statistics: What an advantage's mean and deviation are of: all members of the ``group``, or those ``kept``. By
            default what the rule's paper has: ``kept`` for max_variance, ``group`` for the others.
    """

    rule: Rule = "all"
    keep: int | None = None
    statistics: Statistics | None = None

    def __post_init__(self) -> None:
        if self.rule not in STATISTICS:
            raise ValueError(f"selection.rule must be one of {', '.join(STATISTICS)}, not {self.rule!r}.")
        if self.statistics is not None and self.statistics not in STATISTICS[self.rule]:
            raise ValueError(
                f"selection.statistics must be {' or '.join(STATISTICS[self.rule])} for rule {self.rule}, not "
                f"{self.statistics!r}."
            )
        if (self.keep is None) != (self.rule == "all"):
            raise ValueError(
                f"selection.rule is {self.rule} and selection.keep is {self.keep}; a rule other than all needs the "
                "number of rollouts to keep of each group, and all takes none."
            )
        if self.keep is not None and self.keep < 2:
            raise ValueError(f"selection.keep must be at least 2, not {self.keep}: one rollout shows no difference.")

    def check(self, num_generations: int) -> None:
        """Refuse a subset that is larger than its group."""
        if self.keep is not None and self.keep > num_generations:
            raise ValueError(
                f"selection.keep is {self.keep}, but model.num_generations is {num_generations}; keep at most as many "
                "as are sampled."
            )

    @property
    def counts(self) -> Statistics:
        """What an advantage's mean and deviation are of."""
        return self.statistics or STATISTICS[self.rule][0]

    @property
    def needs_all_ranks(self) -> bool:
        """Whether a rollout is compared with those of other groups."""
        return self.rule == "batch_variance"

    def advantages(
        self,
        rewards: GroupRewards,
        rollouts: Sequence[Rollout],
        compute: Callable[[GroupRewards], torch.Tensor],
        ranks: Ranks,
    ) -> torch.Tensor:
        """Return the advantages of this rank's rollouts, NaN for those that are not learnt from; shape R.

        Args:
            rewards: Of their groups.
            rollouts: In the same order.
            compute: Makes advantages of rewards, where NaN takes part in nothing.
            ranks: Of the run.
        """
        chosen_R = self._by_rewards(rewards, rollouts)
        counted = rewards if self.counts == "group" else rewards.only(chosen_R)
        advantages_R = compute(counted).masked_fill(~chosen_R, math.nan)
        if not self.needs_all_ranks:
            return advantages_R
        return self._by_advantages(advantages_R, len(rewards.prompt_ids), ranks)

    def _by_rewards(self, rewards: GroupRewards, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Return which rollouts are kept by what they earned in their group, shape R.

        One without a reward is not; nor, by any rule, one that an earlier batch has learnt from.
        """
        valid_R = ~rewards.rewards_R.isnan()
        if self.rule == "all":
            return valid_R
        valid_R &= torch.tensor([rollout.kept for rollout in rollouts], dtype=torch.bool)
        if self.rule == "batch_variance":
            return valid_R
        chosen_R = torch.zeros_like(valid_R)
        for group in range(len(rewards.prompt_ids)):
            members = ((rewards.groups_R == group) & valid_R).nonzero().flatten()
            chosen_R[members[self._choose(rewards.rewards_R[members], [rollouts[r] for r in members.tolist()])]] = True
        return chosen_R

    def _choose(self, rewards_N: torch.Tensor, rollouts: Sequence[Rollout]) -> torch.Tensor:
        assert self.keep is not None
        if self.rule == "max_variance":
            return max_variance_subset(rewards_N, self.keep)
        return torch.tensor(sorted(range(len(rollouts)), key=lambda n: _hash(rollouts[n]))[: self.keep]).long()

    def _by_advantages(self, advantages_R: torch.Tensor, num_groups: int, ranks: Ranks) -> torch.Tensor:
        """Leave those that are not kept for what they have beside those of all ranks."""
        assert self.keep is not None
        everyone = ranks.gather((advantages_R, num_groups))
        everyone_A = torch.cat([part for part, _ in everyone])
        valid = (~everyone_A.isnan()).nonzero().flatten()
        chosen_A = torch.zeros(len(everyone_A), dtype=torch.bool)
        chosen_A[valid[max_variance_subset(everyone_A[valid], self.keep * sum(count for _, count in everyone))]] = True
        return advantages_R.masked_fill(~chosen_A.split([len(part) for part, _ in everyone])[ranks.own], math.nan)


def max_variance_subset(values_N: torch.Tensor, size: int) -> torch.Tensor:
    """Return which ``size`` numbers have the largest variance; all, where there are no more.

    They are the i highest and the size - i lowest for some i (PODS, arXiv 2504.13818, theorem 1), so that sorting and
    sums of beginnings and ends find them in O(N log N). Of equal variances the most even split counts.

    Args:
        values_N: The numbers, no NaN.
        size: How many.

    Returns:
        Their places, ascending.
    """
    number = len(values_N)
    if size >= number:
        return torch.arange(number)
    exact_N = values_N.double() - values_N.double().mean()
    order = exact_N.sort(stable=True).indices
    zero = exact_N.new_zeros(1)
    lowest, highest = exact_N[order[:size]], exact_N[order.flip(0)[:size]]
    sums, squares = (
        torch.cat([zero, (highest**power).cumsum(0)]) + torch.cat([zero, (lowest**power).cumsum(0)]).flip(0)
        for power in (1, 2)
    )
    variance = squares / size - (sums / size) ** 2  # by how many of the highest are taken, from 0 to size
    best = (variance >= variance.max() - 1e-12 * exact_N.abs().max() ** 2).nonzero().flatten()
    num_high = int(best[(2 * best - size).abs().argmin()])
    return torch.cat([order[: size - num_high], order[number - num_high :]]).sort().values


def _hash(rollout: Rollout) -> bytes:
    return hashlib.blake2b(repr(rollout.completion.request.key).encode(), digest_size=8).digest()
