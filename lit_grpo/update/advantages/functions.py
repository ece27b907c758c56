"""Rewards of whole groups to advantages: a baseline is subtracted, and a scale divides.

Every function takes the rewards of all rollouts in one vector, with the number of each one's group. Groups have any
number of members. A rollout without a reward (NaN) takes no part in any statistic, and its advantage is NaN. They
compute in float64, in which the mean of equal float32 numbers is exact.
"""

from __future__ import annotations

from typing import Literal

import torch

Scale = Literal["group", "batch", "none"]

EPSILON = 1e-4


def group_advantages(rewards_R: torch.Tensor, groups_R: torch.Tensor, scale: Scale = "group") -> torch.Tensor:
    """Subtract each group's mean reward, and divide by a standard deviation.

    ``A = (r - mean(r of the group)) / (std + 1e-4)`` (DeepSeekMath, arXiv 2402.03300, section 4.1.2), with
    the unbiased standard deviation, as in TRL. A group whose rewards are all equal, or which has one member with a
    reward, has advantage 0.

    Args:
        rewards_R: On several ranks all of the step's for ``scale="batch"``.
        groups_R: The number of the group that each belongs to.
        scale: ``group`` divides by the group's deviation, ``batch`` by that of all rewards given,
            ``none`` by nothing (Dr. GRPO, arXiv 2503.20783).
    """
    exact_R = rewards_R.double()
    return _scaled(less_group_mean(exact_R, groups_R), exact_R, groups_R, scale).to(rewards_R.dtype)


def leave_one_out_advantages(rewards_R: torch.Tensor, groups_R: torch.Tensor, scale: Scale = "none") -> torch.Tensor:
    """Subtract from each reward the mean of the *other* rewards of its group: ``n / (n - 1) (r - mean)``.

    RLOO (Ahmadian et al., arXiv 2402.14740, section 3.2): the baseline does not depend on the completion's own reward.
    A group whose rewards are all equal, or which has one member with a reward, has advantage 0.
    """
    exact_R = rewards_R.double()
    _, count_R = _sums(exact_R, groups_R)
    centered_R = less_group_mean(exact_R, groups_R) * count_R / (count_R - 1).clamp(min=1)
    return _scaled(centered_R, exact_R, groups_R, scale).to(rewards_R.dtype)


def least_variance_advantages(
    rewards_R: torch.Tensor,
    groups_R: torch.Tensor,
    log_weights_R: torch.Tensor | None,
    scale: Literal["group", "none"] = "group",
) -> torch.Tensor:
    """Subtract from each reward its group's mean weighted by ``v = w^2 |grad log pi|^2``: ``b = sum v r / sum v``.

    It is the baseline under which the gradient ``sum w (r - b) grad log pi`` of independent completions has the least
    variance, where ``w`` is policy / sampler of the whole completion (VCPO, arXiv 2602.17616). Its runs divide by the
    group's deviation: that of the n rewards themselves, not the unbiased one, without an epsilon, and not at all where
    it is at most 1e-8 (mit-han-lab/vcpo at c7f030f, ``compute_grad_info`` and ``compute_opob_baseline``).

    Args:
        rewards_R: Rewards of the rollouts of complete groups, shape R.
        groups_R: The number of the group that each belongs to.
        log_weights_R: ``log v``, up to a constant of each group; by default all alike.
        scale: ``group`` divides by the group's deviation, ``none`` by nothing.
    """
    exact_R = rewards_R.double()
    from_mean_R = centered_R = less_group_mean(exact_R, groups_R)  # exactly 0 in a group whose rewards are all equal
    if log_weights_R is not None:
        known_R = log_weights_R.double().masked_fill(exact_R.isnan(), -torch.inf)
        lowest_P = torch.full_like(groups_R.bincount(), -torch.inf, dtype=known_R.dtype)
        highest_P = lowest_P.scatter_reduce(0, groups_R, known_R, "amax")
        weights_R = (known_R - highest_P.nan_to_num(neginf=0.0)[groups_R]).exp()
        (weighted_R, _), (total_R, _) = _sums(weights_R * centered_R, groups_R), _sums(weights_R, groups_R)
        centered_R = centered_R - (weighted_R / total_R).nan_to_num(0.0)
    if scale == "group":
        squares_R, count_R = _sums(from_mean_R.square(), groups_R)
        deviation_R = (squares_R / count_R).sqrt()
        centered_R = centered_R / deviation_R.where(deviation_R > 1e-8, 1.0)
    return centered_R.to(rewards_R.dtype)


def mean_normalized_advantages(rewards_R: torch.Tensor, groups_R: torch.Tensor) -> torch.Tensor:
    """Divide by the group's mean reward: ``A = (r - mean) / mean``, 0 where the mean is 0 (MaxRL, arXiv 2602.02710).

    For rewards 0 and 1 and groups of n, the expected gradient is that of ``log p`` with its series in ``1 - p`` cut
    after the term of order n - 1, where p is the chance of a success; that of ``scale="none"`` of ``grpo`` is
    ``(n - 1) / n`` times the gradient of p. The authors' code adds 1e-6 to the mean
    (``compute_p_normalization_outcome_advantage`` of tajwarfahim/maxrl at 7db6bb9).

    Raises:
        ValueError: A reward is negative.
    """
    exact_R = rewards_R.double()
    if (lowest := min(exact_R.nan_to_num(0.0).tolist(), default=0.0)) < 0:
        raise ValueError(
            f"advantages.estimator maxrl divides by a group's mean reward, but a completion has reward {lowest:g}; "
            "use reward functions without negative values, or estimator grpo."
        )
    sums_R, counts_R = _sums(exact_R, groups_R)
    mean_R = (sums_R / counts_R).where(sums_R > 0, 1.0)
    return (less_group_mean(exact_R, groups_R) / mean_R).to(rewards_R.dtype)


def globally_normalized_advantages(
    rewards_R: torch.Tensor, groups_R: torch.Tensor, baseline: bool, num_tokens_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalize over all completions of the step: ``A = (x - mean(x)) / (std(x) + 1e-4)`` (REINFORCE++).

    ``x`` is the reward, or with ``baseline`` the reward minus its group's mean ("REINFORCE++ w/ baseline"; arXiv
    2501.03262, version 9). Unlike :func:`group_advantages` with ``scale="batch"`` it divides by the deviation of what
    was centered. Without ``baseline`` a group whose rewards are all equal has an advantage other than 0.

    Mean and deviation are over completions, each alike, as in TRL's ``normalize_advantages``. With ``num_tokens_R``
    they are over tokens, so that long completions count more, as in the authors' code (OpenRLHF at 3c3be62). The
    deviation is then that of n, not n - 1, and at least 1e-4 in place of the epsilon. A group whose rewards are all
    equal may have an advantage other than 0 then, with ``baseline`` too. verl does the same with n - 1. The paper's KL
    terms are fields of the objective: with ``baseline``
    ``kl.estimator: k2`` in the loss; without it k1 in the reward, which the paper adds up from each token to the
    completion's end and ``kl.place: reward`` over the whole completion.

    Args:
        rewards_R: On several ranks all of the step's.
        groups_R: The number of the group that each belongs to.
        baseline: Whether each group's mean is subtracted first.
        num_tokens_R: How often each counts in mean and deviation; by default once.
    """
    exact_R, step_R = rewards_R.double(), torch.zeros_like(groups_R)
    if num_tokens_R is not None:
        values_R = less_group_mean(exact_R, groups_R if baseline else step_R)  # exactly 0 where all are equal
        weights_R = num_tokens_R.double().masked_fill(exact_R.isnan(), 0.0)
        weights_R = weights_R / weights_R.sum().clamp(min=1)
        values_R = values_R - (weights_R * values_R.nan_to_num(0.0)).sum()
        deviation = (weights_R * values_R.nan_to_num(0.0).square()).sum().sqrt()
        return (values_R / deviation.clamp(min=EPSILON)).to(rewards_R.dtype)
    # Less its groups' means, the mean of the step is 0, and what is 0 stays exactly 0.
    centered_R = less_group_mean(exact_R, groups_R if baseline else step_R)
    return _scaled(centered_R, centered_R, step_R, "group").to(rewards_R.dtype)


def median_advantages(
    rewards_R: torch.Tensor, groups_R: torch.Tensor, scale: Literal["mad", "mad_nonzero", "none"] = "mad"
) -> torch.Tensor:
    """Subtract each group's median reward, and divide by the median absolute deviation from it (MAD).

    ``A = (r - median) / (MAD + 1e-3)``, and the member that is the median takes no part: its advantage is NaN
    (MC-GRPO, arXiv 2601.22582, which samples an odd number for it; the MATH trainer in lotusroot-kim/MC-GRPO at
    da07745). Its GSM8K trainer then multiplies a group's advantages by n over the number that are not 0, of n with a
    reward: ``scale="mad_nonzero"``. A group with an even number of rewards has the mean of its two middle ones as
    median, and keeps all members.

    Where more than half of the rewards are the median, as in every odd group of rewards 0 and 1, MAD is 0 and the
    formula would give advantages of a thousand: the *mean* absolute deviation divides instead. A group whose
    rewards are all equal has advantage 0.
    """
    exact_R = rewards_R.double()
    centered_R = exact_R - _medians(exact_R, groups_R)
    distance_R = centered_R.abs()
    distances_R, count_R = _sums(distance_R, groups_R)
    if scale != "none":
        deviation_R = _medians(distance_R, groups_R)
        deviation_R = torch.where(deviation_R > 0, deviation_R, distances_R / count_R)
        centered_R = centered_R / (deviation_R + 1e-3)
    if scale == "mad_nonzero":
        nonzero_R, _ = _sums((centered_R.abs() > 1e-6).to(exact_R.dtype), groups_R)
        centered_R = centered_R * count_R / nonzero_R.clamp(min=1)
    is_median_R = (distance_R == 0) & (count_R % 2 == 1)
    places_R = torch.arange(len(groups_R), device=groups_R.device).where(is_median_R, len(groups_R))
    none_P = torch.full_like(groups_R.bincount(), len(groups_R))
    first_P = none_P.scatter_reduce(0, groups_R, places_R, "amin")
    return centered_R.masked_fill(is_median_R & (places_R == first_P[groups_R]), torch.nan).to(rewards_R.dtype)


def virtual_maximum_advantages(
    rewards_R: torch.Tensor, groups_R: torch.Tensor, max_reward: float, scale: Literal["group", "none"] = "group"
) -> torch.Tensor:
    """Take the mean and deviation over the group and one virtual member with the best possible reward.

    ``A = (r - mean(r, r_max)) / (std(r, r_max) + 1e-6)``: a group that failed throughout has negative advantages
    instead of none (NGRPO; the code in nangongrui-ngr/NGRPO at e7a3804, of which the constants are). A group in
    which all have ``max_reward`` has advantage 0; a single member is compared with the virtual one.

    Raises:
        ValueError: A reward is above ``max_reward``.
    """
    exact_R = rewards_R.double()
    highest = max(exact_R[exact_R.isfinite()].tolist(), default=max_reward)
    if highest > max_reward:
        raise ValueError(
            f"advantages.max_reward is {max_reward}, but a completion has reward {highest}; set it to the highest that "
            "the reward functions can give together."
        )
    virtual = torch.arange(len(groups_R.bincount()), device=groups_R.device)
    with_best = torch.cat([exact_R, torch.full_like(virtual, max_reward, dtype=exact_R.dtype)])
    groups = torch.cat([groups_R, virtual])
    centered = _scaled(less_group_mean(with_best, groups), with_best, groups, scale, epsilon=1e-6)
    return centered[: len(exact_R)].to(rewards_R.dtype)


def per_reward_advantages(rewards_RK: torch.Tensor, groups_R: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    """Normalize each reward function's values in the group by themselves, add them up, and normalize over the batch.

    ``A_k = (r_k - mean_G) / (std_G + 1e-4)``, ``S = sum_k w_k A_k``, ``A = (S - mean) / (std + 1e-4)`` over all
    completions of the step (GDPO, arXiv 2601.05242; TRL's ``multi_objective_aggregation="normalize_then_sum"``):
    a reward with a wide spread does not drown one with a narrow one. A value that is NaN adds nothing; a completion
    without any that counts (a weight of 0 does not) has advantage NaN.

    Args:
        rewards_RK: Values of K reward functions; on several ranks all of the step's.
        groups_R: The number of the group that each rollout belongs to.
        weights_K: Weight of each reward function in the sum, shape K.
    """
    exact_RK = rewards_RK.double()
    normal = [group_advantages(values_R, groups_R) for values_R in exact_RK.T]
    summed_R = (torch.stack(normal, 1) * weights_K.double()).nansum(dim=1)
    summed_R = summed_R.masked_fill(exact_RK[:, weights_K != 0].isnan().all(dim=1), torch.nan)
    return group_advantages(summed_R, torch.zeros_like(groups_R)).to(rewards_RK.dtype)


def uniform_groups(rewards_R: torch.Tensor, groups_R: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Say for each group, shape P, whether it teaches nothing: its rewards are all equal or missing, or it is empty."""
    highest_P = rewards_R.new_full((num_groups,), -torch.inf)
    highest_P.scatter_reduce_(0, groups_R, rewards_R.nan_to_num(-torch.inf), "amax")
    lowest_P = rewards_R.new_full((num_groups,), torch.inf)
    return lowest_P.scatter_reduce_(0, groups_R, rewards_R.nan_to_num(torch.inf), "amin") >= highest_P


def less_group_mean(values_R: torch.Tensor, groups_R: torch.Tensor) -> torch.Tensor:
    """Subtract from each value the mean of its group's that are not NaN."""
    sums_R, counts_R = _sums(values_R, groups_R)
    return values_R - sums_R / counts_R


def _scaled(
    centered_R: torch.Tensor, values_R: torch.Tensor, groups_R: torch.Tensor, scale: Scale, epsilon: float = EPSILON
) -> torch.Tensor:
    """Divide by the unbiased standard deviation of each group's values, or of all; it is 0 for fewer than two."""
    if scale == "none":
        return centered_R
    if scale == "batch":
        groups_R = torch.zeros_like(groups_R)
    squares_R, counts_R = _sums(less_group_mean(values_R, groups_R).square(), groups_R)
    return centered_R / ((squares_R / (counts_R - 1).clamp(min=1)).sqrt() + epsilon)


def _sums(values_R: torch.Tensor, groups_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give each member the sum of its group's values that are not NaN, and their number."""
    counts_P = torch.zeros_like(groups_R.bincount()).index_add_(0, groups_R, values_R.isfinite().long())
    sums_P = values_R.new_zeros(len(counts_P)).index_add_(0, groups_R, values_R.nan_to_num(0.0))
    return sums_P[groups_R], counts_P[groups_R]


def _medians(values_R: torch.Tensor, groups_R: torch.Tensor) -> torch.Tensor:
    """Medians; the mean of the two middle ones of an even number."""
    order = values_R.nan_to_num(torch.inf).argsort(stable=True)
    ordered = values_R[order[groups_R[order].argsort(stable=True)]]  # group by group, NaN last
    sizes_P, (_, count_R) = groups_R.bincount(), _sums(values_R, groups_R)
    start_R = (sizes_P.cumsum(0) - sizes_P)[groups_R]
    lower_R, upper_R = ordered[start_R + (count_R - 1).clamp(min=0) // 2], ordered[start_R + count_R // 2]
    return torch.lerp(lower_R, upper_R, 0.5)
