"""How many completions each prompt gets: divided beforehand by what is known of it, or in rounds by what has come."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lit_grpo.budgets.history import Record
from lit_grpo.settings import by_name, check_number

PASSED_BY_NOBODY = 0.5
"""Passes as which none of a first round counts in DARS."""
SMALLEST_PART = 1e-6
"""Of a completion or a token: less than this is rounding."""


def _check_whole(rule: Allocation, least: int, *names: str) -> None:
    """Check that fields are whole numbers, or, where they may be left out, None."""
    for name in names:
        if not (name in ("most", "budget", "tokens") and getattr(rule, name) is None):
            check_number(name, getattr(rule, name), least, int)


@dataclass(frozen=True)
class Allocation:
    """How many completions each prompt gets: here, ``num_generations``.

    A rule of your own is a dataclass that derives from it.
    """

    @property
    def has_rounds(self) -> bool:
        """Whether a prompt may get more once its first completions have been rewarded."""
        return False

    @property
    def goes_by_lengths(self) -> bool:
        """Whether it divides tokens, and needs to know how many a completion takes."""
        return False

    def check(self, num_prompts: int, num_generations: int) -> None:
        """Check that it goes with batches of so many prompts, and so many completions each on average.

        Raises:
            ValueError: It does not.
        """

    def first(self, records: Sequence[Record], num_generations: int, num_prompts: int | None = None) -> list[int]:
        """Return how many completions each of some prompts gets to begin with.

        Args:
            records: What is known of each prompt; ``mean_tokens`` of a new one is that of all prompts, where any is
                known, else 0.
            num_generations: ``model.num_generations``.
            num_prompts: Prompts of an update, on each rank, where a mode opens more or fewer of them; by default these.
        """
        return [num_generations] * len(records)

    def more(self, num_rewarded: int, num_passed: int, num_rounds: int, num_first: int) -> int:
        """Return how many more a prompt gets, all of which so far have been rewarded; 0 ends it.

        Args:
            num_rewarded: Completions with a reward.
            num_passed: Those of them that passed.
            num_rounds: Rounds that it has had, 1 or more.
            num_first: Completions of the first of them.
        """
        return 0


@dataclass(frozen=True)
class _Divided(Allocation):
    """A budget of completions or of tokens, divided by how often prompts have been passed.

    A prompt that nothing is known of, on its first visit, gets an equal share of the budget. A completion is expected
    to take as many tokens as its prompt's have taken of late, or, on the first visit, as those of all prompts. As long
    as no length is known, all get ``model.num_generations``.

    Args:
        budget: Completions of an update, on each rank; by default ``data.batch_size`` x ``model.num_generations``.
        tokens: Tokens of an update, on each rank, that the completions are expected to take, in place of ``budget``.
            Where they do not suffice, each prompt gets ``least``.
        least: The least that a prompt gets.
        most: The most that a prompt gets; by default what is left.
    """

    budget: int | None = None
    tokens: int | None = None
    least: int = 2
    most: int | None = None

    def __post_init__(self) -> None:
        _check_whole(self, 1, "least", "most", "budget", "tokens")
        if self.budget is not None and self.tokens is not None:
            raise ValueError(f"budget is {self.budget} completions and tokens is {self.tokens}; give one of them.")
        if self.least < 2:
            raise ValueError(f"least must be at least 2, not {self.least}: one completion shows no difference.")
        if self.most is not None and self.most < self.least:
            raise ValueError(f"most is {self.most}, which is less than least, {self.least}; give more.")

    @property
    def goes_by_lengths(self) -> bool:
        """Whether the budget is of tokens."""
        return self.tokens is not None

    def check(self, num_prompts: int, num_generations: int) -> None:
        """Refuse a budget that does not suffice."""
        name, unit, budget = "budget", "completions", self.budget or num_prompts * num_generations
        if self.tokens is not None:
            name, unit, budget = "tokens", "tokens", self.tokens
        if budget < self.least * num_prompts:
            raise ValueError(
                f"{name} is {budget} {unit} for {num_prompts} prompts, which is less than {self.least} each; give at "
                f"least {self.least * num_prompts}, or fewer prompts a batch."
            )

    def first(self, records: Sequence[Record], num_generations: int, num_prompts: int | None = None) -> list[int]:
        """Divide the budget, or such a part of it as these prompts are of an update's."""
        if not records:
            return []
        number, costs = len(records), np.array([record.mean_tokens for record in records])
        whole = self.tokens
        if whole is None or not costs.all():
            costs, whole = np.ones(number), self.budget or (num_prompts or number) * num_generations
        budget = whole * number // (num_prompts or number)
        most = self.most or max(int(budget / costs.min()), self.least)
        counts = np.array(proportional(np.ones(number), costs, budget, self.least, most))
        known = np.array([record.num_visits > 0 for record in records])
        rates, shared = np.array([record.pass_rate for record in records]), float(counts[known] @ costs[known])
        counts[known] = self.divided(rates[known], costs[known], shared, most)
        return counts.tolist()

    def divided(self, rates: np.ndarray, costs: np.ndarray, budget: float, most: int) -> list[int]:
        """Divide a budget over prompts that pass at these rates, of completions at these costs, both (prompts,)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Uniform(_Divided):
    """As many of each prompt: ``num_generations``, or as many as a budget allows."""

    def check(self, num_prompts: int, num_generations: int) -> None:
        """Refuse a budget that does not suffice."""
        if self.budget or self.tokens:
            super().check(num_prompts, num_generations)

    def first(self, records: Sequence[Record], num_generations: int, num_prompts: int | None = None) -> list[int]:
        """See above."""
        if self.budget or self.tokens:
            return super().first(records, num_generations, num_prompts)
        return [num_generations] * len(records)

    def divided(self, rates: np.ndarray, costs: np.ndarray, budget: float, most: int) -> list[int]:
        """See above."""
        return proportional(np.ones(len(rates)), costs, budget, self.least, most)


@dataclass(frozen=True)
class Knapsack(_Divided):
    """What mixed prompts need, divided by worth, and the rest for unsolved ones (Knapsack RL, arXiv 2509.25849).

    N completions of a prompt that passes at rate p are worth ``(1 - p^N - (1 - p)^N) p (1 - p)^2``: the chance that not
    all are alike, times what the policy learns then. It is concave in N, so giving one completion after another to
    whomever it is worth most is exact; of a budget of tokens, to whomever it is worth most a token, which falls short
    of the best division by less than one completion.

    Beyond ``least``, mixed prompts (0 < p < 1) share no more than they are taken to need:
    ``floor(ln(1 - alpha) / ln max(p, 1 - p))`` completions each, after which at least one differs from the likelier
    outcome with a chance of about ``alpha``. What that leaves goes to unsolved prompts (p = 0), evenly, up to ``most``,
    and what they leave again to mixed ones by worth and then to solved ones, evenly. The division and its ``alpha`` are
    those of the paper's code. One rule differs: where no prompt is unsolved, mixed ones get everything, while that code
    gives what they do not need to solved ones.

    Args:
        alpha: See above, in (0, 1).
    """

    alpha: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("alpha", self.alpha, 0, int | float)
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be in (0, 1), not {self.alpha}; the paper's code takes 0.9.")

    def divided(self, rates: np.ndarray, costs: np.ndarray, budget: float, most: int) -> list[int]:
        """See above."""
        counts = np.full(len(rates), self.least)
        mixed, unsolved = (rates > 0) & (rates < 1), rates == 0
        if unsolved.any():
            needs = np.log(1 - self.alpha) / np.log(np.maximum(rates, 1 - rates)[mixed])
            needed = float((self.least + np.floor(np.minimum(needs, most - self.least))) @ costs[mixed])
            for rows, limit in ((mixed, needed), (unsolved, math.inf)):
                shared = min(limit, budget - float(counts[~rows] @ costs[~rows]))
                counts[rows] = greedy(rates[rows].tolist(), shared, self.least, most, costs=costs[rows].tolist())
        return greedy(rates.tolist(), budget, counts.tolist(), most, costs=costs.tolist())


@dataclass(frozen=True)
class Proportional(_Divided):
    """In proportion to the variance of a prompt's rewards, ``p (1 - p)``, within ``least`` and ``most``."""

    def divided(self, rates: np.ndarray, costs: np.ndarray, budget: float, most: int) -> list[int]:
        """See above."""
        return proportional(rates * (1 - rates), costs, budget, self.least, most)


@dataclass(frozen=True)
class Buckets(Allocation):
    """As many completions as it takes to expect a pass, a power of two (sGPO, arXiv 2606.08854).

    It is the smallest power of 2 that is at least ``1 / p``, within ``least`` and ``most``; ``num_generations`` of a
    prompt that nothing is known of.
    """

    least: int = 2
    most: int = 8

    def __post_init__(self) -> None:
        _check_whole(self, 1, "least", "most")
        if not 2 <= self.least <= self.most:
            raise ValueError(f"least must be at least 2 and at most most, {self.most}, not {self.least}.")

    def first(self, records: Sequence[Record], num_generations: int, num_prompts: int | None = None) -> list[int]:
        """See above."""
        return [self._of(record.pass_rate) if record.num_visits else num_generations for record in records]

    def _of(self, rate: float) -> int:
        expected = math.inf if rate == 0 else 2.0 ** math.ceil(math.log2(1 / rate) - 1e-9)
        return int(min(max(expected, self.least), self.most))


@dataclass(frozen=True)
class HardMore(Allocation):
    """A second round for prompts that less than half have passed (DARS, arXiv 2508.13755).

    Of N completions in the first round a share p has passed, ``0.5 / N`` where none has; what the group teaches is
    ``S = 2 p (1 - p)`` a completion. A prompt gets as many more as lift ``(N + more) S`` to that of a prompt that half
    have passed, N / 2, (``equal``) or to ``2 (1 - p)`` times as much (``hardness``).

    Args:
        schedule: See above.
        most: The most completions of a prompt, both rounds together.
    """

    schedule: Literal["equal", "hardness"] = "equal"
    most: int = 32

    def __post_init__(self) -> None:
        _check_whole(self, 1, "most")
        if self.schedule not in ("equal", "hardness"):
            raise ValueError(f"schedule must be equal or hardness, not {self.schedule!r}.")

    @property
    def has_rounds(self) -> bool:
        """There are two."""
        return True

    def check(self, num_prompts: int, num_generations: int) -> None:
        """Refuse a first round that leaves none for a second."""
        if self.most <= num_generations:
            raise ValueError(
                f"most is {self.most}, and the first round has num_generations, {num_generations}, so there would be "
                "no second; give more."
            )

    def more(self, num_rewarded: int, num_passed: int, num_rounds: int, num_first: int) -> int:
        """See above."""
        rate = num_passed / num_rewarded
        if num_rounds > 1 or rate >= 0.5:
            return 0
        rate = rate or PASSED_BY_NOBODY / num_rewarded
        taught, peak = 2 * rate * (1 - rate), num_rewarded / 2
        wanted = peak if self.schedule == "equal" else 2 * (1 - rate) * peak
        return min(math.ceil((wanted - num_rewarded * taught) / taught - 1e-9), self.most - num_first)


@dataclass(frozen=True)
class Balanced(Allocation):
    """Rounds of ``num_generations`` until so many have passed and so many have not (Reinforce-Ada, arXiv 2510.04996).

    With ``model.selection`` max_variance and statistics of the group, a balanced few of them are learnt from, and their
    baseline is over all. Stopping at what one waits for biases the group's mean: docs/budgets.md says how far.

    Args:
        rounds: The most rounds of a prompt.
        passed: How many of a prompt's completions are to pass; Reinforce-Ada's *positive* form is 1, with 0 failed.
        failed: How many are not to.
    """

    rounds: int = 4
    passed: int = 2
    failed: int = 2

    def __post_init__(self) -> None:
        _check_whole(self, 1, "rounds")
        _check_whole(self, 0, "passed", "failed")
        if self.rounds < 2:
            raise ValueError(f"rounds must be at least 2, not {self.rounds}: with one there is nothing to wait for.")
        if not self.passed + self.failed:
            raise ValueError(
                f"passed is {self.passed} and failed is {self.failed}; give numbers that are to be reached."
            )

    @property
    def has_rounds(self) -> bool:
        """As many as ``rounds``."""
        return True

    def more(self, num_rewarded: int, num_passed: int, num_rounds: int, num_first: int) -> int:
        """See above."""
        decided = num_passed >= self.passed and num_rewarded - num_passed >= self.failed
        return 0 if decided or num_rounds >= self.rounds else num_first


ALLOCATIONS: dict[str, Allocation] = {
    "uniform": Uniform(),
    "knapsack": Knapsack(),
    "variance": Proportional(),
    "buckets": Buckets(),
    "dars_equal": HardMore("equal", most=32),
    "dars_hardness": HardMore("hardness", most=64),
    "balanced": Balanced(),
}
"""Rules by name: docs/budgets.md says where each comes from."""


def make_allocation(spec: str) -> Allocation:
    """Return a rule.

    Args:
        spec: A name of ``ALLOCATIONS``, or the class path of an :class:`Allocation`; behind a colon fields and their
            values, as in ``knapsack:budget=256,most=64``.

    Raises:
        ValueError: There is no such rule or field, or a value does not fit.
    """
    return by_name("rollout.allocation", spec, ALLOCATIONS, Allocation)


def knapsack_value(number: int, rate: float) -> float:
    """Return what so many completions are worth of a prompt that passes at ``rate``."""
    return (1 - rate**number - (1 - rate) ** number) * rate * (1 - rate) ** 2


def greedy(
    rates: Sequence[float],
    budget: float,
    least: int | Sequence[int],
    most: int,
    value: Callable[[int, float], float] = knapsack_value,
    costs: Sequence[float] | None = None,
) -> list[int]:
    """Divide a budget so that the sum of a concave ``value`` is largest; what is left buys no further completion.

    Args:
        rates: Of prompts.
        budget: What all completions may cost.
        least: The least of each, whatever it costs; a number for all, or one for each.
        most: The most of each.
        value: Of so many completions at a rate.
        costs: Of a completion of each prompt; by default 1.
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


def proportional(weights: np.ndarray, costs: np.ndarray, budget: float, least: int, most: int) -> list[int]:
    """Divide a budget so that counts are in proportion to weights, with the least and the most of each.

    The largest remainders are rounded up, as far as the budget goes. Where those with a weight have the most, the
    others share the rest.

    Args:
        weights: Of prompts, shape (prompts,).
        costs: Of a completion of each, likewise.
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
