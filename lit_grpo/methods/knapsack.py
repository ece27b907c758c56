"""Knapsack RL (arXiv 2509.25849): completions go where they are worth most, and to prompts that nobody passes yet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from lit_grpo.budgets.allocation import greedy
from lit_grpo.limits import Limit
from lit_grpo.methods.shared.division import Divided


@dataclass
class Knapsack(Divided):
    """Completions by worth for mixed prompts, and the rest for unsolved ones (Knapsack RL, arXiv 2509.25849).

    N completions of a prompt that passes at rate p are worth ``(1 - p^N - (1 - p)^N) p (1 - p)^2``: the chance that not
    all are alike, times what the policy learns then. It is concave in N, so giving one completion after another to
    whomever it is worth most is exact; of a budget of tokens, to whomever it is worth most a token, which falls short
    of the best division by less than one completion.

    Beyond ``least``, mixed prompts (0 < p < 1) share no more than they are taken to need:
    ``floor(ln(1 - alpha) / ln max(p, 1 - p))`` completions each, after which at least one differs from the likelier
    outcome with a chance of about ``alpha``. What that leaves goes to unsolved prompts (p = 0), evenly, up to ``most``,
    and what they leave again to mixed ones by worth and then to solved ones, evenly. The division and its ``alpha`` are
    those of the paper's code (liziniu/KnapsackRL at ca5d5f5). Two rules differ: where no prompt is unsolved, mixed ones
    get everything, while that code gives what they do not need to solved ones; and that code counts the worth of a
    mixed prompt that stays at ``least`` as 0.
    """

    alpha: Annotated[float, Limit(gt=0, lt=1, remedy="the paper's code takes 0.9")] = 0.9
    """Chance, between 0 and 1, that the completions which a mixed prompt is taken to need differ in outcome."""

    def divided(self, rates: np.ndarray, costs: np.ndarray, budget: float, most: int) -> list[int]:
        counts = np.full(len(rates), self.least)
        mixed, unsolved = (rates > 0) & (rates < 1), rates == 0
        if unsolved.any():
            needs = np.log(1 - self.alpha) / np.log(np.maximum(rates, 1 - rates)[mixed])
            needed = float((self.least + np.floor(np.minimum(needs, most - self.least))) @ costs[mixed])
            for rows, limit in ((mixed, needed), (unsolved, math.inf)):
                shared = min(limit, budget - float(counts[~rows] @ costs[~rows]))
                counts[rows] = greedy(
                    rates[rows].tolist(), shared, self.least, most, knapsack_value, costs=costs[rows].tolist()
                )
        return greedy(rates.tolist(), budget, counts.tolist(), most, knapsack_value, costs=costs.tolist())


def knapsack_value(number: int, rate: float) -> float:
    """Return what so many completions are worth of a prompt that passes at ``rate``."""
    return (1 - rate**number - (1 - rate) ** number) * rate * (1 - rate) ** 2


PLUGINS = {"knapsack": Knapsack()}
