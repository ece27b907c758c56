"""Which rollouts of a batch are learnt from, and which of their tokens: down-sampling, after all were rewarded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lit_grpo.ranks import Ranks
from lit_grpo.types import Key, Rollout
from lit_grpo.update.advantages.estimator import GroupRewards

Rule = Literal["all", "max_variance", "batch_variance", "max_entropy", "random"]
Statistics = Literal["group", "kept"]
STATISTICS: dict[Rule, tuple[Statistics, ...]] = {  # the first is the default
    "all": ("group",),
    "max_variance": ("kept", "group"),
    "batch_variance": ("group",),
    "max_entropy": ("group", "kept"),
    "random": ("group", "kept"),
}
Measure = Callable[[Sequence[Rollout]], Mapping[Key, torch.Tensor]]
"""Gives the entropy, in nats, of each token of rollouts that is learnt from, by completion; all ranks call it alike."""


@dataclass(frozen=True)
class Selection:
    """Which rollouts are learnt from; the others were sampled and rewarded, and count in statistics alone, or not even.

    ``first_keep`` and ``first_tokens`` move to ``keep`` and ``tokens`` in a line over the updates of the run: (1 - p)
    times the first and p times the other, once a share p of them has been made (D3S, which begins with few and ends
    with many).

    Args:
        rule: ``all``; ``max_variance``, the members of each group whose rewards have the largest variance (PODS, arXiv
            2504.13818); ``batch_variance``, as many of the whole batch by the variance of their advantages (D3S, arXiv
            2509.22115); ``max_entropy``, the members of each group with the highest mean entropy of their tokens; or
            ``random`` members of each group, by a hash of their names.
        keep: How many members of each group; with ``batch_variance`` on average.
        statistics: What an advantage's mean and deviation are of: all members of the ``group``, or those ``kept``. By
            default what the rule's paper has: ``kept`` for max_variance, ``group`` for the others.
        tokens: Share of the tokens of a step, on all ranks, that is learnt from: of the chosen rollouts those with the
            largest absolute advantage times entropy (D3S); 1 for all.
        first_keep: ``keep`` at the begin of the run; by default it stays the same.
        first_tokens: ``tokens`` at the begin of the run; by default it stays the same.
    """

    rule: Rule = "all"
    keep: int | None = None
    statistics: Statistics | None = None
    tokens: float = 1.0
    first_keep: int | None = None
    first_tokens: float | None = None

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
        if self.first_keep is not None and self.keep is None:
            raise ValueError(
                f"selection.first_keep is {self.first_keep}, and rule all keeps every rollout; leave it out, or set "
                "rule and keep."
            )
        for name, size in self._sizes.items():
            if size < 2:
                raise ValueError(f"selection.{name} must be at least 2, not {size}: one rollout shows no difference.")
        for name, share in (("tokens", self.tokens), ("first_tokens", self.first_tokens)):
            if share is not None and not 0 < share <= 1:
                raise ValueError(f"selection.{name} must be in (0, 1], not {share}; 1 keeps all tokens.")

    @property
    def _sizes(self) -> dict[str, int]:
        sizes = {"keep": self.keep, "first_keep": self.first_keep}
        return {name: size for name, size in sizes.items() if size is not None}

    def check(self, num_generations: int) -> None:
        """Refuse a subset that is larger than its group."""
        for name, size in self._sizes.items():
            if size > num_generations:
                raise ValueError(
                    f"selection.{name} is {size}, but model.num_generations is {num_generations}; keep at most as many "
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

    @property
    def takes_tokens(self) -> bool:
        """Whether, at any time of the run, a part of the tokens is learnt from."""
        return min(self.tokens, self.first_tokens or 1.0) < 1

    @property
    def is_scheduled(self) -> bool:
        """Whether it changes over the run."""
        return self.first_keep is not None or self.first_tokens is not None

    def keep_at(self, progress: float) -> float:
        """How many members of a group are kept once a share ``progress`` of the updates has been made."""
        assert self.keep is not None
        return _between(self.first_keep, self.keep, progress)

    def tokens_at(self, progress: float) -> float:
        """The share of tokens that is learnt from then."""
        return _between(self.first_tokens, self.tokens, progress)

    def advantages(
        self,
        rewards: GroupRewards,
        rollouts: Sequence[Rollout],
        compute: Callable[[GroupRewards], torch.Tensor],
        ranks: Ranks,
        measure: Measure,
        progress: float = 0.0,
    ) -> torch.Tensor:
        """Return the advantages of this rank's rollouts, NaN for those that are not learnt from; shape R.

        Args:
            rewards: Of their groups.
            rollouts: In the same order.
            compute: Makes advantages of rewards, where NaN takes part in nothing.
            ranks: Of the run.
            measure: Asked by ``max_entropy`` for entropies that the generator has not told.
            progress: Share of the run's updates that has been made.
        """
        chosen_R = self._within_groups(rewards, rollouts, measure, progress)
        counted = rewards if self.counts == "group" else rewards.only(chosen_R)
        advantages_R = compute(counted).masked_fill(~chosen_R, math.nan)
        if not self.needs_all_ranks:
            return advantages_R
        return self._by_advantages(advantages_R, len(rewards.prompt_ids), ranks, progress)

    def _within_groups(
        self, rewards: GroupRewards, rollouts: Sequence[Rollout], measure: Measure, progress: float
    ) -> torch.Tensor:
        """Return which rollouts are kept by what they are beside the others of their group, shape R.

        One without a reward is not; nor, by any rule, one that an earlier batch has learnt from.
        """
        valid_R = ~rewards.rewards_R.isnan()
        if self.rule == "all":
            return valid_R
        valid_R &= torch.tensor([rollout.kept for rollout in rollouts], dtype=torch.bool)
        if self.rule == "batch_variance":
            return valid_R
        values_R, places = rewards.rewards_R.double(), valid_R.nonzero().flatten().tolist()
        if self.rule == "max_entropy":
            values_R[valid_R] = mean_entropies([rollouts[place] for place in places], measure)
        chosen_R, size = torch.zeros_like(valid_R), _whole(self.keep_at(progress))
        for group in range(len(rewards.prompt_ids)):
            members = ((rewards.groups_R == group) & valid_R).nonzero().flatten()
            chosen_R[members[self._choose(values_R[members], [rollouts[r] for r in members.tolist()], size)]] = True
        return chosen_R

    def _choose(self, values_N: torch.Tensor, rollouts: Sequence[Rollout], size: int) -> torch.Tensor:
        if self.rule == "max_variance":
            return max_variance_subset(values_N, size)
        if self.rule == "max_entropy":
            return values_N.sort(descending=True, stable=True).indices[:size]
        return torch.tensor(sorted(range(len(rollouts)), key=lambda n: _hash(rollouts[n]))[:size]).long()

    def _by_advantages(
        self, advantages_R: torch.Tensor, num_groups: int, ranks: Ranks, progress: float
    ) -> torch.Tensor:
        """Leave those that are not kept for what they have beside those of all ranks."""
        everyone = ranks.gather((advantages_R, num_groups))
        everyone_A = torch.cat([part for part, _ in everyone])
        valid = (~everyone_A.isnan()).nonzero().flatten()
        size = _whole(self.keep_at(progress) * sum(count for _, count in everyone))
        chosen_A = torch.zeros(len(everyone_A), dtype=torch.bool)
        chosen_A[valid[max_variance_subset(everyone_A[valid], size)]] = True
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


def mean_entropies(rollouts: Sequence[Rollout], measure: Measure) -> torch.Tensor:
    """Return the mean entropy of each rollout's tokens in nats, float64, shape R.

    It is that of the distributions that they were sampled from, as the generator tells; where it does not, it is
    measured. A rollout without a token to learn from comes after all others.
    """
    measured = measure([rollout for rollout in rollouts if math.isnan(rollout.completion.entropy)])
    entropies = []
    for completion in (rollout.completion for rollout in rollouts):
        own = completion.entropy
        if completion.num_trained and math.isnan(own):
            own = float(measured[completion.request.key].double().mean())
        entropies.append(own if completion.num_trained else -math.inf)
    return torch.tensor(entropies, dtype=torch.float64)


def token_scores(learnt: Sequence[tuple[Rollout, float]], measure: Measure) -> dict[Key, torch.Tensor]:
    """Return ``|A_i| x H_it`` of each token that is learnt from, by completion (D3S, arXiv 2509.22115).

    ``H`` is the entropy over the whole vocabulary under the policy that is about to be updated, in nats. Where the
    advantage is 0 nothing is measured.

    Args:
        learnt: Rollouts, and their advantages.
        measure: Gives the entropies.
    """
    entropies = measure([rollout for rollout, advantage in learnt if advantage])
    scores: dict[Key, torch.Tensor] = {}
    for completion, advantage in ((rollout.completion, advantage) for rollout, advantage in learnt):
        key, none_T = completion.request.key, torch.zeros(completion.num_trained)
        scores[key] = entropies[key] * abs(advantage) if advantage else none_T
    return scores


def _between(first: float | None, last: float, progress: float) -> float:
    return last if first is None else (1 - progress) * first + progress * last


def _whole(number: float) -> int:
    return int(number + 0.5)


def _hash(rollout: Rollout) -> bytes:
    return hashlib.blake2b(repr(rollout.completion.request.key).encode(), digest_size=8).digest()
