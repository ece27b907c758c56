"""Metrics of validation, and of the tokens that an update has seen."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch
from torchmetrics import Metric


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

    Means are over tokens, however they are split. ``sampling/logprob_gap_*`` compares the trainer's log-probs
    with the generator's before the first step, when they should agree.
    """

    def __init__(self) -> None:
        self.num_updates = 0
        self._sums: dict[str, torch.Tensor | float] = defaultdict(float)
        self._num_tokens = 0
        self._num_gap_tokens = 0
        self._max_gap: torch.Tensor | float = 0.0
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

    def add_gap(self, difference_N: torch.Tensor) -> None:
        """Add trainer minus generator log-probs of one micro-batch."""
        if difference_N.numel():
            self._sums["gap"] += difference_N.abs().sum()
            self._max_gap = max(float(self._max_gap), float(difference_N.abs().max()))
            self._num_gap_tokens += difference_N.numel()

    def finish_update(self, **values: float) -> None:
        """Count an optimizer step, with values that are the same on every rank."""
        self.num_updates += 1
        for name, value in values.items():
            self._update_values[name] += value

    def compute(
        self, reduce_sum: Callable[[torch.Tensor], torch.Tensor], reduce_max: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, float]:
        """Return the metrics by name; the reductions run over ranks."""
        names = sorted(self._sums)
        counts = [float(self._num_tokens), float(self._num_gap_tokens)]
        local = torch.tensor([float(self._sums[name]) for name in names] + counts, dtype=torch.float64)
        *sums, num_tokens, num_gap_tokens = reduce_sum(local).tolist()
        by_name = dict(zip(names, sums, strict=True))
        updates = max(self.num_updates, 1)
        logs = {name: total / updates for name, total in self._update_values.items()}
        logs["loss"] = by_name.pop("loss", 0.0) / updates
        logs["sampling/logprob_gap_mean"] = by_name.pop("gap", 0.0) / max(num_gap_tokens, 1.0)
        logs["sampling/logprob_gap_max"] = float(reduce_max(torch.tensor(float(self._max_gap), dtype=torch.float64)))
        logs["update/tokens"] = num_tokens
        return logs | {name: total / max(num_tokens, 1.0) for name, total in by_name.items()}
