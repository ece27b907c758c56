"""Which rollouts of a batch are learnt from, and which of their tokens: down-sampling, after all were rewarded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from lit_grpo.compatibility import Part
from lit_grpo.types import Key, Rollout
from lit_grpo.update.advantages.estimator import GroupRewards

Rule = Literal["all", "max_variance", "batch_variance", "max_entropy", "random"]
Statistics = Literal["group", "kept"]


class RuleRow(NamedTuple):
    """What a rule allows and needs.

    ``statistics`` are what an advantage's mean and deviation may be of, the default first; ``needs`` are words of
    :data:`lit_grpo.compatibility.REQUIREMENTS`.
    """

    statistics: tuple[Statistics, ...]
    needs: frozenset[str] = frozenset()


RULES: dict[Rule, RuleRow] = {
    "all": RuleRow(("group",)),
    "max_variance": RuleRow(("kept", "group")),
    "batch_variance": RuleRow(("group",), needs=frozenset({"all_ranks"})),
    "max_entropy": RuleRow(("group", "kept"), needs=frozenset({"entropies"})),
    "random": RuleRow(("group", "kept")),
}


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
        if self.rule not in RULES:
            raise ValueError(f"selection.rule must be one of {', '.join(RULES)}, not {self.rule!r}.")
        allowed = RULES[self.rule].statistics
        if self.statistics is not None and self.statistics not in allowed:
            raise ValueError(
                f"selection.statistics must be {' or '.join(allowed)} for rule {self.rule}, not {self.statistics!r}."
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
        return self.statistics or RULES[self.rule].statistics[0]

    @property
    def needs(self) -> frozenset[str]:
        """What the rule needs, by words of :data:`lit_grpo.compatibility.REQUIREMENTS`."""
        return RULES[self.rule].needs

    @property
    def parts(self) -> list[Part]:
        """What each setting needs of a run."""
        parts = [Part(f"model.selection.rule {self.rule}", needs=self.needs)]
        if self.takes_tokens:
            name = f"model.selection.tokens {self.tokens} and first_tokens {self.first_tokens}"
            parts.append(Part(name, needs=frozenset({"all_ranks", "entropies"})))
        return parts

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

    def candidates(self, rewards: GroupRewards, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """Return which rollouts may be chosen, shape R.

        One without a reward is not; nor, by any rule, one that an earlier batch has learnt from.
        """
        valid_R = ~rewards.rewards_R.isnan()
        if self.rule == "all":
            return valid_R
        return valid_R & torch.tensor([rollout.kept for rollout in rollouts], dtype=torch.bool)

    def choose(
        self,
        rewards: GroupRewards,
        rollouts: Sequence[Rollout],
        entropies: Mapping[Key, torch.Tensor],
        progress: float = 0.0,
    ) -> torch.Tensor:
        """Return which rollouts are learnt from by comparison within their groups, shape R.

        Args:
            rewards: Of their groups.
            rollouts: In the same order.
            entropies: Of each token that is learnt from, by completion, of those candidates whose generator has not
                told any; empty unless the rule needs them.
            progress: Share of the run's updates that has been made.
        """
        candidates_R = self.candidates(rewards, rollouts)
        if self.rule in ("all", "batch_variance"):
            return candidates_R
        values_R, places = rewards.rewards_R.double(), candidates_R.nonzero().flatten().tolist()
        if self.rule == "max_entropy":
            values_R[candidates_R] = mean_entropies([rollouts[place] for place in places], entropies)
        chosen_R, size = torch.zeros_like(candidates_R), _whole(self.keep_at(progress))
        for group in range(len(rewards.prompt_ids)):
            members = ((rewards.groups_R == group) & candidates_R).nonzero().flatten()
            chosen_R[members[self._choose(values_R[members], [rollouts[r] for r in members.tolist()], size)]] = True
        return chosen_R

    def _choose(self, values_N: torch.Tensor, rollouts: Sequence[Rollout], size: int) -> torch.Tensor:
        if self.rule == "max_variance":
            return max_variance_subset(values_N, size)
        if self.rule == "max_entropy":
            return values_N.sort(descending=True, stable=True).indices[:size]
        return torch.tensor(sorted(range(len(rollouts)), key=lambda n: _hash(rollouts[n]))[:size]).long()

    def choose_from_batch(self, advantages_R: torch.Tensor, num_groups: int, progress: float = 0.0) -> torch.Tensor:
        """Return which rollouts of the whole batch have the advantages of the largest variance, shape R.

        Args:
            advantages_R: Of the rollouts of all ranks; NaN for those that are not learnt from.
            num_groups: Groups of all ranks.
            progress: Share of the run's updates that has been made.
        """
        valid = (~advantages_R.isnan()).nonzero().flatten()
        size = _whole(self.keep_at(progress) * num_groups)
        chosen_R = torch.zeros(len(advantages_R), dtype=torch.bool)
        chosen_R[valid[max_variance_subset(advantages_R[valid], size)]] = True
        return chosen_R


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


def mean_entropies(rollouts: Sequence[Rollout], measured: Mapping[Key, torch.Tensor]) -> torch.Tensor:
    """Return the mean entropy of each rollout's tokens in nats, float64, shape R.

    It is that of the distributions that they were sampled from, as the generator tells; where the generator tells none,
    it is that of the policy. A rollout without a token to learn from comes after all others.

    Args:
        rollouts: Whose entropies.
        measured: The entropy of each token that is learnt from, by completion, where the generator tells none.
    """
    entropies = []
    for completion in (rollout.completion for rollout in rollouts):
        own = completion.entropy
        if completion.num_trained and math.isnan(own):
            own = float(measured[completion.request.key].double().mean())
        entropies.append(own if completion.num_trained else -math.inf)
    return torch.tensor(entropies, dtype=torch.float64)


def token_scores(
    learnt: Sequence[tuple[Rollout, float]], entropies: Mapping[Key, torch.Tensor]
) -> dict[Key, torch.Tensor]:
    """Return ``|A_i| x H_it`` of each token that is learnt from, by completion (D3S, arXiv 2509.22115).

    ``H`` is the entropy over the whole vocabulary under the policy that is about to be updated, in nats.

    Args:
        learnt: Rollouts, and their advantages.
        entropies: Of each token that is learnt from, by completion; not needed where the advantage is 0.
    """
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
