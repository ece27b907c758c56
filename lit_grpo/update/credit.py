"""The seam for credit assignment: what each turn of a completion is learnt from with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import ClassVar

from lit_grpo.plugins import Plugin
from lit_grpo.types import Rollout, RolloutGroup
from lit_grpo.update.advantages.functions import EPSILON


class Credit(Plugin):
    """What each turn of a completion is learnt from with: here, all have the advantage of their rollout.

    A rule of your own is a dataclass that derives from it. For example, half of an advantage for what each turn earned
    by itself (``rollout.turn_rewards``, which an environment gives) beside that of the whole::

        @dataclass(frozen=True)
        class TurnRewards(Credit):
            share: float = 0.5

            def credit(self, group, advantages):
                mean = fmean(reward for rollout in group.rollouts for reward in rollout.turn_rewards)
                return [
                    [advantage + self.share * (reward - mean) for reward in rollout.turn_rewards]
                    for rollout, advantage in zip(group.rollouts, advantages)
                ]
    """

    role: ClassVar[str] = "what each turn is learnt from with"

    def credit(self, group: RolloutGroup, advantages: Sequence[float]) -> Sequence[Sequence[float]] | None:
        """Return an advantage for each turn of each rollout of a group; None where all turns have their rollout's.

        Args:
            group: Of any number of rollouts.
            advantages: One a rollout; NaN for one that is not learnt from, whose turns' values are ignored.
        """
        return None


class GroupCredit(Credit):
    """Credit for which turns of a group are compared with each other."""

    @property
    def needs(self) -> frozenset[str]:
        """All members of a group."""
        return frozenset({"whole_groups"})


def give_credit(credit: Credit, groups: Sequence[RolloutGroup]) -> None:
    """Give the turns of all rollouts their advantages, once the rollouts have theirs.

    Raises:
        ValueError: A rule does not return one finite number for each turn.
    """
    for group in groups:
        credited = credit.credit(group, [rollout.advantage for rollout in group.rollouts])
        if credited is None:
            continue
        if len(credited) != len(group.rollouts):
            raise ValueError(
                f"{type(credit).__name__} credits {len(credited)} rollouts of prompt {group.prompt.prompt_id!r}, which "
                f"has {len(group.rollouts)}; give each a list with one number a turn."
            )
        for rollout, advantages in zip(group.rollouts, credited, strict=True):
            if not math.isnan(rollout.advantage):
                rollout.turn_advantages = _checked(credit, rollout, advantages)


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


def _checked(credit: Credit, rollout: Rollout, advantages: Sequence[float]) -> tuple[float, ...]:
    turns = rollout.completion.turns
    if len(advantages) != len(turns) or not all(map(math.isfinite, advantages)):
        raise ValueError(
            f"{type(credit).__name__} gives sample {rollout.completion.request.path} of prompt "
            f"{rollout.prompt.prompt_id!r} the advantages {list(advantages)}; give one finite number for each of its "
            f"turns, of which there are {len(turns)}."
        )
    return tuple(advantages)
