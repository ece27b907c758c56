"""XRPO (arXiv 2510.06672): completions where the mean reward is uncertain, and more weight for unlikely right answers.

``xrpo`` divides completions, ``novelty`` sharpens advantages; each works without the other. Formulas and the values 2.5
and 0.5 are those that summaries and reviews of the paper give; how many completions a phase has, and the weight of the
exploration bonus, are ours. The paper's seeding of unsolved prompts with solved examples is not here. Nothing was
compared with the paper's code (UIUC-MLSys/XRPO), which could not be had.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Annotated, ClassVar

from lit_grpo.budgets.allocation import AtLeastTwo
from lit_grpo.budgets.history import Record, Tally, moments
from lit_grpo.limits import Limit, NotNegative
from lit_grpo.plugins import Plugin
from lit_grpo.update.plugin import Batch


@dataclass
class UncertainMore(Plugin):
    """Phases of completions, divided by how much one more narrows what is known of a prompt (XRPO, arXiv 2510.06672).

    In the first phase each prompt gets ``base`` completions. What that leaves of ``num_generations`` for each prompt is
    shared evenly by the other phases. In those, one completion after another goes to the prompt with the largest

        ``h(n) - h(n + 1) + exploration sqrt(ln(1 + T) / n)`` with ``h(n) = t(confidence, n - 1) s / sqrt(n)``

    n are the prompt's completions so far, s the standard deviation of their rewards, T the completions of the whole
    batch when the phase begins. h is the half-width of the confidence interval of the mean reward, by Student's t. A
    prompt whose rewards are all equal has the second term alone. A phase begins once all of the one before have been
    rewarded, so that slots idle at its end. Each rank divides for its own prompts. With ``base`` at ``num_generations``
    or more every prompt gets ``num_generations``. For example::

        rollout:
          plugins:
            - xrpo: {base: 4, phases: 3}
    """

    phases: Annotated[int, Limit(ge=2, remedy="with one there is nothing to divide")] = 3
    """Number of phases; 3 in the paper."""
    base: AtLeastTwo | None = None
    """Completions of each prompt in the first phase; by default its part of ``num_generations``, 2 or more."""
    confidence: Annotated[float, Limit(gt=0, lt=1)] = 0.95
    """Level of the confidence interval."""
    exploration: NotNegative = 0.1
    """Weight of the second term."""

    def first_round(self, records: Sequence[Record], num_generations: int, num_prompts: int | None = None) -> list[int]:
        return [self._base(num_generations)] * len(records)

    def shared_round(self, tallies: Sequence[Tally], num_rounds: int, num_generations: int) -> list[int]:
        """Return the number of further completions of each prompt; all 0 end the rounds."""
        base, number = self._base(num_generations), len(tallies)
        if num_rounds >= self.phases:
            return [0] * number
        shared = number * (num_generations - base) * num_rounds // (self.phases - 1)
        so_far = sum(tally.num_completions for tally in tallies)
        counts = [len(tally.rewards) for tally in tallies]
        deviations = [moments(tally.rewards)[1] if tally.rewards else 0.0 for tally in tallies]

        def turn(row: int) -> tuple[float, int]:
            return -self.priority(counts[row], deviations[row], so_far), row

        waiting = [turn(row) for row in range(number)]
        heapq.heapify(waiting)
        for _ in range(number * base + shared - so_far):
            row = waiting[0][1]
            counts[row] += 1
            heapq.heapreplace(waiting, turn(row))
        return [count - len(tally.rewards) for count, tally in zip(counts, tallies, strict=True)]

    def priority(self, number: int, deviation: float, num_of_batch: int) -> float:
        """Return what one more completion of a prompt is worth; infinite of a prompt with less than two rewards.

        Args:
            number: Completions of the prompt so far.
            deviation: Standard deviation of the prompt's rewards so far.
            num_of_batch: Completions of the batch.
        """
        if number < 2:
            return math.inf
        narrowed = self.half_width(number, deviation) - self.half_width(number + 1, deviation)
        return narrowed + self.exploration * math.sqrt(math.log1p(num_of_batch) / number)

    def half_width(self, number: int, deviation: float) -> float:
        """Return the half-width of the confidence interval of a mean of so many rewards, two or more."""
        return student_quantile(number - 1, self.confidence) * deviation / math.sqrt(number)

    def _base(self, num_generations: int) -> int:
        return min(self.base or max(2, round(num_generations / self.phases)), num_generations)


@cache
def student_quantile(freedom: int, confidence: float) -> float:
    """Return the t with ``P(|X| < t) = confidence``, X of Student's distribution with ``freedom`` degrees, 1 or more.

    By bisection of the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4, in the angle ``arctan(t / sqrt(v))``.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """``P(|X| < tan(angle) sqrt(v))``."""
    odd, square = freedom % 2, math.cos(angle) ** 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for power in range(2 + odd, freedom - 1, 2):
        term *= square * (power - 1) / power
        total += term
    inside = math.sin(angle) * total
    return 2 / math.pi * (angle + inside) if odd else inside


@dataclass
class Novelty(Plugin):
    """More weight for right answers that the policy was unlikely to give (XRPO, arXiv 2510.06672).

    A rollout with an advantage ``A`` above 0, which with rewards of 0 and 1 is a right answer, is trained on with

        ``A + min(max(weight (1 - exp(s - mean s)), 0), most A)``

    s is the mean log-probability of the tokens that it sampled, as they were sampled, and ``mean s`` that of its group.
    So an answer that is less likely than the group's mean gains, by at most the share ``most``, and no other changes.
    With ``weight: 0`` it is GRPO. For example::

        rollout:
          plugins: [xrpo, {novelty: {weight: 1.0}}]
    """

    writes: ClassVar[frozenset[str]] = frozenset({"turn_advantage"})
    needs: ClassVar[frozenset[str]] = frozenset({"whole_groups"})

    weight: NotNegative = 2.5
    """Weight of the novelty in the advantage; 0 is GRPO."""
    most: NotNegative = 0.5
    """Max increase of an advantage, relative to it."""

    def on_batch(self, batch: Batch) -> None:
        for group in batch.groups:
            completions = [rollout.completion for rollout in group.rollouts]
            trained = [completion.logprobs_T[completion.trained_T].double() for completion in completions]
            scores = [float(logprobs_N.mean()) if len(logprobs_N) else math.nan for logprobs_N in trained]
            known = [score for score in scores if not math.isnan(score)]
            mean = fmean(known) if known else math.nan
            for rollout, score in zip(group.rollouts, scores, strict=True):
                value, likelier = rollout.advantage, score - mean
                if value > 0 and not math.isnan(likelier):
                    value += min(max(self.weight * (1 - math.exp(likelier)), 0.0), self.most * value)
                batch.set("turn_advantage", rollout, [value] * len(rollout.completion.turns))


PLUGINS = {"xrpo": UncertainMore(), "novelty": Novelty()}
