"""Advantages of single steps of an episode, compared with steps that began in the same state (GiGPO)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch

from lit_grpo.update.advantages.functions import EPSILON, group_advantages


def discounted_returns(rewards: Sequence[float], gamma: float = 0.95) -> list[float]:
    """Return each step's return ``sum_k gamma**k r_(t + k)`` to the end of its episode (GiGPO, eq. 6)."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + gamma * (returns[-1] if returns else 0.0))
    return returns[::-1]


def step_advantages(
    rewards_R: torch.Tensor,
    groups_R: torch.Tensor,
    returns_S: torch.Tensor,
    episodes_S: Sequence[int],
    anchors_S: Sequence[Hashable],
    weight: float = 1.0,
    scale: bool = False,
) -> torch.Tensor:
    """Return the advantage of each step: that of its episode in its group, and ``weight`` x that among equal states.

    ``A = A_episode + weight A_step``; A_episode compares the episode's reward with those of its prompt, A_step the
    step's return with those of all steps, in episodes of the same prompt, that began in the same state (GiGPO, arXiv
    2505.10978, eq. 3, 6, 7, 8; its code takes the episodes' mean over their steps, so that long ones count more; this
    is the paper's). A step whose state was seen once has A_step 0. An episode whose reward is NaN has
    advantage NaN, and its steps take no part.

    Args:
        rewards_R: Reward of each episode.
        groups_R: The number of each one's prompt.
        returns_S: Return of each step, such as :func:`discounted_returns` gives.
        episodes_S: The place in ``rewards_R`` of the episode that each step belongs to.
        anchors_S: What each step began in; steps are compared where these are equal.
        weight: Weight of the step's advantage.
        scale: Divide both by the standard deviation of their group (the paper's F_norm = std) instead of 1.
    """
    if not len(returns_S) == len(episodes_S) == len(anchors_S):
        raise ValueError(
            f"returns_S, episodes_S and anchors_S have {len(returns_S)}, {len(episodes_S)} and {len(anchors_S)} steps; "
            "give one of each for every step."
        )
    index_S = torch.tensor(episodes_S, dtype=torch.int64)
    advantages_S = group_advantages(rewards_R.double(), groups_R, "group" if scale else "none")[index_S]
    members: dict[tuple[int, Hashable], list[int]] = defaultdict(list)
    for step, (prompt, anchor) in enumerate(zip(groups_R[index_S].tolist(), anchors_S, strict=True)):
        if not advantages_S[step].isnan():
            members[prompt, anchor].append(step)
    for steps in members.values():
        centred = returns_S[steps].double() - returns_S[steps].double().mean()
        if scale and len(steps) > 1:
            centred = centred / (centred.square().sum().div(len(steps) - 1).sqrt() + EPSILON)
        advantages_S[steps] += weight * centred
    return advantages_S.to(returns_S.dtype)
