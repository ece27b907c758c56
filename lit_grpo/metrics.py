"""Metrics of rollouts, of the tokens that an update has seen, and of validation."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torchmetrics import Metric

from lit_grpo.types import PromptBatch
from lit_grpo.update.advantages.functions import uniform_groups
from lit_grpo.update.objective.corrections import gap_metrics, gap_sums

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Reduces a float64 tensor over ranks; every rank must call it, with as many elements."""


def rollout_metrics(
    batch: PromptBatch, rewards_PG: torch.Tensor, version: int, reduce_sum: Reduce, reduce_max: Reduce
) -> dict[str, float]:
    """Return what is logged of a batch's rollouts on all ranks, by name; NaN for a mean over nothing.

    Args:
        batch: With its groups.
        rewards_PG: Their rewards; NaN where none applies.
        version: The policy's, to tell how stale the tokens are.
        reduce_sum: Sums over ranks.
        reduce_max: Takes the maximum over ranks.
    """
    completions = [rollout.completion for rollout in batch.rollouts]
    lengths = torch.tensor([completion.num_tokens for completion in completions], dtype=torch.float64)
    values = {
        "reward": rewards_PG,
        "reward_std": (rewards_PG.double() - rewards_PG.double().nanmean(1, keepdim=True)).square(),
        "frac_reward_zero_std": uniform_groups(rewards_PG),
        "frac_no_reward": rewards_PG.isnan(),
        "completions/mean_length": lengths,
        "completions/clipped_ratio": torch.tensor([completion.finish_reason == "length" for completion in completions]),
        "staleness/mean": torch.cat([version - completion.versions_T for completion in completions]),
    }
    for name in batch.rollouts[0].rewards:
        by_rollout = [rollout.rewards[name] for rollout in batch.rollouts]
        values[f"rewards/{name}"] = torch.tensor([math.nan if value is None else value for value in by_rollout])
    logs = _nan_means(values, reduce_sum)
    logs["reward_std"] = math.sqrt(logs["reward_std"])
    logs["completions/max_length"] = float(reduce_max(lengths.max()))
    return logs


def _nan_means(values: dict[str, torch.Tensor], reduce_sum: Reduce) -> dict[str, float]:
    """Means over all ranks of the values that are not NaN."""
    sums = [value.double().nansum() for value in values.values()]
    counts = [value.isfinite().sum().double() for value in values.values()]
    totals = reduce_sum(torch.stack(sums + counts)).tolist()
    pairs = zip(totals[: len(values)], totals[len(values) :], strict=True)
    return {name: total / count if count else math.nan for name, (total, count) in zip(values, pairs, strict=True)}


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate without bias the chance that at least one of ``k`` samples passes.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al., "Evaluating Large Language Models Trained on Code",
    arXiv 2107.03374, eq. 1).
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a prompt and k >= 1, but there are {num_samples}.")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


class PassAtK(Metric):
    """The mean of :func:`pass_at_k` over prompts, on all ranks.

    Args:
        k: How many tries count as one.
    """

    total: torch.Tensor
    prompts: torch.Tensor

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("prompts", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, num_samples: int, num_passed: int) -> None:
        """Count one prompt."""
        self.total += pass_at_k(num_samples, num_passed, self.k)
        self.prompts += 1

    def compute(self) -> torch.Tensor:
        """Return the mean; NaN without prompts."""
        return self.total / self.prompts


class TokenMetrics:
    """Gathers what the optimizer steps on one batch did, over micro-batches and then over ranks.

    Means are over tokens, however they are split. ``sampling/*`` compares the trainer's log-probs with the
    generator's before the first step, when they should agree (see :func:`gap_metrics`).
    """

    def __init__(self) -> None:
        self.num_updates = 0
        self._sums: dict[str, torch.Tensor | float] = defaultdict(float)
        self._num_tokens = 0
        self._gap_sums: dict[str, torch.Tensor | float] = dict.fromkeys(
            gap_sums(torch.empty(0), torch.empty(0, dtype=torch.int64)), 0.0
        )
        self._max_gap = 0.0
        self._kl: tuple[float, float] | None = None
        self._update_values: dict[str, float] = defaultdict(float)

    def add_means(self, **values_N: torch.Tensor) -> None:
        """Add one micro-batch's metrics, each of shape N."""
        for name, values in values_N.items():
            self._sums[name] += values.sum()
        self._num_tokens += next(iter(values_N.values())).numel()

    def add_sums(self, **values: torch.Tensor) -> None:
        """Add values that sum up over the micro-batches and ranks of a step."""
        for name, value in values.items():
            self._sums[name] += value

    def add_kl(self, kl_N: torch.Tensor) -> None:
        """Add the KL from the reference of each token sampled on this rank, where it is part of the rewards."""
        self._kl = (float(kl_N.sum()), float(kl_N.numel()))

    def add_gap(self, difference_N: torch.Tensor, lengths_C: torch.Tensor) -> None:
        """Add trainer minus generator log-probs of one micro-batch, whose completions have these lengths."""
        for name, value in gap_sums(difference_N, lengths_C).items():
            self._gap_sums[name] += value
        if difference_N.numel():
            self._max_gap = max(self._max_gap, float(difference_N.abs().max()))

    def state(self) -> dict[str, Any]:
        """Return a copy of all counts, for :meth:`restore`."""
        return copy.deepcopy(vars(self))

    def restore(self, state: dict[str, Any]) -> None:
        """Forget what was added since ``state`` was taken."""
        vars(self).update(copy.deepcopy(state))

    def finish_update(self, **values: float) -> None:
        """Count an optimizer step, with values that are the same on every rank."""
        self.num_updates += 1
        for name, value in values.items():
            self._update_values[name] += value

    def compute(self, reduce_sum: Reduce, reduce_max: Reduce) -> dict[str, float]:
        """Return the metrics by name; the reductions run over ranks."""
        names = sorted(self._sums)
        local = [float(value) for value in (*(self._sums[name] for name in names), *self._gap_sums.values())]
        local += self._kl or (0.0, 0.0)
        *sums, kl, num_kl, num_tokens = reduce_sum(
            torch.tensor([*local, self._num_tokens], dtype=torch.float64)
        ).tolist()
        by_name = dict(zip([*names, *self._gap_sums], sums, strict=True))
        gap = {name: by_name.pop(name) for name in self._gap_sums}
        updates = max(self.num_updates, 1)
        logs = {name: total / updates for name, total in self._update_values.items()}
        logs["loss"] = by_name.pop("loss", 0.0) / updates
        logs |= gap_metrics(gap)
        logs["sampling/logprob_gap_max"] = float(reduce_max(torch.tensor(self._max_gap, dtype=torch.float64)))
        logs["update/tokens"] = num_tokens
        if self._kl is not None:
            logs["kl"] = kl / max(num_kl, 1.0)
        return logs | {name: total / max(num_tokens, 1.0) for name, total in by_name.items()}
