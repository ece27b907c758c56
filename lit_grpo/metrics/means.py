"""Means over batches and ranks, and the estimate of pass@k."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from lit_grpo.ranks import Reduce


class Means:
    """Means of named numbers, over batches and then over ranks; NaN for a mean over nothing.

    They are kept in float64 on the host, whatever precision and device a run has. A number that is NaN is left out.

    Args:
        names: Names of all means; the same on every rank.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._totals: dict[str, tuple[float, int]] = dict.fromkeys(names, (0.0, 0))

    def add(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Count numbers, each of them alike."""
        for name, value in values.items():
            numbers, (total, count) = torch.as_tensor(value, dtype=torch.float64), self._totals[name]
            self._totals[name] = (total + float(numbers.nansum()), count + int(numbers.isfinite().sum()))

    def compute(self, reduce_sum: Reduce) -> dict[str, float]:
        """Return the means by name; the reduction runs over ranks."""
        totals = reduce_sum(torch.tensor(list(self._totals.values()), dtype=torch.float64)).tolist()
        pairs = zip(self._totals, totals, strict=True)
        return {name: total / count if count else math.nan for name, (total, count) in pairs}


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate without bias the chance that at least one of ``k`` samples passes.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al., "Evaluating Large Language Models Trained on Code",
    arXiv 2107.03374, eq. 1).
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a prompt and k >= 1, but there are {num_samples}.")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
