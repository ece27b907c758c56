"""How much completions of one prompt have in common."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np


class Spread:
    """How much of the variance of a quantity lies between groups and how much within, as it was lately.

    Args:
        forgetting: The weight of all that is known, at each new batch.
    """

    def __init__(self, forgetting: float) -> None:
        self.forgetting = forgetting
        self.sums = np.zeros(4)  # squares within and their degrees of freedom, squared effects and their number

    def add(self, values: np.ndarray, groups: np.ndarray) -> None:
        """Take deviations from what was expected, shape (n,), and the number of the group of each (0, 1, ...)."""
        self.sums *= self.forgetting
        counts = np.bincount(groups)
        groups, counts = np.unique(groups, return_inverse=True)[1], counts[counts > 0]
        means = np.bincount(groups, values) / counts
        self.sums[:2] += np.square(values - means[groups]).sum(), len(values) - len(counts)
        self.sums[2:] += (np.square(means) - self.within / counts).sum(), len(counts)

    @property
    def within(self) -> float:
        """The variance within a group."""
        return float(self.sums[0] / self.sums[1]) if self.sums[1] else 1.0

    @property
    def between(self) -> float:
        """The variance of what the members of a group have in common."""
        return max(float(self.sums[2] / self.sums[3]), 0.0) if self.sums[3] else 1.0

    @property
    def pseudo_count(self) -> float:
        """How many members of a group weigh as much as what is known without them: within / between."""
        return float(np.clip(self.within / max(self.between, 1e-6), 1e-3, 1e6))


LAST_VISIT = 0.5  # the weight of all earlier visits, at each new one
VARIANCE_COUNT = 4  # completions as which the variance of all prompts counts in that of one
SMALLEST_SCALE, LARGEST_SCALE = 0.25, 2.0

Known = tuple[float, float, float]
"""Number of completions, and mean and variance of their log lengths, forgetting."""


class PromptHistory:
    """Mean and variance of the log lengths of each prompt's completions, the latest visit weighing most.

    Args:
        capacity: How many prompts are remembered; the one not seen for the longest time goes first.
        forgetting: The weight of older rollouts in the mean over all prompts.
    """

    def __init__(self, capacity: int, forgetting: float) -> None:
        self.capacity, self.forgetting = capacity, forgetting
        self.spread = Spread(forgetting)
        self._prompts: OrderedDict[str, Known] = OrderedDict()
        self._total = np.zeros(2)  # number of completions and sum of their log lengths, forgetting

    def __len__(self) -> int:
        """Return the number of prompts that are remembered."""
        return len(self._prompts)

    def columns(self, prompt_ids: Sequence[str]) -> np.ndarray:
        """Return what is known of each prompt, shape (n, 3).

        Returns:
            The shrunk mean of its log lengths, less that of all prompts; the weight that its own past has in
            this, from 0 to 1; and the error to be expected of it, rounded to half powers of 2.
        """
        known = np.array([self._prompts.get(prompt_id, (0.0, 0.0, 0.0)) for prompt_id in prompt_ids]).reshape(-1, 3)
        number, mean, variance = known.T
        weight = number / (number + self.spread.pseudo_count)
        within = (number * variance + VARIANCE_COUNT * self.spread.within) / (number + VARIANCE_COUNT)
        scale = np.sqrt(within + (1 - weight) * self.spread.between)
        scale = np.exp2(np.round(2 * np.log2(np.clip(scale, SMALLEST_SCALE, LARGEST_SCALE))) / 2)
        return np.column_stack([weight * (mean - self._mean), weight, scale])

    def learn(self, prompt_ids: Sequence[str], log_lengths: np.ndarray, groups: np.ndarray) -> None:
        """Take the log lengths, shape (n,), of a rollout; ``groups`` says which of ``prompt_ids`` each is of."""
        self._total = self.forgetting * self._total + (len(log_lengths), log_lengths.sum())
        if not self.capacity:
            return
        self.spread.add(log_lengths - self._mean, groups)
        sums = [np.bincount(groups, log_lengths**power, minlength=len(prompt_ids)).tolist() for power in range(3)]
        for prompt_id, count, total, squares in zip(prompt_ids, *sums, strict=True):
            if count:
                self._add(prompt_id, count, total / count, max(squares / count - (total / count) ** 2, 0.0))
        while len(self) > self.capacity:
            self._prompts.popitem(last=False)

    def _add(self, prompt_id: str, count: float, mean: float, variance: float) -> None:
        number, old_mean, old_variance = self._prompts.pop(prompt_id, (0.0, 0.0, 0.0))
        number *= LAST_VISIT
        share = count / (number + count)
        new_mean, new_variance = (
            share * new + (1 - share) * old for new, old in ((mean, old_mean), (variance, old_variance))
        )
        self._prompts[prompt_id] = (number + count, new_mean, new_variance)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain lists."""
        prompts = [[prompt_id, *known] for prompt_id, known in self._prompts.items()]
        return {"prompts": prompts, "total": self._total.tolist(), "spread": self.spread.sums.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        kept = state["prompts"][-self.capacity :] if self.capacity else []
        self._prompts = OrderedDict((prompt_id, tuple(known)) for prompt_id, *known in kept)
        self._total, self.spread.sums = np.array(state["total"]), np.array(state["spread"])

    @property
    def _mean(self) -> float:
        return float(self._total[1] / self._total[0]) if self._total[0] else 0.0
