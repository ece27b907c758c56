"""Advantages that remember earlier visits of a prompt (DCPO's smoothed standardisation)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

SMALLEST = 1e-6
"""A deviation of less than this (relative to the mean, above 1) is rounding: such rewards are all equal."""


class Visits(NamedTuple):
    """Statistics of all rewards that a prompt has had: how many visits, and their mean and deviation."""

    num_visits: int
    mean: float
    deviation: float


class RewardHistory:
    """Statistics of each prompt's rewards over all visits, on all ranks.

    A visit counts for good once it is committed; until then its advantages can be computed again.
    """

    def __init__(self) -> None:
        self.visits: dict[str, Visits] = {}
        self._new: dict[str, Visits] = {}

    def advantages(self, rewards_R: torch.Tensor, groups_R: torch.Tensor, prompt_ids: Sequence[str]) -> torch.Tensor:
        """Return smoothed advantages with a visit more of each prompt; of several ranks, give all groups to each.

        On the i-th visit, with ``A_new`` standardised by this visit's mean and deviation and ``A_tot`` by those of all
        visits, the smaller in magnitude of ``((i - 1) A_new + A_tot) / i`` and ``(A_new + (i - 1) A_tot) / i`` (DCPO,
        arXiv 2509.02333, section 3.2; the code in lime-RL/DCPO at 01787b0). A deviation of 0 gives 0. A visit without
        rewards (all NaN) does not count; one with a single reward has deviation 0.

        Args:
            rewards_R: Rewards of all rollouts.
            groups_R: The number of the group that each belongs to.
            prompt_ids: The prompt of each group.
        """
        self._new = {}
        advantages_R = rewards_R.to(torch.float64, copy=True)
        for number, prompt_id in enumerate(prompt_ids):
            members = groups_R == number
            advantages_R[members] = self._of_group(advantages_R[members], prompt_id)
        return advantages_R.to(rewards_R.dtype)

    def commit(self) -> None:
        """Count the visits that advantages were computed of last."""
        self.visits |= self._new
        self._new = {}

    def _of_group(self, rewards_G: torch.Tensor, prompt_id: str) -> torch.Tensor:
        present = rewards_G[rewards_G.isfinite()]
        if not len(present):
            return rewards_G
        mean = float(present.mean())
        deviation = float((present - mean).square().sum() / max(len(present) - 1, 1)) ** 0.5
        total = _together(self._new.get(prompt_id, self.visits.get(prompt_id)), mean, deviation)
        self._new[prompt_id] = total
        count = total.num_visits
        new_G = _standardised(rewards_G, mean, deviation)
        total_G = _standardised(rewards_G, total.mean, total.deviation)
        near_new_G = ((count - 1) * new_G + total_G) / count
        near_total_G = (new_G + (count - 1) * total_G) / count
        return torch.where(near_new_G.abs() < near_total_G.abs(), near_new_G, near_total_G)

    def state_dict(self) -> dict[str, list[float]]:
        """What a checkpoint keeps."""
        return {prompt_id: list(visits) for prompt_id, visits in self.visits.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Go on from a checkpoint."""
        self.visits = {prompt_id: Visits(int(count), *rest) for prompt_id, (count, *rest) in state.items()}


def _together(before: Visits | None, mean: float, deviation: float) -> Visits:
    """All visits with one more; each counts alike."""
    if before is None:
        return Visits(1, mean, deviation)
    count = before.num_visits + 1
    between = before.num_visits / count * (mean - before.mean) ** 2
    variance = (before.num_visits * before.deviation**2 + deviation**2 + between) / count
    return Visits(count, (before.num_visits * before.mean + mean) / count, math.sqrt(variance))


def _standardised(rewards_G: torch.Tensor, mean: float, deviation: float) -> torch.Tensor:
    if deviation <= SMALLEST * max(abs(mean), 1.0):
        return torch.where(rewards_G.isnan(), rewards_G, 0.0)
    return (rewards_G - mean) / deviation
