"""Advantages that remember earlier visits of a prompt (DCPO's smoothed standardization)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lit_grpo.budgets.history import NEW, PromptHistory, Record, is_flat, moments


def smoothed_advantages(
    rewards_R: torch.Tensor,
    groups_R: torch.Tensor,
    prompt_ids: Sequence[str],
    history: PromptHistory,
    altered: Sequence[bool] = (),
) -> torch.Tensor:
    """Return smoothed advantages with a visit more of each prompt; of several ranks, give all groups to each.

    On the i-th visit, with ``A_new`` standardized by this visit's mean and deviation and ``A_tot`` by those of all
    visits, the smaller in magnitude of ``((i - 1) A_new + A_tot) / i`` and ``(A_new + (i - 1) A_tot) / i`` (DCPO,
    arXiv 2509.02333, section 3.2; the code in lime-RL/DCPO at 01787b0). A deviation of 0 gives 0. A visit without
    rewards (all NaN) does not count; one with a single reward has deviation 0.

    Args:
        rewards_R: Rewards of all rollouts.
        groups_R: The number of the group that each belongs to.
        prompt_ids: The prompt of each group.
        history: Earlier visits, to which these are not added.
        altered: Of each group whether its prompt was asked with something else than its row says; such a visit is
            standardized by itself. Empty for none.
    """
    seen: dict[str, Record] = {}  # a prompt may be visited twice in a batch
    advantages_R = rewards_R.to(torch.float64, copy=True)
    for number, prompt_id in enumerate(prompt_ids):
        members = groups_R == number
        if altered and altered[number]:
            advantages_R[members], _ = _of_group(advantages_R[members], NEW)
            continue
        before = seen.get(prompt_id, history[prompt_id])
        advantages_R[members], seen[prompt_id] = _of_group(advantages_R[members], before)
    return advantages_R.to(rewards_R.dtype)


def _of_group(rewards_G: torch.Tensor, before: Record) -> tuple[torch.Tensor, Record]:
    present = rewards_G[rewards_G.isfinite()].tolist()
    if not present:
        return rewards_G, before
    mean, deviation = moments(present)
    total = before.with_rewards(mean, deviation)
    count = total.num_visits
    new_G = _standardized(rewards_G, mean, deviation)
    total_G = _standardized(rewards_G, total.mean, total.deviation)
    near_new_G = ((count - 1) * new_G + total_G) / count
    near_total_G = (new_G + (count - 1) * total_G) / count
    return torch.where(near_new_G.abs() < near_total_G.abs(), near_new_G, near_total_G), total


def _standardized(rewards_G: torch.Tensor, mean: float, deviation: float) -> torch.Tensor:
    if is_flat(mean, deviation):
        return torch.where(rewards_G.isnan(), rewards_G, 0.0)
    return (rewards_G - mean) / deviation
