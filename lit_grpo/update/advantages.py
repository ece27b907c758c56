"""Rewards of whole groups to advantages."""

from __future__ import annotations

from typing import Literal

import torch

Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4


def group_advantages(rewards_PG: torch.Tensor, scale: Scale = "group") -> torch.Tensor:
    """Subtract each group's mean reward, and divide by a standard deviation.

    ``A = (r - mean(r of the group)) / (std + 1e-4)`` (DeepSeekMath, arXiv 2402.03300, section 4.1.2), with
    the unbiased standard deviation, as in TRL. A NaN reward (none applies) takes no part in either
    statistic and its advantage is NaN. A group whose rewards are all equal, or which has one member with a
    reward, has advantage 0.

    Args:
        rewards_PG: One row a group, whole; on several ranks all of the step's groups for ``scale="batch"``.
        scale: ``group`` divides by the group's deviation, ``batch`` by that of all rewards given,
            ``none`` by nothing (Dr. GRPO, arXiv 2503.20783).

    Returns:
        Advantages of the same shape.
    """
    exact_PG = rewards_PG.double()  # in which the mean of equal float32 numbers is exact
    centred_PG = exact_PG - exact_PG.nanmean(dim=1, keepdim=True)
    if scale != "none":
        deviation = _nan_std(exact_PG) if scale == "group" else _nan_std(exact_PG.reshape(1, -1))
        centred_PG = centred_PG / (deviation + EPSILON)
    return centred_PG.to(rewards_PG.dtype)


def uniform_groups(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Say for each group whether its rewards are all equal (or missing), so that it teaches nothing."""
    highest_P = rewards_PG.nan_to_num(-torch.inf).amax(1)
    lowest_P = rewards_PG.nan_to_num(torch.inf).amin(1)
    return lowest_P >= highest_P


def _nan_std(values: torch.Tensor) -> torch.Tensor:
    """Unbiased standard deviation of each row's values that are not NaN; 0 for fewer than two."""
    count = values.isfinite().sum(1, keepdim=True)
    centred = (values - values.nanmean(1, keepdim=True)).nan_to_num(0.0)
    return (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
