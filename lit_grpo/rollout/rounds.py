"""Further rounds of prompts, by what their completions have earned."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lit_grpo.budgets.allocation import Replacement
from lit_grpo.budgets.foresight import Foresight
from lit_grpo.budgets.history import Tally
from lit_grpo.plugins import ROUNDS, Answer, CoreListener, Plugin, ask, overriding
from lit_grpo.types import (
    EMPTY,
    AllGather,
    Completion,
    GroupKey,
    Part,
    PassRule,
    Prompt,
    Request,
    Rollout,
    RolloutGroup,
    alone,
    over_ranks,
)

if TYPE_CHECKING:
    from lit_grpo.rewards import RewardRunner
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.scheduling.ledger import RequestLedger


PATIENCE = 8
"""Decode steps."""


class PromptTally:
    """State of a prompt: its completions of each round, and those of them that have rewards.

    Args:
        first: How many completions the first round has.
        request: One of their requests.

    Attributes:
        ends: How many completions it has had by the end of each round; those of the last one may still be decoded.
        asked: How many have been asked for: those of its rounds, and of the next one what is certain already.
        ended: By number, those that have ended.
        unscored: Those among them whose rewards nobody has asked for.
        rewarded: By number, those that have their rewards.
        gone: The numbers of those that have been left out of the group.
        is_replaced: Whether another prompt has been asked in its place.
    """

    def __init__(self, first: int, request: Request) -> None:
        self._request = replace(request, prefix=EMPTY)
        self.ends = [first]
        self.asked = first
        self.ended: dict[int, Rollout] = {}
        self.unscored: list[Rollout] = []
        self.rewarded: dict[int, Rollout] = {}
        self.gone: set[int] = set()
        self.is_replaced = False

    def end(self, completion: Completion) -> None:
        """Note that one of them has ended."""
        rollout = self.ended[completion.request.path[0]] = Rollout(completion.request.prompt, completion)
        self.unscored.append(rollout)

    def num_left(self, numbers: Iterable[int]) -> int:
        """Return how many of its rounds so far are neither among these numbers nor left out."""
        return self.ends[-1] - sum(number < self.ends[-1] for number in self.gone.union(numbers))

    @property
    def members(self) -> list[Rollout]:
        """Those of its rounds so far that have a reward."""
        in_rounds = (rollout for number, rollout in self.rewarded.items() if number < self.ends[-1])
        return [rollout for rollout in in_rounds if not math.isnan(rollout.reward)]

    def requests(self, numbers: Iterable[int]) -> list[Request]:
        """Return requests of further completions."""
        return [replace(self._request, path=(number,)) for number in numbers]


class RoundScheduler(CoreListener):
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
        runner: Runner of the reward functions, which scores the groups.
        allocation: The plug-in that says how many more a prompt gets.
        pass_rule: When a completion counts as passed.
        replacements: Prompts that may be asked in place of flat groups, in their order.
        foresees: Whether a round may begin before the last one is whole.
        num_generations: ``model.num_generations``, which an allocation that compares prompts goes by.
        replacement: Says which groups are flat.
    """

    def __init__(
        self,
        runner: RewardRunner,
        allocation: Plugin,
        pass_rule: PassRule,
        replacements: Iterator[Prompt] | None = None,
        foresees: bool = True,
        num_generations: int = 0,
        replacement: Replacement | None = None,
    ) -> None:
        self._runner, self._foresight, self._pass_rule = runner, Foresight(allocation), pass_rule
        self._allocation, self._num_generations = allocation, num_generations
        waits = any(each.on_group or each.is_async for each in runner.functions)
        self._compares = bool(overriding([allocation], "shared_round"))
        self._foresees = foresees and bool(overriding([allocation], *ROUNDS)) and not waits and not self._compares
        self._replacement = replacement or Replacement()
        self._replacements = iter(()) if replacements is None else replacements
        self._clear()

    @property
    def flat(self) -> set[GroupKey]:
        tallies = self._tallies.items()
        return {key for key, each in tallies if self._replacement.is_flat(each.ended.values(), self._pass_rule)}

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        self._clear()

    def on_requests(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Note how many the first rounds of new prompts have."""
        new = defaultdict[GroupKey, list[Request]](list)
        for request in requests:
            if request.group not in self._tallies:
                new[request.group].append(request)
        self._tallies |= {key: PromptTally(len(first), first[0]) for key, first in new.items()}
        return ()

    def on_completion(self, completion: Completion) -> None:
        self._tallies[completion.request.group].end(completion)

    def on_drop(self, request: Request) -> None:
        """Wait for it no longer: the others may be all of a round."""
        self._tallies[request.group].gone.add(request.path[0])
        self._lessened.append(request.group)

    def on_group(self, group: RolloutGroup) -> None:
        self._whole.append(group)

    def on_step(self, events: StepEvents) -> Answer | None:
        """Score what has ended, and decide of those that have been scored for long enough."""
        self._score(early=self._foresees and self._step % PATIENCE == 0)
        self._step += 1
        patience = math.inf if self._compares else PATIENCE
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
                scored = self._tallies[group.key].ended[rollout.completion.request.path[0]]
                rollout.rewards, rollout.reward, rollout.extra = scored.rewards, scored.reward, scored.extra

    def metrics(self, all_gather: AllGather = alone) -> dict[str, float]:
        """Return the completions of further rounds, and the share of groups whose first rewards were all equal.

        They are those of all ranks, which call it together, or of this rank alone by default.
        """
        by_reward = Replacement(metric="reward")
        first: list[bool] = []
        extra = 0
        for tally in self._tallies.values():
            of_first = [rollout for number, rollout in tally.ended.items() if number < tally.ends[0]]
            first.append(by_reward.is_flat(of_first, self._pass_rule))
            extra += len(tally.ended) - len(of_first)
        parts = {
            "budget/further_completions": Part(extra),
            "budget/frac_flat_first": Part(sum(first), "mean", len(first)),
        }
        return over_ranks(parts, all_gather)

    def _score(self, early: bool = False) -> None:
        """Begin to score rounds that are whole, and, if it is ``early``, what has ended of the others."""
        parts: list[RolloutGroup] = []
        for tally in self._tallies.values():
            if tally.unscored and (early or not tally.num_left(tally.ended)):
                rollouts, tally.unscored = sorted(tally.unscored, key=lambda each: each.completion.request.path), []
                parts.append(RolloutGroup(rollouts[0].prompt, rollouts))
        if parts:
            self._runner.submit(*parts)
            self._scored += [(part, self._step) for part in parts]

    def _decide(self, parts: Sequence[RolloutGroup]) -> Answer:
        self._runner.gather(parts)
        del self._scored[: len(parts)]
        for part in parts:
            rewarded = self._tallies[part.key].rewarded
            rewarded |= {rollout.completion.request.path[0]: rollout for rollout in part.rollouts}
        keys, self._lessened = list(dict.fromkeys([*(part.key for part in parts), *self._lessened])), []
        if self._compares:
            numbers = self._ask_together() if parts else {}
            keys = [] if any(numbers.values()) or not parts else [*self._tallies]
        else:
            numbers = {key: self._ask(self._tallies[key]) for key in keys}
        submit = [request for key in numbers for request in self._tallies[key].requests(numbers[key])]
        opened: list[Request] = []
        for tally in (self._tallies[key] for key in keys):
            has_all = len(tally.rewarded.keys() | tally.gone) == tally.asked
            if has_all and not tally.is_replaced and self._replacement.is_flat(tally.ended.values(), self._pass_rule):
                tally.is_replaced = True
                if (prompt := next(self._replacements, None)) is not None:
                    opened += [replace(each, prompt=prompt) for each in tally.requests(range(tally.ends[0]))]
        return Answer(submit=submit, open=opened)

    def _ask(self, tally: PromptTally) -> range:
        """Count what a prompt gets beyond what it has been asked for; return the numbers of those completions."""
        before = tally.asked
        while True:
            members, left = tally.members, tally.num_left(tally.rewarded)
            num_passed = sum(self._pass_rule.passes(each.rewards) for each in members)
            more = self._foresight.least(len(members), num_passed, left, len(tally.ends), tally.ends[0])
            tally.asked = tally.ends[-1] + more
            if left or not more:
                return range(before, tally.asked)
            tally.ends.append(tally.asked)

    def _ask_together(self) -> dict[GroupKey, range]:
        """Count what all prompts get by comparison; return the numbers of those completions by group."""
        self._num_compared += 1
        groups = dict(sorted(self._tallies.items()))
        tallies = [Tally(each.asked, [member.reward for member in each.members]) for each in groups.values()]
        counts = ask(self._allocation, "shared_round", tallies, self._num_compared, self._num_generations)
        numbers: dict[GroupKey, range] = {}
        for (key, tally), count in zip(groups.items(), counts, strict=True):
            numbers[key] = range(tally.asked, tally.asked + count)
            tally.asked += count
            tally.ends += [tally.asked] if count else []
        return numbers

    def _clear(self) -> None:
        self._tallies: dict[GroupKey, PromptTally] = {}
        self._whole: list[RolloutGroup] = []
        self._scored: list[tuple[RolloutGroup, int]] = []  # what waits for its rewards, and since which step
        self._lessened: list[GroupKey] = []  # by a completion that has been left out since the last decision
        self._step = self._num_compared = 0
