"""Further rounds of prompts, by what their completions have earned."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lit_grpo.budgets.allocation import Allocation, Replacement, Tally
from lit_grpo.budgets.foresight import Foresight
from lit_grpo.plugins import Answer, Listener
from lit_grpo.types import EMPTY, Completion, GroupKey, PassRule, Prompt, Request, Rollout, RolloutGroup

if TYPE_CHECKING:
    from lit_grpo.rewards import RewardRunner
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.scheduling.ledger import RequestLedger


PATIENCE = 8
"""Decode steps."""


class _Rounds:
    """What a prompt has come to.

    Args:
        first: Completions of the first round.
        request: One of them.

    Attributes:
        ends: How many completions it has had by the end of each round; those of the last one may still be decoded.
        asked: How many have been asked for: those of its rounds, and of the next one what is certain already.
        ended: By number, those that have ended.
        unscored: Those among them whose rewards nobody has asked for.
        rewarded: By number, those that have their rewards.
        gone: The numbers of those that have been left out of the group.
    """

    def __init__(self, first: int, request: Request) -> None:
        self._request = replace(request, prefix=EMPTY)
        self.ends = [first]
        self.asked = first
        self.ended: dict[int, Rollout] = {}
        self.unscored: list[Rollout] = []
        self.rewarded: dict[int, Rollout] = {}
        self.gone: set[int] = set()

    @property
    def first(self) -> int:
        """Completions of the first round."""
        return self.ends[0]

    @property
    def members(self) -> list[Rollout]:
        """Those of its rounds so far that have their rewards."""
        return [rollout for number, rollout in self.rewarded.items() if number < self.ends[-1]]

    @property
    def is_over(self) -> bool:
        """Whether all of its rounds have ended."""
        return self.num_in_rounds(self.ended) == self.ends[-1]

    @property
    def num_left(self) -> int:
        """Completions of its rounds so far whose rewards are to come."""
        return self.ends[-1] - self.num_in_rounds(self.rewarded)

    @property
    def has_all(self) -> bool:
        """Whether all that have been asked for have their rewards."""
        return len(self.rewarded.keys() | self.gone) == self.asked

    def num_in_rounds(self, numbers: Iterable[int]) -> int:
        """Return how many of its rounds so far are among these numbers or left out."""
        return sum(number < self.ends[-1] for number in self.gone.union(numbers))

    def end(self, completion: Completion) -> None:
        """Note that one of them has ended."""
        rollout = self.ended[completion.request.path[0]] = Rollout(completion.request.prompt, completion)
        self.unscored.append(rollout)

    def take_unscored(self) -> RolloutGroup:
        """Return those that are to be scored, in their order."""
        rollouts, self.unscored = sorted(self.unscored, key=lambda each: each.completion.request.path), []
        return RolloutGroup(rollouts[0].prompt, rollouts)

    def requests(self, numbers: Iterable[int]) -> list[Request]:
        """Return requests of further completions."""
        return [replace(self._request, path=(number,)) for number in numbers]


class Rounds(Listener):
    """Scores a prompt's completions, and asks for another round as an allocation says.

    A round is scored when it is whole, and a further one asked ``PATIENCE`` steps later, in which rewards have time to
    come; those that have not are waited for, so that a run can be repeated to the last bit. Where slots are free, what
    has ended of a round is scored before the rest has, and as many completions of the next one are asked for as there
    will be in any case (:class:`lit_grpo.budgets.foresight.Foresight`): a long completion then holds up nothing that
    it cannot change, and what is sampled stays the same. Not so where a reward function scores whole groups, or is
    async, as what asks a server is: it scores whole rounds. An allocation that compares prompts is asked once all of
    them have been rewarded and nothing is left to decode.

    Where a group has had all its rounds and is flat, another prompt is asked in its place, as long as there are any
    (DAPO's dynamic sampling, arXiv 2503.14476). Other groups are decoded meanwhile. What a group gets depends on its
    own rewards alone, and each flat group takes the next prompt.

    Args:
        runner: Scores.
        allocation: Says how many more a prompt gets.
        pass_rule: When a completion counts as passed.
        replacements: Prompts that may be asked in place of flat groups, in their order.
        foresees: Whether a round may begin before the last one is whole.
        num_generations: ``model.num_generations``, which an allocation that compares prompts goes by.
        replacement: Says which groups are flat.
    """

    def __init__(
        self,
        runner: RewardRunner,
        allocation: Allocation,
        pass_rule: PassRule,
        replacements: Iterator[Prompt] | None = None,
        foresees: bool = True,
        num_generations: int = 0,
        replacement: Replacement | None = None,
    ) -> None:
        self._runner, self._foresight, self._pass_rule = runner, Foresight(allocation), pass_rule
        self._allocation, self._num_generations = allocation, num_generations
        waits = any(each.on_group or each.is_async for each in runner.functions)
        self._foresees = foresees and allocation.has_rounds and not waits and not allocation.compares
        self._replacement = replacement or Replacement()
        self._replacements = iter(()) if replacements is None else replacements
        self._clear()

    @property
    def flat(self) -> set[GroupKey]:
        """The groups that are to be replaced, once they have had all their rounds."""
        return {key for key in self._rounds if self._is_flat(key)}

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        self._clear()

    def on_requests(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Note how many the first rounds of new prompts have."""
        new = defaultdict[GroupKey, list[Request]](list)
        for request in requests:
            if request.group not in self._rounds:
                new[request.group].append(request)
        self._rounds |= {key: _Rounds(len(first), first[0]) for key, first in new.items()}
        return ()

    def on_completion(self, completion: Completion) -> None:
        self._rounds[completion.request.group].end(completion)

    def on_drop(self, request: Request) -> None:
        """Wait for it no longer: the others may be all of a round."""
        self._rounds[request.group].gone.add(request.path[0])
        self._lessened.append(request.group)

    def on_group(self, group: RolloutGroup) -> None:
        self._whole.append(group)

    def on_step(self, events: StepEvents) -> Answer | None:
        """Score what has ended, and decide of those that have been scored for long enough."""
        self._score(early=self._foresees and self._step % PATIENCE == 0)
        self._step += 1
        patience = math.inf if self._allocation.compares else PATIENCE
        due = [part for part, since in self._scored if self._step - since > patience]
        return self._decide(due) if due or self._lessened else None

    def on_idle(self) -> Answer | None:
        self._score()
        return self._decide([part for part, _ in self._scored])

    def on_rollout_end(self, failed: bool) -> None:
        """Give the groups their rewards; drop what is being scored, where the rollout has failed."""
        if failed:
            self._runner.close()
            return
        for group in self._whole:
            for rollout in group.rollouts:
                scored = self._rounds[group.key].ended[rollout.completion.request.path[0]]
                rollout.rewards, rollout.reward, rollout.extra = scored.rewards, scored.reward, scored.extra

    def metrics(self) -> dict[str, float]:
        """Return the completions of further rounds, and the share of groups whose first rewards were all equal."""
        by_reward = Replacement(metric="reward")
        first = [
            by_reward.is_flat([each for number, each in rounds.ended.items() if number < rounds.first], self._pass_rule)
            for rounds in self._rounds.values()
        ]
        extra = sum(number >= rounds.first for rounds in self._rounds.values() for number in rounds.ended)
        return {
            "budget/further_completions": float(extra),
            "budget/frac_flat_first": sum(first) / len(first) if first else math.nan,
        }

    def _score(self, early: bool = False) -> None:
        """Begin to score rounds that are whole, and, if it is ``early``, what has ended of the others."""
        parts = [each.take_unscored() for each in self._rounds.values() if each.unscored and (early or each.is_over)]
        if parts:
            self._runner.submit(*parts)
            self._scored += [(part, self._step) for part in parts]

    def _decide(self, parts: Sequence[RolloutGroup]) -> Answer:
        self._runner.gather(parts)
        del self._scored[: len(parts)]
        for part in parts:
            rewarded = self._rounds[part.key].rewarded
            rewarded |= {rollout.completion.request.path[0]: rollout for rollout in part.rollouts}
        keys, self._lessened = list(dict.fromkeys([*(part.key for part in parts), *self._lessened])), []
        if self._allocation.compares:
            numbers = self._ask_together() if parts else {}
            keys = [] if any(numbers.values()) or not parts else [*self._rounds]
        else:
            numbers = {key: self._ask(self._rounds[key]) for key in keys}
        submit = [request for key in numbers for request in self._rounds[key].requests(numbers[key])]
        opened = [request for key in keys if self._is_to_replace(key) for request in self._instead(key)]
        return Answer(submit=submit, open=opened)

    def _ask(self, rounds: _Rounds) -> range:
        """Count what a prompt gets beyond what it has been asked for; return the numbers of those completions."""
        before = rounds.asked
        while True:
            members = [each for each in rounds.members if not math.isnan(each.reward)]
            num_passed = sum(self._pass_rule.passes(each.rewards) for each in members)
            left = rounds.num_left
            more = self._foresight.least(len(members), num_passed, left, len(rounds.ends), rounds.first)
            rounds.asked = rounds.ends[-1] + more
            if left or not more:
                return range(before, rounds.asked)
            rounds.ends.append(rounds.asked)

    def _ask_together(self) -> dict[GroupKey, range]:
        """Count what all prompts get by comparison; return the numbers of those completions by group."""
        self._num_compared += 1
        groups = dict(sorted(self._rounds.items()))
        tallies = [
            Tally(rounds.asked, [each.reward for each in rounds.members if not math.isnan(each.reward)])
            for rounds in groups.values()
        ]
        counts = self._allocation.divide(tallies, self._num_compared, self._num_generations)
        numbers: dict[GroupKey, range] = {}
        for (key, rounds), count in zip(groups.items(), counts, strict=True):
            numbers[key] = range(rounds.asked, rounds.asked + count)
            rounds.asked += count
            rounds.ends += [rounds.asked] if count else []
        return numbers

    def _is_flat(self, key: GroupKey) -> bool:
        return self._replacement.is_flat(self._rounds[key].ended.values(), self._pass_rule)

    def _is_to_replace(self, key: GroupKey) -> bool:
        """Whether a group has had all its rounds and is flat, and has not been replaced yet."""
        return self._rounds[key].has_all and key not in self._replaced and self._is_flat(key)

    def _instead(self, key: GroupKey) -> list[Request]:
        """The requests of another prompt's first round, where there is one."""
        prompt, rounds = next(self._replacements, None), self._rounds[key]
        self._replaced.add(key)
        requests = rounds.requests(range(rounds.first))
        return [] if prompt is None else [replace(request, prompt=prompt) for request in requests]

    def _clear(self) -> None:
        self._rounds: dict[GroupKey, _Rounds] = {}
        self._whole: list[RolloutGroup] = []
        self._scored: list[tuple[RolloutGroup, int]] = []  # what waits for its rewards, and since which step
        self._replaced: set[GroupKey] = set()
        self._lessened: list[GroupKey] = []  # by a completion that has been left out since the last decision
        self._step = self._num_compared = 0
