"""Number of completions of each prompt: divided beforehand by its history, or in rounds by the rewards so far."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import numpy as np

from lit_grpo.budgets.history import all_equal
from lit_grpo.limits import Count, Limit
from lit_grpo.plugins import Plugin
from lit_grpo.types import PassRule, Rollout

SMALLEST_PART = 1e-6
"""Of a completion or a token: less than this is rounding."""


AtLeastTwo = Annotated[int, Limit(ge=2, remedy="one completion shows no difference")]
"""A number of completions that can be compared."""


@final
@dataclass
class Replacement(Plugin):
    """Number of further prompts that are asked in place of zero-variance groups.

    A group that is flat after its last round is left out of the update, and another prompt is asked in the same
    rollout, as long as there are any.
    """

    role: ClassVar[str] = "what is asked in place of groups without signal"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_rollouts", "separate_completions", "prompt_stream"})

    most: Count = 32
    """Max further prompts per batch."""
    metric: Literal["passed", "reward"] = "passed"
    """Value that has to differ within a group: ``passed``, by ``model.pass_reward`` and ``model.pass_threshold``
    (verl's ``acc``), or the whole ``reward`` (verl's ``seq_reward``).
    """

    def is_flat(self, rollouts: Iterable[Rollout], pass_rule: PassRule) -> bool:
        """Return whether completions are alike by ``metric``; those without a reward do not count."""
        rewarded = [rollout for rollout in rollouts if not math.isnan(rollout.reward)]
        if self.metric == "passed":
            return len({pass_rule.passes(rollout.rewards) for rollout in rewarded}) < 2
        return not rewarded or all_equal([rollout.reward for rollout in rewarded])


def proportional(weights: np.ndarray, costs: np.ndarray, budget: float, least: int, most: int) -> list[int]:
    """Divide a budget so that counts are in proportion to weights, with the least and the most of each.

    The largest remainders are rounded up, as far as the budget goes. Where those with a weight have the most, the
    others share the rest.

    Args:
        weights: Weight of each prompt, shape (prompts,).
        costs: Cost of a completion of each prompt, shape (prompts,).
        budget: What all completions may cost.
        least: The least of each, whatever it costs.
        most: The most of each.
    """
    number = len(weights)
    if not number:
        return []
    weights = weights + 1e-9 * max(float(weights.max()), 1.0)
    low, high = 0.0, most / float(weights.min())
    for _ in range(200):
        middle = (low + high) / 2
        spent = np.clip(middle * weights, least, most) @ costs
        low, high = (low, middle) if spent > budget else (middle, high)
    shares = np.clip(low * weights, least, most)
    counts = np.floor(shares + SMALLEST_PART).astype(int)
    left = budget - counts @ costs
    for row in np.argsort(-(shares - counts), kind="stable").tolist():
        if counts[row] < most and costs[row] <= left + SMALLEST_PART:
            counts[row] += 1
            left -= costs[row]
    return counts.tolist()


def greedy(
    rates: Sequence[float],
    budget: float,
    least: int | Sequence[int],
    most: int,
    value: Callable[[int, float], float],
    costs: Sequence[float] | None = None,
) -> list[int]:
    """Divide a budget so that the sum of a concave ``value`` is largest; what is left buys no further completion.

    Args:
        rates: The number of each prompt that ``value`` depends on, such as its pass rate.
        budget: What all completions may cost.
        least: The least of each, whatever it costs; a number for all, or one for each.
        most: The most of each.
        value: Function of a number of completions and a rate: what they are worth together.
        costs: Cost of a completion of each prompt; by default 1.
    """
    counts = [least] * len(rates) if isinstance(least, int) else list(least)
    costs = [1.0] * len(rates) if costs is None else costs

    def turn(row: int) -> tuple[float, bool, int, int]:
        rate, number = rates[row], counts[row]
        return ((value(number, rate) - value(number + 1, rate)) / costs[row], rate > 0, number, row)

    waiting = [turn(row) for row in range(len(rates)) if counts[row] < most]
    heapq.heapify(waiting)
    left = budget - sum(count * cost for count, cost in zip(counts, costs, strict=True))
    while waiting:
        row = heapq.heappop(waiting)[-1]
        if costs[row] > left + SMALLEST_PART:
            continue  # what costs less may still fit
        counts[row] += 1
        left -= costs[row]
        if counts[row] < most:
            heapq.heappush(waiting, turn(row))
    return counts
