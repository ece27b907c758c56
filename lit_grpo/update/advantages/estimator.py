"""The advantage estimator: one configurable object over the functions in ``functions``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch

from lit_grpo.budgets.history import PromptHistory
from lit_grpo.compatibility import Requirement
from lit_grpo.limits import Limit, check_fields
from lit_grpo.settings import find_row
from lit_grpo.types import RolloutGroup
from lit_grpo.update.advantages.functions import (
    globally_normalized_advantages,
    group_advantages,
    least_variance_advantages,
    leave_one_out_advantages,
    mean_normalized_advantages,
    median_advantages,
    per_reward_advantages,
    virtual_maximum_advantages,
)
from lit_grpo.update.advantages.smoothing import smoothed_advantages

ScaleBy = Literal["group", "batch", "tokens", "mean", "mad", "mad_nonzero", "none"]


@dataclass(frozen=True)
class GroupRewards:
    """Rewards of all members of all groups, in float32; NaN where none applies.

    ``by_function_RK`` are the same by reward function, of which ``functions`` are the names. ``groups_R`` says which
    group each belongs to; a group may have any number of members, and ``prompt_ids`` has one entry a group.
    ``log_weights_R`` say what each member counts in its group's baseline, where the estimator weighs them;
    ``altered`` says of each group whether its prompt was asked with something else than its row says; empty, none was.
    ``num_tokens_R`` are the tokens of each member that are trained on, where they are known.
    """

    rewards_R: torch.Tensor
    by_function_RK: torch.Tensor
    groups_R: torch.Tensor
    prompt_ids: Sequence[str]
    functions: Sequence[str] = ()
    log_weights_R: torch.Tensor | None = None
    altered: Sequence[bool] = ()
    num_tokens_R: torch.Tensor | None = None

    @classmethod
    def of(cls, groups: Sequence[RolloutGroup], functions: Sequence[str]) -> GroupRewards:
        """Take them from rollouts; ``functions`` are the names of the reward functions."""
        rewards, rows, numbers, num_tokens = list[float](), list[list[float]](), list[int](), list[int]()
        for number, group in enumerate(groups):
            for rollout in group.rollouts:
                by_function = map(rollout.rewards.get, functions)
                rewards.append(rollout.reward)
                rows.append([math.nan if value is None else value for value in by_function])
                numbers.append(number)
                num_tokens.append(rollout.completion.num_trained)
        return cls(
            torch.tensor(rewards, dtype=torch.float32),
            torch.tensor(rows, dtype=torch.float32).view(len(rewards), len(functions)),
            torch.tensor(numbers, dtype=torch.int64),
            [group.prompt.prompt_id for group in groups],
            functions,
            altered=[group.prompt.altered for group in groups],
            num_tokens_R=torch.tensor(num_tokens, dtype=torch.int64),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[GroupRewards]) -> GroupRewards:
        """Put the groups of several ranks together, in their order."""
        before = itertools.accumulate((len(part.prompt_ids) for part in parts), initial=0)
        num_tokens = [part.num_tokens_R for part in parts if part.num_tokens_R is not None]
        return cls(
            torch.cat([part.rewards_R for part in parts]),
            torch.cat([part.by_function_RK for part in parts]),
            torch.cat([part.groups_R + number for part, number in zip(parts, before, strict=False)]),
            [prompt_id for part in parts for prompt_id in part.prompt_ids],
            parts[0].functions,
            altered=[altered for part in parts for altered in part.altered],
            num_tokens_R=torch.cat(num_tokens) if len(num_tokens) == len(parts) else None,
        )

    def only(self, chosen_R: torch.Tensor) -> GroupRewards:
        """Return them with no reward for all others, which so take part in no statistic."""
        rewards_R = self.rewards_R.masked_fill(~chosen_R, math.nan)
        return replace(
            self, rewards_R=rewards_R, by_function_RK=self.by_function_RK.masked_fill(~chosen_R[:, None], math.nan)
        )

    def of_groups(self, chosen: Sequence[int]) -> GroupRewards:
        """Return those of some groups, by their numbers in ascending order."""
        rows_R = torch.isin(self.groups_R, torch.tensor(chosen, dtype=torch.int64))
        return replace(
            self,
            rewards_R=self.rewards_R[rows_R],
            by_function_RK=self.by_function_RK[rows_R],
            groups_R=torch.searchsorted(torch.tensor(chosen, dtype=torch.int64), self.groups_R[rows_R]),
            prompt_ids=[self.prompt_ids[number] for number in chosen],
            log_weights_R=None if self.log_weights_R is None else self.log_weights_R[rows_R],
            altered=[self.altered[number] for number in chosen] if self.altered else (),
            num_tokens_R=None if self.num_tokens_R is None else self.num_tokens_R[rows_R],
        )


class EstimatorInputs(NamedTuple):
    """Inputs of an estimator beside the rewards of groups.

    ``weights_K`` are those of the reward functions, ``history`` has earlier visits of prompts, ``scale`` says what to
    divide by and ``max_reward`` is the highest reward that a completion can get.
    """

    scale: ScaleBy
    max_reward: float
    weights_K: torch.Tensor
    history: PromptHistory


class EstimatorRow(NamedTuple):
    """An estimator's functions, limits and needs.

    ``compute`` returns advantages_R, NaN for a rollout without a reward, of the groups of this rank, or of all ranks
    where it needs ``all_ranks``. ``scales`` are what it may divide by, the default first; ``needs`` are words of
    :data:`lit_grpo.compatibility.REQUIREMENTS`. ``by_scores`` says whether it goes by the squared norm of the gradient
    of each token's log-prob, which is then measured.
    A new estimator is one more entry in :data:`ESTIMATORS`, or a row in a file of your own, which
    ``advantages.estimator`` names.
    """

    compute: Callable[[GroupRewards, EstimatorInputs], torch.Tensor]
    scales: tuple[ScaleBy, ...]
    needs: frozenset[str] = frozenset()
    by_scores: bool = False


def _scaled(advantages: Callable[..., torch.Tensor]) -> Callable[[GroupRewards, EstimatorInputs], torch.Tensor]:
    return lambda rewards, given: advantages(rewards.rewards_R, rewards.groups_R, given.scale)


def _ngrpo(rewards: GroupRewards, given: EstimatorInputs) -> torch.Tensor:
    scale = cast(Any, given.scale)
    return virtual_maximum_advantages(rewards.rewards_R, rewards.groups_R, given.max_reward, scale)


def _gdpo(rewards: GroupRewards, given: EstimatorInputs) -> torch.Tensor:
    return per_reward_advantages(rewards.by_function_RK, rewards.groups_R, given.weights_K)


def _dcpo(rewards: GroupRewards, given: EstimatorInputs) -> torch.Tensor:
    return smoothed_advantages(rewards.rewards_R, rewards.groups_R, rewards.prompt_ids, given.history, rewards.altered)


def _least_variance(rewards: GroupRewards, given: EstimatorInputs) -> torch.Tensor:
    scale = cast(Any, given.scale)
    return least_variance_advantages(rewards.rewards_R, rewards.groups_R, rewards.log_weights_R, scale)


def _normalized(baseline: bool) -> Callable[[GroupRewards, EstimatorInputs], torch.Tensor]:
    def compute(rewards: GroupRewards, given: EstimatorInputs) -> torch.Tensor:
        num_tokens_R = rewards.num_tokens_R if given.scale == "tokens" else None
        return globally_normalized_advantages(rewards.rewards_R, rewards.groups_R, baseline, num_tokens_R)

    return compute


ESTIMATORS: Mapping[str, EstimatorRow] = {
    "grpo": EstimatorRow(_scaled(group_advantages), ("group", "batch", "none")),
    "rloo": EstimatorRow(_scaled(leave_one_out_advantages), ("none", "group", "batch")),
    "maxrl": EstimatorRow(
        lambda rewards, _: mean_normalized_advantages(rewards.rewards_R, rewards.groups_R),
        ("mean",),
        needs=frozenset({"plain_rewards"}),
    ),
    "mc_grpo": EstimatorRow(_scaled(median_advantages), ("mad", "mad_nonzero", "none")),
    "ngrpo": EstimatorRow(
        _ngrpo,
        ("group", "none"),
        needs=frozenset({"plain_rewards"}),
    ),
    "gdpo": EstimatorRow(_gdpo, ("batch",), needs=frozenset({"plain_rewards"})),
    "dcpo": EstimatorRow(_dcpo, ("group",), needs=frozenset({"whole_groups", "fresh_members", "all_ranks"})),
    "least_variance": EstimatorRow(_least_variance, ("group", "none"), by_scores=True),
    "reinforce_plus_plus": EstimatorRow(_normalized(baseline=False), ("batch", "tokens")),
    "reinforce_plus_plus_baseline": EstimatorRow(_normalized(baseline=True), ("batch", "tokens")),
}


@dataclass(frozen=True)
class Advantages:
    """Settings of the computation of advantages from rewards."""

    estimator: str = "grpo"
    """Estimator of the advantages: ``grpo`` (minus the group's mean), ``rloo`` (minus the mean of the others),
    ``maxrl`` (minus the group's mean, divided by it), ``mc_grpo`` (minus the median), ``ngrpo`` (with a virtual
    completion that has the best reward), ``gdpo`` (each reward function normalized by itself), ``dcpo`` (smoothed over
    all samplings of a prompt), ``least_variance`` (minus the group's mean weighted by squared importance weights and
    gradients), ``reinforce_plus_plus`` (minus the batch's mean) or ``reinforce_plus_plus_baseline`` (minus the group's
    mean, then normalized over the batch). An estimator of your own is the import path of a
    :class:`lit_grpo.update.advantages.estimator.EstimatorRow`, as in ``my_file.ROW``.
    """
    scale: ScaleBy | None = None
    """Divisor of the advantages: the standard deviation of the ``group`` or of the ``batch``, the median absolute
    deviation ``mad``, the group's ``mean``, or ``none``. By default ``group`` for grpo, ngrpo, dcpo and least_variance,
    ``none`` for rloo, ``mean`` for maxrl, ``mad`` for mc_grpo and ``batch`` for the others. ``mad_nonzero`` divides
    like ``mad``, then multiplies by n over the number of the group's advantages that are not 0 (MC-GRPO on GSM8K).
    ``tokens``, for both reinforce_plus_plus, takes the batch's mean and deviation over tokens.
    """
    max_reward: Annotated[float, Limit(finite=True)] = 1.0
    """Highest reward that a completion can get, for ``ngrpo``."""

    def __post_init__(self) -> None:
        allowed = self._row.scales
        if self.scale is not None and self.scale not in allowed:
            raise ValueError(
                f"advantages.scale must be one of {', '.join(allowed)} for estimator {self.estimator}, "
                f"not {self.scale!r}."
            )
        check_fields(self, "model.advantages.")

    @cached_property
    def _row(self) -> EstimatorRow:
        return find_row("advantages.estimator", self.estimator, ESTIMATORS, EstimatorRow)

    @cached_property
    def scaled_by(self) -> ScaleBy:
        return self.scale or self._row.scales[0]

    @property
    def divides_groups(self) -> bool:
        """True if a deviation of each group divides, so that groups of any pass rate count about equally."""
        divides_functions = self.estimator == "gdpo"  # by group, before it divides their sum by batch
        return divides_functions or self.scaled_by in ("group", "mad", "mad_nonzero")

    @cached_property
    def needs(self) -> frozenset[str]:
        of_scale = frozenset({"all_ranks"}) if self.scaled_by in ("batch", "tokens") else frozenset[str]()
        return self._row.needs | of_scale

    @cached_property
    def by_scores(self) -> bool:
        return self._row.by_scores

    @property
    def parts(self) -> list[Requirement]:
        scale = f" with scale {self.scale}" if self.scale else ""
        return [Requirement(f"model.advantages.estimator {self.estimator}{scale}", needs=self.needs)]

    def check(self, num_generations: int) -> None:
        """Refuse groups that the estimator has no meaning for.

        Raises:
            ValueError: A median of two.
        """
        if self.estimator == "mc_grpo" and num_generations < 3:
            raise ValueError(
                f"num_generations is {num_generations}, but of two completions the median is the mean, so that each "
                "has advantage 1 or -1 whatever the rewards; set it to at least 3, or advantages.estimator to rloo."
            )

    def compute(self, rewards: GroupRewards, weights_K: torch.Tensor, history: PromptHistory) -> torch.Tensor:
        """Return advantages_R, NaN for a rollout that takes no part; all ranks' ``rewards`` if it ``needs`` them."""
        return self._row.compute(rewards, EstimatorInputs(self.scaled_by, self.max_reward, weights_K, history))
