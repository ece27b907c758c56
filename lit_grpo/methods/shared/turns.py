"""Rewards of single turns, for plug-ins that give turns advantages of their own."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from lit_grpo.types import Rollout
from lit_grpo.update.advantages.functions import EPSILON


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
        value: Value of the turn, such as its return.
        others: Values of all turns to compare with; if there is no other one, the result is 0.
        scale: Divide by their standard deviation (plus 1e-4).
    """
    if len(others) < 2:
        return 0.0
    return (value - fmean(others)) / (stdev(others) + EPSILON if scale else 1.0)
