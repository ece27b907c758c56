"""Base classes of plug-ins that train on some members of each group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch

from lit_grpo.budgets.allocation import AtLeastTwo
from lit_grpo.plugins import Plugin, RunFacts
from lit_grpo.types import Rollout
from lit_grpo.update.plugin import Batch, Measure


@dataclass
class Subset(Plugin):
    """A fixed number of completions of each group."""

    keep: AtLeastTwo | None = None
    """Number of completions of each group to train on."""
    first_keep: AtLeastTwo | None = None
    """Value of ``keep`` at the beginning of the run, from which it changes linearly to ``keep`` at the last update. By
    default it stays the same.
    """

    @property
    def _sizes(self) -> dict[str, int]:
        sizes = {"keep": self.keep, "first_keep": self.first_keep}
        return {name: size for name, size in sizes.items() if size is not None}

    def check(self, run: RunFacts) -> None:
        super().check(run)
        check_end(self, run)
        self.keep_at(0.0)
        for name, size in self._sizes.items():
            if size > run.num_generations:
                raise ValueError(
                    f"{name} is {size}, but model.num_generations is {run.num_generations}; keep at most as many as "
                    "are sampled."
                )

    def keep_at(self, progress: float) -> float:
        """Return how many members of a group are kept once a share ``progress`` of the updates has been made."""
        if self.keep is None:
            raise ValueError("keep is not set; give the number of completions of each group to learn from, 2 or more.")
        return between(self.first_keep, self.keep, progress)


@dataclass
class CompletionSelection(Subset):
    """The ``keep`` members of each group with the largest values of some kind, compared within their group.

    A choice of your own gives the values. For example, the shortest members of each group::

        @dataclass
        class Shorter(CompletionSelection):
            def values(self, rewards_N, rollouts, measure):
                return -torch.tensor([rollout.completion.num_tokens for rollout in rollouts]).double()
    """

    writes: ClassVar[frozenset[str]] = frozenset({"chosen"})

    statistics: Literal["group", "kept"] = "group"
    """Completions for the mean and deviation of an advantage: all of the ``group``, or those ``kept``."""

    def on_batch(self, batch: Batch) -> None:
        rewards, rollouts, may_be_R = batch.rewards, batch.rollouts, candidates(batch)
        places = may_be_R.nonzero().flatten()
        values_R = torch.full(may_be_R.shape, math.nan, dtype=torch.float64)
        values_R[places] = self.values(rewards.rewards_R[places], [rollouts[r] for r in places.tolist()], batch.measure)
        chosen_R, size = torch.zeros_like(may_be_R), nearest(self.keep_at(batch.progress))
        for group in range(len(rewards.prompt_ids)):
            members = ((rewards.groups_R == group) & may_be_R).nonzero().flatten()
            chosen_R[members[self.of_group(values_R[members], size)]] = True
        for rollout, is_chosen in zip(rollouts, chosen_R.tolist(), strict=True):
            if not math.isnan(rollout.reward):
                batch.set("chosen", rollout, is_chosen)
        if self.statistics == "kept":
            batch.compare()

    def values(self, rewards_N: torch.Tensor, rollouts: Sequence[Rollout], measure: Measure) -> torch.Tensor:
        """Return what rollouts that may be chosen are compared by, of all groups: float64, shape N; no NaN."""
        raise NotImplementedError

    def of_group(self, values_N: torch.Tensor, size: int) -> torch.Tensor:
        """Return the places of the ``size`` members that are chosen by their values: the largest, of equals the first.

        All, where there are no more.
        """
        return values_N.sort(descending=True, stable=True).indices[:size]


def candidates(batch: Batch) -> torch.Tensor:
    """Return which rollouts may be chosen: booleans, shape R.

    A rollout without a reward may not, nor one that an earlier batch has been trained on.
    """
    kept_R = torch.tensor([rollout.kept for rollout in batch.rollouts], dtype=torch.bool)
    return ~batch.rewards.rewards_R.isnan() & kept_R


def check_end(plugin: Plugin, run: RunFacts) -> None:
    """Refuse fields that move from their ``first_`` values over the updates of a run that has no known end."""
    values = {field.name: getattr(plugin, field.name) for field in fields(plugin) if field.name.startswith("first_")}
    first = {name: value for name, value in values.items() if value is not None}
    if first and run.total_updates == math.inf:
        raise ValueError(
            f"it begins with {' and '.join(f'{name} {value}' for name, value in first.items())} and moves from there "
            "over the updates of the run, and nothing says how many it has; set trainer.max_steps, or leave "
            f"{' and '.join(first)} out."
        )


def max_variance_subset(values_N: torch.Tensor, size: int) -> torch.Tensor:
    """Return which ``size`` numbers have the largest variance; all, where there are no more.

    They are the i highest and the size - i lowest for some i (PODS, arXiv 2504.13818, theorem 1), so that sorting and
    sums of beginnings and ends find them in O(N log N). Of equal variances the most even split counts.

    Args:
        values_N: The numbers, no NaN.
        size: Number of values to choose.

    Returns:
        Their places, ascending.
    """
    number = len(values_N)
    if size >= number:
        return torch.arange(number)
    exact_N = values_N.double() - values_N.double().mean()
    order = exact_N.sort(stable=True).indices
    zero = exact_N.new_zeros(1)
    lowest, highest = exact_N[order[:size]], exact_N[order.flip(0)[:size]]
    sums, squares = (
        torch.cat([zero, (highest**power).cumsum(0)]) + torch.cat([zero, (lowest**power).cumsum(0)]).flip(0)
        for power in (1, 2)
    )
    variance = squares / size - (sums / size) ** 2  # by how many of the highest are taken, from 0 to size
    best = (variance >= variance.max() - 1e-12 * exact_N.abs().max() ** 2).nonzero().flatten()
    num_high = int(best[(2 * best - size).abs().argmin()])
    return torch.cat([order[: size - num_high], order[number - num_high :]]).sort().values


def between(first: float | None, last: float, progress: float) -> float:
    """Return (1 - progress) x first + progress x last; ``last`` where there is no first."""
    return last if first is None else (1 - progress) * first + progress * last


def nearest(number: float) -> int:
    """Return the nearest whole number, of two the larger."""
    return int(number + 0.5)
