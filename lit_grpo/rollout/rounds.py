"""A budget of completions in a rollout: groups of their own sizes, and further rounds by what the first have earned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lit_grpo.budgets.allocation import Allocation, make_allocation
from lit_grpo.budgets.history import PromptHistory, is_flat, moments
from lit_grpo.budgets.prompts import PromptChooser
from lit_grpo.rollout.listeners import Answer, Listener, Rewarding
from lit_grpo.rollout.rules import RolloutMode
from lit_grpo.types import GroupKey, Prompt, Request, Rollout, RolloutGroup

if TYPE_CHECKING:
    from lit_grpo.ranks import Ranks
    from lit_grpo.rewards import RewardRunner
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.scheduling.flight import Flight


@dataclass
class _Rounds:
    """What a prompt has come to, and in how many rounds, the first of which had ``first`` completions."""

    first: int
    rollouts: list[Rollout] = field(default_factory=list)
    num_rounds: int = 0


class Rounds(Listener):
    """Scores each round of a group as soon as it is whole, and asks for another as an allocation says.

    Other groups are decoded meanwhile. What a group gets depends on its own rewards alone, so the rollout's completions
    are the same however long rewards take.

    Args:
        runner: Scores.
        allocation: Says how many more a prompt gets.
        pass_threshold: What the first reward of a completion has to reach for it to count as passed.
    """

    def __init__(self, runner: RewardRunner, allocation: Allocation, pass_threshold: float) -> None:
        self._runner, self._allocation, self._threshold = runner, allocation, pass_threshold
        self._clear()

    def begin(self, flight: Flight) -> None:
        """Begin with no group."""
        self._clear()

    def whole(self, group: RolloutGroup) -> None:
        """Begin to score a round."""
        self._runner.submit(group)
        self._scored[group.key] = group
        rounds = self._rounds.setdefault(group.key, _Rounds(len(group.rollouts)))
        rounds.rollouts += group.rollouts
        rounds.num_rounds += 1

    def step(self, events: StepEvents) -> Answer | None:
        """Decide of those whose rewards have come."""
        done = [group for group in self._scored.values() if self._runner.is_done(group)]
        return self._decide(done) if done else None

    def idle(self) -> Answer | None:
        """Wait for the rewards of all, and decide."""
        return self._decide(list(self._scored.values()))

    def end(self, failed: bool) -> None:
        """Drop what is being scored, where the rollout has failed; else all has been."""
        if failed:
            self._runner.close()

    def metrics(self) -> dict[str, float]:
        """Return how many completions further rounds brought, and the share of groups that were flat without them."""
        first = [_is_flat(rounds.rollouts[: rounds.first]) for rounds in self._rounds.values()]
        extra = sum(len(rounds.rollouts) - rounds.first for rounds in self._rounds.values())
        return {
            "budget/further_completions": float(extra),
            "budget/frac_flat_first": sum(first) / len(first) if first else math.nan,
        }

    def _decide(self, groups: Sequence[RolloutGroup]) -> Answer:
        self._runner.gather(groups)
        for group in groups:
            del self._scored[group.key]
        return Answer(submit=[request for group in groups for request in self._more(group.key)])

    def _more(self, key: GroupKey) -> Iterable[Request]:
        """The requests of a group's next round."""
        rounds = self._rounds[key]
        rewards = [next(iter(each.rewards.values())) for each in rounds.rollouts if not math.isnan(each.reward)]
        if not rewards:
            return []
        num_passed = sum(reward is not None and reward >= self._threshold for reward in rewards)
        more = self._allocation.more(len(rewards), num_passed, rounds.num_rounds, rounds.first)
        request, size = rounds.rollouts[0].completion.request, len(rounds.rollouts)
        return [replace(request, path=(size + number,)) for number in range(more)]

    def _clear(self) -> None:
        self._rounds: dict[GroupKey, _Rounds] = {}
        self._scored: dict[GroupKey, RolloutGroup] = {}  # rounds whose rewards have not been looked at


def _is_flat(rollouts: Sequence[Rollout]) -> bool:
    """Whether the rewards of a group are all equal."""
    rewards = [rollout.reward for rollout in rollouts if not math.isnan(rollout.reward)]
    return not rewards or is_flat(*moments(rewards))


class Budget:
    """What a run's completions are spent on: how many each prompt gets, in how many rounds, and who is asked.

    Args:
        spec: What :func:`lit_grpo.budgets.allocation.make_allocation` takes.
    """

    def __init__(self, spec: str) -> None:
        self.spec, self.allocation = spec, make_allocation(spec)
        self.history = PromptHistory()
        self.chooser: PromptChooser | None = None
        self._rounds: Rounds | None = None
        self._sizes: list[int] = []

    def check(self, mode: str, turns: RolloutMode, num_prompts: int | None, num_generations: int) -> None:
        """Check that the rules go with a run.

        Args:
            mode: The name of ``turns``.
            turns: How rollouts and updates take turns.
            num_prompts: Of a batch; None where a dataloader of the user's says.
            num_generations: Completions of a prompt, on average.

        Raises:
            ValueError: They do not.
        """
        try:
            if num_prompts is not None:
                self.allocation.check(num_prompts, num_generations)
        except ValueError as error:
            raise ValueError(f"rollout_scheduler.allocation {self.spec}: {error}") from None
        if self.allocation.has_rounds and (turns.carries or turns.overlap != "none" or turns.prune_at is not None):
            raise ValueError(
                f"rollout_scheduler.allocation {self.spec} asks for more once a prompt's rewards are there, and "
                f"rollout_scheduler.mode {mode} does not wait for all of them: take synchronous, or uniform."
            )

    def begin(self, history: PromptHistory, chooser: PromptChooser | None, turns: RolloutMode) -> None:
        """Go by what is known of prompts, and say who is asked by it.

        Raises:
            ValueError: Who is asked depends on what whole visits show, and groups leave in parts.
        """
        if chooser is not None and turns.unit == "completion":
            raise ValueError(
                "data.ask goes by the rewards of a prompt's whole visit, and a rollout_scheduler.mode with unit "
                "completion lets groups leave in parts; take unit=group, or ask all."
            )
        self.history, self.chooser = history, chooser
        if chooser is not None:
            chooser.history = history

    def sizes(self, prompts: Sequence[Prompt], num_generations: int) -> list[int]:
        """Return how many completions each prompt of a batch gets to begin with."""
        records = [self.history[prompt.prompt_id] for prompt in prompts]
        self._sizes = self.allocation.first(records, num_generations)
        return self._sizes

    def scoring(self, runner: RewardRunner, pass_threshold: float) -> Listener:
        """Return what scores groups, and asks for further rounds."""
        if not self.allocation.has_rounds:
            return Rewarding(runner)
        self._rounds = Rounds(runner, self.allocation, pass_threshold)
        return self._rounds

    def learn(self, groups: Sequence[RolloutGroup], ranks: Ranks) -> None:
        """Learn from a batch, which the history has, who is to be asked."""
        if self.chooser is not None:
            own = [group.prompt.prompt_id for group in groups]
            self.chooser.learn([prompt_id for part in ranks.gather(own) for prompt_id in part])

    def metrics(self, num_skipped: int) -> dict[str, float]:
        """Return what to log of a batch, before which so many prompts were passed over."""
        metrics = {} if self._rounds is None else self._rounds.metrics()
        if self.chooser is not None:
            metrics |= self.chooser.metrics() | {"prompts/skipped": float(num_skipped)}
        if len(set(self._sizes)) > 1:
            metrics |= {
                "budget/smallest_group": float(min(self._sizes)),
                "budget/largest_group": float(max(self._sizes)),
            }
        return metrics
