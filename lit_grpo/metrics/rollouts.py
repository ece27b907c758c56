"""Metrics of the rollouts of a batch."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from lit_grpo.ranks import Ranks
from lit_grpo.types import OBSERVED, Completion, RolloutGroup
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.advantages.functions import less_group_mean, uniform_groups


def rollout_metrics(
    groups: Sequence[RolloutGroup], rewards: GroupRewards, version: int, ranks: Ranks
) -> dict[str, float]:
    """Return what is logged of a batch's fresh rollouts on all ranks, kept or not, by name; NaN for what is of nothing.

    Of groups it is what all members show that were sampled at this visit: none that is replayed counts, and no group
    of such members alone. What the names
    mean stands in ``lit_grpo/tools/dashboard/metrics.yaml``; where TRL has them, they mean the same.

    Args:
        groups: Of this rank; any of them may have no member.
        rewards: The rewards of their completions.
        version: The policy's, to tell how stale the tokens are that a policy has sampled.
        ranks: Of the run; all of them call this.
    """
    completions: list[Completion] = []
    is_fresh: list[bool] = []
    is_sampled: list[bool] = []  # at this visit, in this batch or in one before
    is_empty: list[bool] = []  # of each group
    is_own: list[bool] = []  # likewise: whether this run has sampled any of it
    lengths: list[int] = []
    is_cut_off: list[bool] = []
    for group in groups:
        is_empty.append(not group.rollouts)
        is_own.append(not group.rollouts or not all(rollout.replayed for rollout in group.rollouts))
        for rollout in group.rollouts:
            is_sampled.append(not rollout.replayed)
            is_fresh.append(not (rollout.trained_before or rollout.replayed))
            if is_fresh[-1]:
                completions.append(rollout.completion)
                lengths.append(rollout.completion.num_sampled)
                is_cut_off.append(rollout.completion.finish_reason == "length")
    fresh_R, own_P = torch.tensor(is_fresh, dtype=torch.bool), torch.tensor(is_own, dtype=torch.bool)
    rewards_R = rewards.rewards_R.masked_fill(~torch.tensor(is_sampled, dtype=torch.bool), math.nan)
    own = {
        "rewards": rewards_R[fresh_R].double(),
        "by_function": rewards.by_function_RK[fresh_R].double(),
        "within_group": less_group_mean(rewards_R.double(), rewards.groups_R),
        "uniform": uniform_groups(rewards_R, rewards.groups_R, len(groups))[own_P].double(),
        "empty": torch.tensor(is_empty)[own_P].double(),
        "lengths": torch.tensor(lengths).double(),
        "cut_off": torch.tensor(is_cut_off).double(),
    }
    by_rank = ranks.gather(own)
    everyone: dict[str, torch.Tensor] = {}
    for name in own:
        everyone[name] = torch.cat([rank[name] for rank in by_rank])
    lengths_R = everyone["lengths"]
    terminated_R = lengths_R[everyone["cut_off"] == 0]  # of those that ended by themselves
    logs = {
        "reward": _mean(everyone["rewards"]),
        "reward_std": _std(everyone["rewards"]),
        "reward_std_within": math.sqrt(_mean(everyone["within_group"].square())),
        "frac_reward_zero_std": _mean(everyone["uniform"]),
        "frac_no_reward": _mean(everyone["rewards"].isnan().double()),
        "frac_no_rollout": _mean(everyone["empty"]),
        "completions/mean_length": _mean(lengths_R),
        "completions/clipped_ratio": _mean(everyone["cut_off"]),
        "completions/mean_terminated_length": _mean(terminated_R),
        "completions/p50_length": _quantile(lengths_R, 0.5),
        "completions/p95_length": _quantile(lengths_R, 0.95),
        "completions/min_length": _quantile(lengths_R, 0.0),
        "completions/max_length": _quantile(lengths_R, 1.0),
        "completions/min_terminated_length": _quantile(terminated_R, 0.0),
        "completions/max_terminated_length": _quantile(terminated_R, 1.0),
    }
    for name, values_R in zip(rewards.functions, everyone["by_function"].T, strict=True):
        logs |= {f"rewards/{name}/mean": _mean(values_R), f"rewards/{name}/std": _std(values_R)}
    return logs | _token_metrics(completions, version, ranks)


def _token_metrics(completions: Sequence[Completion], version: int, ranks: Ranks) -> dict[str, float]:
    """Describe sampled tokens, and how stale they are; there may be millions, so ranks exchange sums."""
    versions_T = torch.cat([torch.empty(0, dtype=torch.int64), *[completion.versions_T for completion in completions]])
    logprobs_T = torch.cat([torch.empty(0), *[completion.logprobs_T for completion in completions]])
    own = logprobs_T[versions_T != OBSERVED].double()
    total, count = ranks.sum(torch.stack([own.nansum(), own.isfinite().sum().double()])).tolist()
    counts_S = _tokens_by_staleness(versions_T, version, ranks)
    num_tokens = int(counts_S.sum())
    logs = {"completions/mean_logprob": total / count if count else math.nan}
    if not num_tokens:
        names = ("staleness/mean", "staleness/p95", "staleness/max", "staleness/fresh")
        return logs | dict.fromkeys(names, math.nan)
    return logs | {
        "staleness/mean": float(counts_S @ np.arange(len(counts_S))) / num_tokens,
        "staleness/p95": float(np.searchsorted(counts_S.cumsum(), 0.95 * num_tokens)),
        "staleness/max": float(len(counts_S) - 1),
        "staleness/fresh": float(counts_S[0]) / num_tokens,
    }


def dataset_metrics(groups: Sequence[RolloutGroup], rewards: GroupRewards, ranks: Ranks) -> dict[str, float]:
    """Return what is logged of each data set of a batch, on all ranks, by name."""
    uniform = uniform_groups(rewards.rewards_R, rewards.groups_R, len(groups)).tolist()
    own: list[tuple[str, float, list[tuple[float, int]]]] = []
    values_R = iter(rewards.rewards_R.tolist())
    for group, is_uniform in zip(groups, uniform, strict=True):
        members = [(next(values_R), rollout) for rollout in group.rollouts]
        if members and all(rollout.replayed for _, rollout in members):  # another run has sampled it
            continue
        fresh = [
            (value, its.completion.num_sampled) for value, its in members if not (its.trained_before or its.replayed)
        ]
        own.append((group.prompt.dataset, float(is_uniform), fresh))
    by_dataset: dict[str, list[tuple[float, list[tuple[float, int]]]]] = defaultdict(list)
    for dataset, is_uniform, fresh in sorted(itertools.chain(*ranks.gather(own)), key=lambda each: each[0]):
        by_dataset[dataset].append((is_uniform, fresh))
    logs: dict[str, float] = {}
    for dataset, its in by_dataset.items():
        fresh = torch.tensor([each for _, of_group in its for each in of_group], dtype=torch.float64).view(-1, 2)
        logs |= {
            f"datasets/{dataset}/reward": _mean(fresh[:, 0]),
            f"datasets/{dataset}/reward_std": _std(fresh[:, 0]),
            f"datasets/{dataset}/frac_reward_zero_std": _mean(torch.tensor([each for each, _ in its])),
            f"datasets/{dataset}/mean_length": _mean(fresh[:, 1]),
            f"datasets/{dataset}/prompts": float(len(its)),
        }
    return logs


def staleness_shares(groups: Sequence[RolloutGroup], version: int, ranks: Ranks) -> dict[str, float]:
    """Return the shares of a batch's sampled tokens on all ranks that are so many updates old; for old ones by ranges.

    With ``staleness/fresh`` they add up to 1.
    """
    versions = [rollout.completion.versions_T for group in groups for rollout in group.fresh]
    counts_S = _tokens_by_staleness(torch.cat([torch.empty(0, dtype=torch.int64), *versions]), version, ranks)
    num_tokens = int(counts_S.sum())
    return {
        f"staleness/share_{name}": float(counts_S[first:end].sum()) / num_tokens if num_tokens else math.nan
        for name, (first, end) in STALENESS.items()
    }


STALENESS = {"1": (1, 2), "2_to_3": (2, 4), "4_to_7": (4, 8), "8_or_more": (8, None)}
"""The first staleness of each range, and the first of the next."""


def _tokens_by_staleness(versions_T: torch.Tensor, version: int, ranks: Ranks) -> np.ndarray:
    """Count the sampled tokens on all ranks of staleness 0, 1, 2 and so on."""
    tokens_S = ranks.gather(torch.bincount(version - versions_T[versions_T != OBSERVED]))
    counts_S = np.zeros(max(map(len, tokens_S)), dtype=np.int64)
    for each_S in tokens_S:
        counts_S[: len(each_S)] += each_S.numpy()
    return counts_S


def _mean(values: torch.Tensor) -> float:
    return float(values.nanmean()) if len(values) else math.nan


def _std(values: torch.Tensor) -> float:
    """The deviation of those that are not NaN, without bias; 0 of a single one."""
    known = values[~values.isnan()]
    return float(known.std()) if len(known) > 1 else 0.0 if len(known) else math.nan


def _quantile(values: torch.Tensor, share: float) -> float:
    return float(np.quantile(values.numpy(), share)) if len(values) else math.nan
