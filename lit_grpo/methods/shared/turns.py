"""Rewards of single turns, for plug-ins that give turns advantages of their own."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import fmean, stdev

from lit_grpo.types import Rollout
from lit_grpo.update.advantages.functions import EPSILON
from lit_grpo.update.plugin import Batch

Turn = tuple[Hashable, float]
"""With which turns a turn is compared, and its value, such as its return."""


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


def above_mean(value: float, others: Sequence[float], scale: bool) -> float:
    """Return by how much a value is above the mean of ``others``, itself among them; 0 where it is the only one.

    With ``scale`` it is divided by their standard deviation plus 1e-4.
    """
    if len(others) < 2:
        return 0.0
    return (value - fmean(others)) / (stdev(others) + EPSILON if scale else 1.0)


def compare_turns(batch: Batch, turns: Callable[[Rollout], Iterable[Turn]], scale: bool, weight: float | None) -> None:
    """Give turns advantages by what like turns of the same group came to; rollouts without a reward count in no mean.

    Args:
        batch: The batch that is to be trained on.
        turns: Gives a rollout's turns: with which of the group each is compared, and its value.
        scale: Divide by the standard deviation of what is compared.
        weight: Factor of a turn's own advantage, which is added to that of its rollout; None takes the turn's alone.
    """
    for group in batch.groups:
        turns_of = [[*turns(rollout)] for rollout in group.rollouts]
        values: dict[Hashable, list[float]] = defaultdict(list)
        for rollout, its in zip(group.rollouts, turns_of, strict=True):
            for kind, value in its if not math.isnan(rollout.reward) else ():
                values[kind].append(value)
        for rollout, its in zip(group.rollouts, turns_of, strict=True):
            own = [above_mean(value, values[kind], scale) for kind, value in its]
            if weight is not None:
                own = [rollout.advantage + weight * each for each in own]
            batch.set("turn_advantage", rollout, own)
