"""Rewards of whole groups to advantages: a baseline is subtracted, and a scale divides.

Every function takes one row a group, whole, with NaN where a rollout has no reward: it takes no part in any statistic
and its advantage is NaN. They compute in float64, in which the mean of equal float32 numbers is exact.
"""

from __future__ import annotations

from typing import Literal

import torch

Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4


def group_advantages(rewards_PG: torch.Tensor, scale: Scale = "group") -> torch.Tensor:
    """Subtract each group's mean reward, and divide by a standard deviation.

    ``A = (r - mean(r of the group)) / (std + 1e-4)`` (DeepSeekMath, arXiv 2402.03300, section 4.1.2), with
    the unbiased standard deviation, as in TRL. A group whose rewards are all equal, or which has one member with a
    reward, has advantage 0.

    Args:
        rewards_PG: On several ranks all of the step's groups for ``scale="batch"``.
        scale: ``group`` divides by the group's deviation, ``batch`` by that of all rewards given,
            ``none`` by nothing (Dr. GRPO, arXiv 2503.20783).

    Returns:
        Advantages of the same shape.
    """
    exact_PG = rewards_PG.double()
    return _scaled(exact_PG - exact_PG.nanmean(dim=1, keepdim=True), exact_PG, scale).to(rewards_PG.dtype)


def leave_one_out_advantages(rewards_PG: torch.Tensor, scale: Scale = "none") -> torch.Tensor:
    """Subtract from each reward the mean of the *other* rewards of its group: ``n / (n - 1) (r - mean)``.

    RLOO (Ahmadian et al., arXiv 2402.14740, section 3.2): the baseline does not depend on the completion's own reward.
    A group whose rewards are all equal, or which has one member with a reward, has advantage 0.
    """
    exact_PG = rewards_PG.double()
    count_P1 = _count(exact_PG)
    centred_PG = (exact_PG - exact_PG.nanmean(dim=1, keepdim=True)) * count_P1 / (count_P1 - 1).clamp(min=1)
    return _scaled(centred_PG, exact_PG, scale).to(rewards_PG.dtype)


def median_advantages(rewards_PG: torch.Tensor, scale: Literal["mad", "none"] = "mad") -> torch.Tensor:
    """Subtract each group's median reward, and divide by the median absolute deviation from it (MAD).

    ``A = (r - median) / (MAD + 1e-3)``, and the member that is the median takes no part: its advantage is NaN
    (MC-GRPO, arXiv 2601.22582, which samples an odd number for it; the code in lotusroot-kim/MC-GRPO at da07745). A
    group with an even number of rewards has the mean of its two middle ones as median, and keeps all members.

    Where more than half of the rewards are the median, as in every odd group of rewards 0 and 1, MAD is 0 and the
    formula would give advantages of a thousand: the *mean* absolute deviation divides instead. A group whose
    rewards are all equal has advantage 0.
    """
    exact_PG = rewards_PG.double()
    centred_PG = exact_PG - exact_PG.nanquantile(0.5, dim=1, keepdim=True)
    distance_PG = centred_PG.abs()
    if scale == "mad":
        deviation_P1 = distance_PG.nanquantile(0.5, dim=1, keepdim=True)
        deviation_P1 = torch.where(deviation_P1 > 0, deviation_P1, distance_PG.nanmean(dim=1, keepdim=True))
        centred_PG = centred_PG / (deviation_P1 + 1e-3)
    odd_P = _count(exact_PG).squeeze(1) % 2 == 1
    median_P = distance_PG.nan_to_num(torch.inf).argmin(1)
    rows = torch.arange(len(exact_PG), device=exact_PG.device)[odd_P]
    centred_PG[rows, median_P[odd_P]] = torch.nan
    return centred_PG.to(rewards_PG.dtype)


def virtual_maximum_advantages(
    rewards_PG: torch.Tensor, max_reward: float, scale: Literal["group", "none"] = "group"
) -> torch.Tensor:
    """Take the mean and deviation over the group and one virtual member with the best possible reward.

    ``A = (r - mean(r, r_max)) / (std(r, r_max) + 1e-6)``: a group that failed throughout has negative advantages
    instead of none (NGRPO; the code in nangongrui-ngr/NGRPO at e7a3804, of which the constants are). A group in
    which all have ``max_reward`` has advantage 0; a single member is compared with the virtual one.

    Raises:
        ValueError: A reward is above ``max_reward``.
    """
    exact_PG = rewards_PG.double()
    highest = float(exact_PG.nan_to_num(-torch.inf).max())
    if highest > max_reward:
        raise ValueError(
            f"advantages.max_reward is {max_reward}, but a completion has reward {highest}; set it to the highest that "
            "the reward functions can give together."
        )
    with_best_PG = torch.cat([exact_PG, torch.full_like(exact_PG[:, :1], max_reward)], dim=1)
    centred_PG = exact_PG - with_best_PG.nanmean(dim=1, keepdim=True)
    if scale == "group":
        centred_PG = centred_PG / (_nan_std(with_best_PG) + 1e-6)
    return centred_PG.to(rewards_PG.dtype)


def per_reward_advantages(rewards_PGK: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    """Normalise each reward function's values in the group by themselves, add them up, and normalise over the batch.

    ``A_k = (r_k - mean_G) / (std_G + 1e-4)``, ``S = sum_k w_k A_k``, ``A = (S - mean) / (std + 1e-4)`` over all
    completions of the step (GDPO, arXiv 2601.05242; TRL's ``multi_objective_aggregation="normalize_then_sum"``):
    a reward with a wide spread does not drown one with a narrow one. A value that is NaN adds nothing; a completion
    without any has advantage NaN.

    Args:
        rewards_PGK: Values of K reward functions; on several ranks of all groups of the step.
        weights_K: Their weights.
    """
    exact_PGK = rewards_PGK.double()
    by_group_LG = exact_PGK.transpose(1, 2).flatten(0, 1)
    normal_LG = _scaled(by_group_LG - by_group_LG.nanmean(dim=1, keepdim=True), by_group_LG, "group")
    normal_PGK = normal_LG.view(exact_PGK.shape[0], exact_PGK.shape[2], -1).transpose(1, 2)
    summed_PG = (normal_PGK * weights_K.double()).nansum(dim=2)
    summed_PG = summed_PG.masked_fill(exact_PGK.isnan().all(dim=2), torch.nan)
    return _scaled(summed_PG - summed_PG.nanmean(), summed_PG, "batch").to(rewards_PGK.dtype)


def uniform_groups(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Say for each group whether its rewards are all equal (or missing), so that it teaches nothing."""
    highest_P = rewards_PG.nan_to_num(-torch.inf).amax(1)
    lowest_P = rewards_PG.nan_to_num(torch.inf).amin(1)
    return lowest_P >= highest_P


def _scaled(centred_PG: torch.Tensor, exact_PG: torch.Tensor, scale: Scale) -> torch.Tensor:
    if scale == "none":
        return centred_PG
    deviation = _nan_std(exact_PG) if scale == "group" else _nan_std(exact_PG.reshape(1, -1))
    return centred_PG / (deviation + EPSILON)


def _count(values: torch.Tensor) -> torch.Tensor:
    """How many of each row's values are not NaN."""
    return values.isfinite().sum(1, keepdim=True)


def _nan_std(values: torch.Tensor) -> torch.Tensor:
    """Unbiased standard deviation of each row's values that are not NaN; 0 for fewer than two."""
    centred = (values - values.nanmean(1, keepdim=True)).nan_to_num(0.0)
    return (centred.square().sum(1, keepdim=True) / (_count(values) - 1).clamp(min=1)).sqrt()
