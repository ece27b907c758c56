"""A budget of completions in a rollout: groups of their own sizes, and further rounds by what the first have earned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from lit_grpo.budgets.allocation import Allocation, make_allocation
from lit_grpo.budgets.hints import hint_metrics
from lit_grpo.budgets.history import PromptHistory, is_flat, moments
from lit_grpo.budgets.prompts import PromptChooser
from lit_grpo.budgets.replay import ReplayMemory
from lit_grpo.rollout.listeners import Answer, Listener, Rewarding
from lit_grpo.rollout.rules import RolloutMode
from lit_grpo.types import GroupKey, Prompt, PromptBatch, Request, Rollout, RolloutGroup

if TYPE_CHECKING:
    from lit_grpo.ranks import Ranks
    from lit_grpo.rewards import RewardRunner
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.scheduling.flight import Flight


PATIENCE = 8
"""Decode steps."""


@dataclass
class _Rounds:
    """What a prompt has come to, and in how many rounds, the first of which had ``first`` completions."""

    first: int
    rollouts: list[Rollout] = field(default_factory=list)
    num_rounds: int = 0


class Rounds(Listener):
    """Scores each round of a group as soon as it is whole, and asks for another as an allocation says.

    That is decided ``PATIENCE`` steps later, in which rewards have time to come; those that have not are waited for, so
    that a run can be repeated to the last bit. Where a group has had all its rounds and no difference, another prompt
    is asked in its place, as long as there are any (DAPO's dynamic sampling, arXiv 2503.14476). Other groups are
    decoded meanwhile. What a group gets depends on its own rewards alone, and each that has no difference takes the
    next prompt.

    Args:
        runner: Scores.
        allocation: Says how many more a prompt gets.
        pass_threshold: What the first reward of a completion has to reach for it to count as passed.
        replacements: Prompts that may be asked in place of groups without a difference, in their order.
    """

    def __init__(
        self,
        runner: RewardRunner,
        allocation: Allocation,
        pass_threshold: float,
        replacements: Iterator[Prompt] | None = None,
    ) -> None:
        self._runner, self._allocation, self._threshold = runner, allocation, pass_threshold
        self._replacements = iter(()) if replacements is None else replacements
        self._clear()

    @property
    def flat(self) -> set[GroupKey]:
        """The groups that have had all their rounds, and no difference."""
        return {key for key, rounds in self._rounds.items() if _is_flat(rounds.rollouts)}

    def begin(self, flight: Flight) -> None:
        """Begin with no group."""
        self._clear()

    def whole(self, group: RolloutGroup) -> None:
        """Begin to score a round."""
        self._runner.submit(group)
        self._scored.append((group, self._step))
        rounds = self._rounds.setdefault(group.key, _Rounds(len(group.rollouts)))
        rounds.rollouts += group.rollouts
        rounds.num_rounds += 1

    def step(self, events: StepEvents) -> Answer | None:
        """Decide of those that have been whole for long enough."""
        self._step += 1
        due = [group for group, since in self._scored if self._step - since >= PATIENCE]
        return self._decide(due) if due else None

    def idle(self) -> Answer | None:
        """Decide of all."""
        return self._decide([group for group, _ in self._scored])

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
        del self._scored[: len(groups)]
        submit: list[Request] = []
        opened: list[Request] = []
        for group in groups:
            more = self._more(group.key)
            submit += more
            if not more and _is_flat(self._rounds[group.key].rollouts):
                opened += self._instead(self._rounds[group.key])
        return Answer(submit=submit, open=opened)

    def _instead(self, rounds: _Rounds) -> list[Request]:
        """The requests of another prompt's first round, where there is one."""
        prompt = next(self._replacements, None) if rounds.rollouts else None
        if prompt is None:
            return []
        request = rounds.rollouts[0].completion.request
        return [replace(request, prompt=prompt, path=(number,)) for number in range(rounds.first)]

    def _more(self, key: GroupKey) -> list[Request]:
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
        self._scored: list[tuple[RolloutGroup, int]] = []  # rounds that wait for their rewards, and since which step
        self._step = 0


def _is_flat(rollouts: Sequence[Rollout]) -> bool:
    """Whether the rewards of a group are all equal."""
    rewards = [rollout.reward for rollout in rollouts if not math.isnan(rollout.reward)]
    return not rewards or is_flat(*moments(rewards))


class Sharing(Protocol):
    """Who else goes by what is known of prompts."""

    def share(self, history: PromptHistory) -> None:
        """Take over the history that is there."""
        ...


class PromptStream(Protocol):
    """Where a batch's prompts come from, as far as a budget has to do with it."""

    chooser: PromptChooser | None

    @property
    def hints(self) -> bool:
        """Whether prompts may get hints."""
        ...

    def go_by(self, history: PromptHistory) -> None:
        """Let who is asked, and with which hints, depend on what is known of prompts."""
        ...

    def further(self, most: int) -> Iterator[Prompt]:
        """Yield prompts that stand behind the batch's, at most so many."""
        ...

    def agree(self, largest: Callable[[float], float]) -> None:
        """Count to the batch what any rank has taken."""
        ...

    def take_skipped(self) -> int:
        """Return how many prompts have been passed over since this was asked last."""
        ...


def check_stream(stream: PromptStream, turns: RolloutMode) -> None:
    """Check that prompts can be asked, and get hints, by what their visits show.

    Raises:
        ValueError: That depends on whole visits, and groups leave in parts.
    """
    if turns.unit == "completion" and (stream.chooser is not None or stream.hints):
        setting, off = ("data.hint", "set it to none") if stream.chooser is None else ("data.ask", "ask all")
        raise ValueError(
            f"{setting} goes by the rewards of a prompt's whole visit, and a rollout_scheduler.mode with unit "
            f"completion lets groups leave in parts; take unit=group, or {off}."
        )


class Budget:
    """What a run's completions are spent on: how many each prompt gets, in how many rounds, who is asked, and again.

    Args:
        spec: What :func:`lit_grpo.budgets.allocation.make_allocation` takes.
        replaces: How many further prompts of a batch may be asked in place of groups without a difference.
        replay: What :func:`lit_grpo.budgets.replay.make_replay` takes.

    Attributes:
        replay: Successes of earlier visits, which join groups that are settled.
    """

    def __init__(self, spec: str, replaces: int = 0, replay: str = "none") -> None:
        if replaces < 0:
            raise ValueError(f"rollout_scheduler.replace_flat must be at least 0, which replaces none, not {replaces}.")
        self.spec, self.allocation, self.replaces = spec, make_allocation(spec), replaces
        self.replay = ReplayMemory(replay)
        self._warned = False
        self.history = PromptHistory()
        self._stream: PromptStream | None = None
        self._rounds: Rounds | None = None
        self._sizes: list[int] = []
        self._num_prompts: int | None = None  # of an update, on each rank

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
        self._num_prompts = num_prompts
        if self.replay.active and turns.unit == "completion":
            raise ValueError(
                f"rollout_scheduler.replay {self.replay.spec} adds members to whole groups, and rollout_scheduler.mode "
                f"{mode} lets them leave in parts; add unit=group to the mode, or take synchronous or april."
            )
        try:
            if num_prompts is not None:
                self.allocation.check(num_prompts, num_generations)
        except ValueError as error:
            raise ValueError(f"rollout_scheduler.allocation {self.spec}: {error}") from None
        if self.replaces and num_prompts is None:
            raise ValueError(
                "rollout_scheduler.replace_flat asks further prompts of lit_grpo.data.PromptDataModule; with a "
                "dataloader of your own set it to 0."
            )
        if self._waits and (turns.carries or turns.overlap != "none" or turns.prune_at is not None):
            field = f"allocation {self.spec}" if self.allocation.has_rounds else f"replace_flat {self.replaces}"
            raise ValueError(
                f"rollout_scheduler.{field} asks for more once a prompt's rewards are there, and "
                f"rollout_scheduler.mode {mode} does not wait for all of them: take synchronous, or uniform and 0."
            )

    @property
    def _waits(self) -> bool:
        """Whether rewards decide what is decoded next."""
        return self.allocation.has_rounds or self.replaces > 0

    def begin(
        self,
        history: PromptHistory,
        stream: PromptStream | None,
        turns: RolloutMode,
        lengths: Sharing | None = None,
    ) -> None:
        """Go by what is known of prompts, and say who is asked by it; without a ``stream`` others say who.

        Lengths are foretold by the same history. Raises what :func:`check_stream` does.
        """
        self.history, self._stream = history, stream
        if lengths is not None:
            lengths.share(history)
        if stream is None:
            return
        check_stream(stream, turns)
        stream.go_by(history)

    def sizes(self, prompts: Sequence[Prompt], num_generations: int) -> list[int]:
        """Return how many completions each prompt of a batch gets to begin with."""
        ids = [prompt.prompt_id for prompt in prompts]
        goes_by_lengths = self.allocation.goes_by_lengths
        records = self.history.expected(ids) if goes_by_lengths else [self.history[prompt_id] for prompt_id in ids]
        self._sizes = self.allocation.first(records, num_generations, self._num_prompts)
        return self._sizes

    def scoring(self, runner: RewardRunner, pass_threshold: float) -> Listener:
        """Return what scores groups, and asks for further rounds and prompts."""
        if not self._waits:
            return Rewarding(runner)
        further = None if self._stream is None else self._stream.further(self.replaces)
        self._rounds = Rounds(runner, self.allocation, pass_threshold, further)
        return self._rounds

    def settle(self, batch: PromptBatch, version: int, ranks: Ranks) -> None:
        """Say what the policy of ``version`` learns from.

        Groups without a difference are left out where others are asked in their place, and earlier successes join.
        """
        batch.prompts = [group.prompt for group in batch.groups]
        if self.replaces and self._rounds is not None and self._stream is not None:
            self._leave_out(batch, self._rounds, self._stream, ranks)
        self.replay.join(batch.groups, version)

    def _leave_out(self, batch: PromptBatch, rounds: Rounds, stream: PromptStream, ranks: Ranks) -> None:
        """Leave groups without a difference out of a batch's update."""
        stream.agree(lambda taken: float(ranks.max(taken)))
        flat = rounds.flat
        for group in batch.groups:
            for rollout in group.rollouts:
                rollout.kept = group.key not in flat
        short = int(ranks.max(float(max(len(flat) - self.replaces, 0))))
        if short and not self._warned:
            self._warned = True
            ranks.warn(
                f"rollout_scheduler.replace_flat {self.replaces} is reached: {short} groups of a batch have no "
                "difference and could not be replaced; raise it, or give prompts that are passed now and then."
            )

    def learn(
        self, groups: Sequence[RolloutGroup], pass_threshold: float, version: int, ranks: Ranks
    ) -> dict[str, float]:
        """Learn from a batch, which the history has, who is to be asked, and remember what passed.

        Visits with a hint show nothing of who is to be asked. Returns what to log of hints.
        """
        self.history.commit_lengths(ranks.gather)
        self.replay.learn(groups, pass_threshold, version, ranks.gather)
        chooser = None if self._stream is None else self._stream.chooser
        if chooser is not None:
            own = [group.prompt.prompt_id for group in groups if not group.prompt.hint]
            chooser.learn([prompt_id for part in ranks.gather(own) for prompt_id in part])
        return hint_metrics(self.history.committed) if self._stream is not None and self._stream.hints else {}

    def metrics(self) -> dict[str, float]:
        """Return what to log of a batch."""
        metrics = self.replay.metrics()
        if self._rounds is not None and self.allocation.has_rounds:
            metrics |= self._rounds.metrics()
        if self._rounds is not None and self.replaces:
            metrics["budget/replaced_groups"] = float(min(len(self._rounds.flat), self.replaces))
        if self._stream is not None and self._stream.chooser is not None:
            metrics |= self._stream.chooser.metrics() | {"prompts/skipped": float(self._stream.take_skipped())}
        if len(set(self._sizes)) > 1:
            metrics |= {
                "budget/smallest_group": float(min(self._sizes)),
                "budget/largest_group": float(max(self._sizes)),
            }
        return metrics
