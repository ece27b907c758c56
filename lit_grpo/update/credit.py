"""The seam for credit assignment: what each turn or token of a completion is learnt from with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, ClassVar

import torch

from lit_grpo.plugins import AllGather, Plugin
from lit_grpo.types import Rollout, RolloutGroup
from lit_grpo.update.advantages.functions import EPSILON


class Credit(Plugin):
    """What each turn or token of a completion is learnt from with: here, all have the advantage of their rollout.

    A rule of your own is a dataclass that derives from it. For example, half of an advantage for what each turn earned
    by itself (``rollout.turn_rewards``, which an environment gives) beside that of the whole::

        @dataclass
        class TurnRewards(Credit):
            needs = frozenset({"whole_groups"})
            share: float = 0.5

            def credit(self, group, advantages):
                mean = fmean(reward for rollout in group.rollouts for reward in rollout.turn_rewards)
                return [
                    [advantage + self.share * (reward - mean) for reward in rollout.turn_rewards]
                    for rollout, advantage in zip(group.rollouts, advantages)
                ]
    """

    role: ClassVar[str] = "what each turn is learnt from with"
    whitens: ClassVar[bool] = False
    """Whether what tokens are given is made to have mean 0 and variance 1 over all tokens of a batch."""

    def credit(self, group: RolloutGroup, advantages: Sequence[float]) -> Sequence[Sequence[float]] | None:
        """Return an advantage for each turn of each rollout of a group; None where all turns have their rollout's.

        Args:
            group: Of any number of rollouts.
            advantages: One a rollout; NaN for one that is not learnt from, whose turns' values are ignored.
        """
        return None

    def credit_tokens(
        self, group: RolloutGroup, advantages: Sequence[float]
    ) -> Sequence[torch.Tensor | Sequence[float]] | None:
        """Return an advantage for each token that is learnt from; by default that of its turn.

        Args:
            group: Of any number of rollouts.
            advantages: One a rollout; NaN for one that is not learnt from, whose tokens' values are ignored.

        Returns:
            For each rollout values of shape (completion.num_trained,); None where all have their rollout's.
        """
        credited = self.credit(group, advantages)
        if credited is None:
            return None
        _check_length(self, group, credited, "turn")
        spread: list[torch.Tensor | Sequence[float]] = []
        for rollout, values in zip(group.rollouts, credited, strict=True):
            if not math.isnan(rollout.advantage):
                _check(self, rollout, values, len(rollout.completion.turns), "turns")
            spread.append(() if math.isnan(rollout.advantage) else rollout.completion.of_turns(values))
        return spread


def give_credit(credit: Credit, groups: Sequence[RolloutGroup], all_gather: AllGather = lambda own: [own]) -> None:
    """Give the tokens of all rollouts their advantages, once the rollouts have theirs.

    Args:
        credit: Says which.
        groups: Of this rank.
        all_gather: See :data:`lit_grpo.plugins.AllGather`.

    Raises:
        ValueError: A rule does not return one finite number for each turn, or for each token.
    """
    for group in groups:
        credited = credit.credit_tokens(group, [rollout.advantage for rollout in group.rollouts])
        if credited is None:
            continue
        _check_length(credit, group, credited, "token that is learnt from")
        for rollout, values in zip(group.rollouts, credited, strict=True):
            if not math.isnan(rollout.advantage):
                _check(credit, rollout, values, rollout.completion.num_trained, "tokens that are learnt from")
                rollout.token_advantages = torch.as_tensor(values, dtype=torch.float32)
    if credit.whitens:
        _whiten([rollout for group in groups for rollout in group.rollouts], all_gather)


def _whiten(rollouts: Sequence[Rollout], all_gather: AllGather) -> None:
    """Give all tokens of a batch, on all ranks, ``(A - mean) / (standard deviation + 1e-4)`` (TRL's epsilon)."""
    having = [rollout for rollout in rollouts if rollout.token_advantages is not None]
    own = [each.token_advantages.double() for each in having if each.token_advantages is not None]
    all_T = torch.cat(all_gather(torch.cat([torch.empty(0, dtype=torch.float64), *own])))
    mean, deviation = (all_T.mean(), all_T.std()) if len(all_T) > 1 else (0.0, 1.0)
    for rollout, values_T in zip(having, own, strict=True):
        rollout.token_advantages = ((values_T - mean) / (deviation + EPSILON)).float()


def rewards_of_turns(rollout: Rollout) -> Sequence[float]:
    """Return what each turn earned: without an environment's word, the last one all of the rollout's reward.

    Raises:
        ValueError: An environment has given another number of rewards than there are turns.
    """
    turns = len(rollout.completion.turns)
    if not rollout.turn_rewards:
        return [0.0] * (turns - 1) + [rollout.reward] if turns else []
    if len(rollout.turn_rewards) != turns:
        raise ValueError(
            f"Sample {rollout.completion.request.path} of prompt {rollout.prompt.prompt_id!r} has {turns} turns and "
            f"{len(rollout.turn_rewards)} rewards of turns; the environment has to give one for each."
        )
    return rollout.turn_rewards


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return each turn's return ``sum_k gamma**k r_(t + k)`` to the end of its episode."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + gamma * (returns[-1] if returns else 0.0))
    return returns[::-1]


def compared(value: float, others: Sequence[float], scale: bool) -> float:
    """Return by how much a turn's value is above the mean of all that it is compared with, itself among them.

    Args:
        value: Of the turn.
        others: Of all; where there is no other one, the result is 0.
        scale: Divide by their standard deviation (plus 1e-4).
    """
    if len(others) < 2:
        return 0.0
    return (value - fmean(others)) / (stdev(others) + EPSILON if scale else 1.0)


def _check_length(credit: Credit, group: RolloutGroup, credited: Sequence[Any], what: str) -> None:
    if len(credited) != len(group.rollouts):
        raise ValueError(
            f"{type(credit).__name__} credits {len(credited)} rollouts of prompt {group.prompt.prompt_id!r}, which has "
            f"{len(group.rollouts)}; give each a list with one number a {what}."
        )


def _check(credit: Credit, rollout: Rollout, values: torch.Tensor | Sequence[float], number: int, what: str) -> None:
    numbers: list[float] = values.tolist() if isinstance(values, torch.Tensor) else list(values)
    if len(numbers) != number or not all(map(math.isfinite, numbers)):
        raise ValueError(
            f"{type(credit).__name__} gives sample {rollout.completion.request.path} of prompt "
            f"{rollout.prompt.prompt_id!r} the advantages {numbers}; give one finite number for each of its {what}, of "
            f"which there are {number}."
        )
