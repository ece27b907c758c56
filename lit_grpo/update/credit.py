"""The seam for credit assignment: what each turn of a completion is learnt from with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from lit_grpo.plugins import Plugin
from lit_grpo.types import Rollout, RolloutGroup


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


def _checked(credit: Credit, rollout: Rollout, advantages: Sequence[float]) -> tuple[float, ...]:
    turns = rollout.completion.turns
    if len(advantages) != len(turns) or not all(map(math.isfinite, advantages)):
        raise ValueError(
            f"{type(credit).__name__} gives sample {rollout.completion.request.path} of prompt "
            f"{rollout.prompt.prompt_id!r} the advantages {list(advantages)}; give one finite number for each of its "
            f"turns, of which there are {len(turns)}."
        )
    return tuple(advantages)
