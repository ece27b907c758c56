"""What a run's completions are spent on, and what is known of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from lit_grpo.budgets.allocation import make_allocation
from lit_grpo.budgets.hints import hint_metrics
from lit_grpo.budgets.history import PromptHistory
from lit_grpo.budgets.prompts import PromptChooser
from lit_grpo.budgets.replay import ReplayMemory
from lit_grpo.rollout.listeners import Listener, Rewarding
from lit_grpo.rollout.rounds import Rounds
from lit_grpo.rollout.rules import RolloutMode
from lit_grpo.types import PassRule, Prompt, PromptBatch, RolloutGroup

if TYPE_CHECKING:
    from lit_grpo.ranks import Ranks
    from lit_grpo.rewards import RewardRunner


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
            f"{setting} goes by the rewards of a prompt's whole visit, and a rollout.mode with unit "
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
            raise ValueError(f"rollout.replace_flat must be at least 0, which replaces none, not {replaces}.")
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
                f"rollout.replay {self.replay.spec} adds members to whole groups, and rollout.mode "
                f"{mode} lets them leave in parts; add unit=group to the mode, or take synchronous or april."
            )
        try:
            if num_prompts is not None:
                self.allocation.check(num_prompts, num_generations)
        except ValueError as error:
            raise ValueError(f"rollout.allocation {self.spec}: {error}") from None
        if self.replaces and num_prompts is None:
            raise ValueError(
                "rollout.replace_flat asks further prompts of lit_grpo.data.PromptDataModule; with a "
                "dataloader of your own set it to 0."
            )
        if self._waits and (turns.carries or turns.overlap != "none" or turns.prune_at is not None):
            field = f"allocation {self.spec}" if self.allocation.has_rounds else f"replace_flat {self.replaces}"
            raise ValueError(
                f"rollout.{field} asks for more once a prompt's rewards are there, and "
                f"rollout.mode {mode} does not wait for all of them: take synchronous, or uniform and 0."
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

    def scoring(self, runner: RewardRunner, pass_rule: PassRule) -> Listener:
        """Return what scores groups, and asks for further rounds and prompts."""
        if not self._waits:
            return Rewarding(runner)
        further = None if self._stream is None else self._stream.further(self.replaces)
        self._rounds = Rounds(runner, self.allocation, pass_rule, further)
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
                f"rollout.replace_flat {self.replaces} is reached: {short} groups of a batch have no "
                "difference and could not be replaced; raise it, or give prompts that are passed now and then."
            )

    def learn(
        self, groups: Sequence[RolloutGroup], pass_rule: PassRule, version: int, ranks: Ranks
    ) -> dict[str, float]:
        """Learn from a batch, which the history has, who is to be asked, and remember what passed.

        Visits with a hint show nothing of who is to be asked. Returns what to log of hints.
        """
        self.history.commit_lengths(ranks.gather)
        self.replay.learn(groups, pass_rule, version, ranks.gather)
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
