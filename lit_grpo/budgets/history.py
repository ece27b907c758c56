"""Results of earlier visits of each prompt: one memory for advantages, budgets and the choice of prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

EARLIER_VISITS = 0.5
"""What all earlier completions count, beside those of a new visit, in what a prompt's completions are now like."""
NUM_RECENT = 8
"""Visits whose outcomes are remembered one by one, where a rule of prompts does not ask for more."""
EASY, HARD = 0.98, 0.11
"""A visit is easy with a pass rate of at least the first, and hard with one of at most the second."""
SMALLEST = 1e-6
"""A deviation of less than this (relative to the mean, above 1) is rounding: such rewards are all equal."""


class LengthMoments(NamedTuple):
    """Number, mean and variance of the logs of completions' lengths, in tokens."""

    number: float = 0.0
    mean: float = 0.0
    variance: float = 0.0


class Outcome(NamedTuple):
    """Result of one visit of a prompt: the fraction that passed, and the version of the policy trained on it."""

    version: int
    pass_rate: float


NO_LENGTHS = LengthMoments()


@dataclass(frozen=True, slots=True)
class Visit:
    """Rewards and lengths of the completions of one visit of a prompt.

    Args:
        prompt_id: Id of the prompt.
        number: Number of the visit among those of the prompt.
        rewards: Rewards of all completions; NaN if no reward function applied.
        num_passed: Number of correct completions.
        num_tokens: Number of tokens of all completions together.
        version: Version of the policy that is trained on the visit.
        altered: Whether the prompt's text differed from that of its row.
    """

    prompt_id: str
    number: int
    rewards: Sequence[float]
    num_passed: int
    num_tokens: int
    version: int
    altered: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """Results of the visits of a prompt so far; a visit without a reward does not count.

    A visit whose prompt was altered shows nothing of the prompt itself, and changes nothing.

    Args:
        num_visits: Number of visits of the prompt so far.
        mean: Mean of all rewards; each visit has the same weight.
        deviation: Standard deviation of all rewards, within visits and between them.
        num_completions: Completions that were rewarded, the earlier visits' counting half at each new one.
        pass_rate: Share of these that passed.
        last_pass_rate: Fraction of the last visit's completions that passed.
        mean_tokens: Mean number of tokens per completion, including completions without a reward.
        num_easy: Visits in a row, the last one included, with a pass rate of at least ``EASY``.
        version: Version of the policy that was trained on the last visit.
        num_hard: Visits in a row, the last one included, with a pass rate of at most ``HARD``.
        recent: Outcomes of the last visits, the oldest first: of ``PromptHistory.num_recent``.
        lengths: Moments of the logs of completions' lengths. A completion that was cut off counts with its expected
            length; the earlier visits count half at each new one.
    """

    num_visits: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    num_completions: float = 0.0
    pass_rate: float = 0.0
    last_pass_rate: float = 0.0
    mean_tokens: float = 0.0
    num_easy: int = 0
    version: int = -1
    num_hard: int = 0
    recent: tuple[Outcome, ...] = ()
    lengths: LengthMoments = NO_LENGTHS

    def with_rewards(self, mean: float, deviation: float) -> Record:
        """Return it with a visit more, of rewards with this mean and deviation."""
        if not self.num_visits:
            return replace(self, num_visits=1, mean=mean, deviation=deviation)
        count = self.num_visits + 1
        between = self.num_visits / count * (mean - self.mean) ** 2
        variance = (self.num_visits * self.deviation**2 + deviation**2 + between) / count
        return replace(
            self,
            num_visits=count,
            mean=(self.num_visits * self.mean + mean) / count,
            deviation=math.sqrt(variance),
        )

    def after(self, visit: Visit, num_recent: int | None = NUM_RECENT) -> Record:
        """Return it with a visit more, and the outcomes of the last ``num_recent``, or of all."""
        rewards = [reward for reward in visit.rewards if math.isfinite(reward)]
        if visit.altered or not rewards:
            return self
        mean, deviation = moments(rewards)
        before = EARLIER_VISITS * self.num_completions
        total = before + len(rewards)
        outcome = Outcome(visit.version, visit.num_passed / len(rewards))
        return replace(
            self.with_rewards(mean, deviation),
            num_completions=total,
            pass_rate=(before * self.pass_rate + visit.num_passed) / total,
            last_pass_rate=outcome.pass_rate,
            mean_tokens=(before * self.mean_tokens + visit.num_tokens / len(visit.rewards) * len(rewards)) / total,
            num_easy=self.num_easy + 1 if outcome.pass_rate >= EASY else 0,
            version=visit.version,
            num_hard=self.num_hard + 1 if outcome.pass_rate <= HARD else 0,
            recent=(*self.recent, outcome)[0 if num_recent is None else -num_recent :],
        )


@dataclass(frozen=True)
class Tally:
    """Completions and rewards of a prompt in a rollout so far.

    Args:
        num_completions: Number of completions of the prompt.
        rewards: Rewards of the completions that have one.
    """

    num_completions: int
    rewards: Sequence[float]


NEW = Record()
Length = tuple[str, LengthMoments]
"""Those of a prompt, by its id."""


class PromptHistory:
    """Records of all prompts by id, the same on every rank.

    A visit counts for good once it is committed; until then it can be noted again.

    Attributes:
        records: Record of each prompt, by its id.
        num_recent: Of how many of a prompt's last visits outcomes are remembered one by one; None for all.
    """

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.num_recent: int | None = NUM_RECENT
        self._noted: dict[tuple[str, int], Visit] = {}
        self._lengths: list[Length] = []

    def __getitem__(self, prompt_id: str) -> Record:
        """Return what is known of a prompt: nothing of a new one."""
        return self.records.get(prompt_id, NEW)

    def expected(self, prompt_ids: Sequence[str]) -> list[Record]:
        """Return what is known of prompts; of new ones ``mean_tokens`` is that of all prompts."""
        known = [record.mean_tokens for record in self.records.values() if record.num_visits]
        mean = math.fsum(known) / max(len(known), 1)
        records = [self[prompt_id] for prompt_id in prompt_ids]
        return [record if record.num_visits else replace(record, mean_tokens=mean) for record in records]

    def lengths(self, prompt_ids: Sequence[str]) -> np.ndarray:
        """Return the :class:`LengthMoments` of prompts, shape (prompts, 3); zeros of those without a completion."""
        return np.array([self.records.get(prompt_id, NEW).lengths for prompt_id in prompt_ids]).reshape(-1, 3)

    def note(self, visits: Sequence[Visit]) -> None:
        """Take visits of this rank's prompts."""
        for visit in visits:
            self._noted[visit.prompt_id, visit.number] = visit

    def note_lengths(self, prompt_id: str, lengths: LengthMoments) -> None:
        """Take the lengths of completions of one of this rank's prompts, if there are any."""
        if lengths.number:
            self._lengths.append((prompt_id, lengths))

    def commit(self, gather: Callable[[list[Visit]], list[list[Visit]]] = lambda own: [own]) -> None:
        """Count what has been noted, on all ranks, in their order."""
        for visits in gather(list(self._noted.values())):
            for visit in visits:
                record = self.records.get(visit.prompt_id, NEW).after(visit, self.num_recent)
                if record is not NEW:
                    self.records[visit.prompt_id] = record
        self._noted = {}

    def commit_lengths(self, gather: Callable[[list[Length]], list[list[Length]]] = lambda own: [own]) -> None:
        """Count the lengths that have been noted, on all ranks, in their order."""
        for lengths in gather(self._lengths):
            for prompt_id, visit in lengths:
                record = self.records.get(prompt_id, NEW)
                before, number = record.lengths, visit.number + EARLIER_VISITS * record.lengths.number
                weight = visit.number / number
                mean = before.mean + (visit.mean - before.mean) * weight
                variance = before.variance + (visit.variance - before.variance) * weight
                self.records[prompt_id] = replace(record, lengths=LengthMoments(number, mean, variance))
        self._lengths = []

    def state_dict(self) -> dict[str, list[Any]]:
        """Return the state that a checkpoint needs, in plain types."""
        return {
            prompt_id: [*astuple(record)[:-2], [[*outcome] for outcome in record.recent], [*record.lengths]]
            for prompt_id, record in self.records.items()
        }

    def load_state_dict(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Go on from a checkpoint."""
        self.records = {
            prompt_id: Record(*values, recent=tuple(Outcome(*each) for each in recent), lengths=LengthMoments(*lengths))
            for prompt_id, (*values, recent, lengths) in state.items()
        }


def moments(rewards: Sequence[float]) -> tuple[float, float]:
    """Return mean and unbiased standard deviation; the latter is 0 of a single one."""
    mean = math.fsum(rewards) / len(rewards)
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / max(len(rewards) - 1, 1))


def is_flat(mean: float, deviation: float) -> bool:
    """Return whether rewards are all equal, but for rounding."""
    return deviation <= SMALLEST * max(abs(mean), 1.0)


def all_equal(rewards: Sequence[float]) -> bool:
    """Return whether rewards, at least one, are all equal, but for rounding."""
    return is_flat(*moments(rewards))
