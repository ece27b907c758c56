"""The conductor of rollouts: from the prompts of a batch to groups with rewards, one batch after another."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from lit_grpo.budgets.allocation import Replacement
from lit_grpo.budgets.history import PromptHistory
from lit_grpo.budgets.prompts import PromptChooser
from lit_grpo.compatibility import Requirement, check_together
from lit_grpo.plugins import (
    ROLLOUT_HOOKS,
    ROUNDS,
    GroupBatch,
    Listener,
    Plugin,
    RunFacts,
    ask,
    fresh,
    overriding,
    requirement_of,
)
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.loop import RolloutLoop, RolloutStats
from lit_grpo.rollout.pump import RolloutPump
from lit_grpo.rollout.rounds import RoundScheduler
from lit_grpo.rollout.rules import RolloutMode
from lit_grpo.scheduling.lengths import PREDICTION_POINTS, LengthPredictor, make_predictor
from lit_grpo.scheduling.plans.plan import Plan, check_probe, find_plan
from lit_grpo.scheduling.plans.probe_choice import Points, ProbeChoice
from lit_grpo.types import (
    Key,
    Part,
    PassRule,
    Prompt,
    PromptBatch,
    RolloutGroup,
    SamplingParams,
    over_ranks,
)

if TYPE_CHECKING:
    from lit_grpo.faults import Phases
    from lit_grpo.findings.rewards import Finding
    from lit_grpo.ranks import Ranks
    from lit_grpo.rewards import RewardRunner
    from lit_grpo.rollout.generator import Generator

Kind = TypeVar("Kind", bound=Plugin)
_SMALLEST, _LARGEST = "budget/smallest_group", "budget/largest_group"

BATCH_HOOKS = ("on_batch_start", "observes", "add_members", "metrics", "on_update_end")
"""Hooks that a session calls once a batch, of the plug-ins that override them."""


class Run(Protocol):
    """Interface of the run whose batches a session fills; :class:`lit_grpo.module.GRPOModule` is one."""

    generator: Generator
    sampling: SamplingParams
    num_generations: int
    sampling_seed: int
    policy_version: int
    pass_rule: PassRule
    phases: Phases

    @property
    def ranks(self) -> Ranks:
        """Reductions over the ranks of the run."""
        ...


class PromptSource(Protocol):
    """Source of a session's further prompts; :class:`lit_grpo.data.loaders.PromptLoader` is one."""

    chooser: PromptChooser | None
    batch_size: int
    prompts: list[Prompt]

    def use_history(self, history: PromptHistory) -> None:
        """Let the choice of prompts depend on what is known of them."""
        ...

    def draw(self, num_prompts: int) -> list[Prompt]:
        """Take the next prompts of this rank."""
        ...

    def further(self, most: int) -> Iterator[Prompt]:
        """Yield prompts that follow those of the batch, at most so many."""
        ...

    def give_back(self) -> None:
        """Give back what the batch has taken, so that the next one takes it."""
        ...

    def sync_draws_across_ranks(self, largest: Callable[[float], float]) -> None:
        """Count to the batch what any rank has taken."""
        ...

    def take_skipped(self) -> int:
        """Return how many prompts have been passed over since this was asked last."""
        ...


class RolloutSession:
    """Samples and rewards batch after batch of a run; it owns the buffer, the plan, predicted lengths and plug-ins.

    The life of a session, as :class:`lit_grpo.callbacks.RolloutScheduler` leads it::

        session = RolloutSession(make_plugins(["april", {"knapsack": {"budget": 256}}]))
        session.check(facts, parts)           # before anything expensive starts
        session.open(run, history, stream, rewards)
        for batch in batches:
            session.next_batch(run, batch)    # batch.groups is filled
            ...                               # the policy learns from them
            session.end_update(run, batch)
        session.close()

    Args:
        plugins: Plug-ins by name, as :func:`lit_grpo.methods.make_plugins` returns them.
        plan: Scheduling policy, as :func:`lit_grpo.scheduling.plans.plan.find_plan` takes it.
        predict_lengths: Whether lengths of completions are predicted.
        prediction_points: Numbers of tokens after which a length is predicted from the policy's hidden state.
        min_correlation: Min rank correlation at which predictions are used.
        probe_tokens: Number of tokens of a probe, as for :class:`lit_grpo.callbacks.RolloutScheduler`.

    Raises:
        ValueError: The plan does not exist, or the points do not fit.
    """

    def __init__(
        self,
        plugins: Mapping[str, Plugin] | None = None,
        plan: str | Plan = "short_last",
        predict_lengths: bool = True,
        prediction_points: Sequence[int] | None = None,
        min_correlation: float = 0.2,
        probe_tokens: int | list[int] | Literal["auto"] = "auto",
    ) -> None:
        self.plan = find_plan(plan, "rollout.plan")
        LengthPredictor(prediction_points or PREDICTION_POINTS, min_correlation=min_correlation)  # checks both
        self.plugins = {name: fresh(plugin) for name, plugin in (plugins or {}).items()}
        self.predict_lengths = predict_lengths
        self._prediction_points, self._min_correlation = prediction_points, min_correlation
        self.mode = self.plugin(RolloutMode) or RolloutMode()
        self.allocation = self.deciding("first_round", *ROUNDS) or Plugin()
        self._has_rounds = bool(overriding([self.allocation], *ROUNDS))
        self.prompt_rule = self.deciding("prompt_chance")
        self.replacement = self.plugin(Replacement)
        self.replaces = 0 if self.replacement is None else self.replacement.most
        self.sizer = self.deciding("batch_size")
        everyone = self.plugins.values()
        self.rewriting = overriding(everyone, "rewrite")
        self.first_rollout = max([ask(each, "numbers").first_rollout for each in everyone], default=0)
        self._hooks = {hook: overriding(everyone, hook) for hook in BATCH_HOOKS}  # the others do nothing there
        self.listening = overriding(everyone, *ROLLOUT_HOOKS)
        self.evaluating = [plugin for plugin in self.listening if "evaluates" in plugin.traits]
        self._choice = ProbeChoice(min_correlation) if probe_tokens == "auto" else None
        self._points: Points = () if probe_tokens == "auto" else check_probe(probe_tokens, self.plan, predict_lengths)
        self.buffer = RolloutBuffer()
        self.lengths: LengthPredictor | None = None
        self.rewards: RewardRunner | None = None
        self._history: PromptHistory | None = None
        self._stream: PromptSource | None = None
        self._pump: RolloutPump | None = None
        self._rounds: RoundScheduler | None = None
        self._predicted: dict[Key, float] = {}  # tokens of completions whose groups are open between two batches
        self._sizes: list[int] = []
        self._num_slots, self._kept_share = 0, math.inf
        self._num_prompts: int | None = None  # of a batch, on each rank
        self._told_of_flat_groups = False

    def plugin(self, kind: type[Kind]) -> Kind | None:
        return next((plugin for plugin in self.plugins.values() if isinstance(plugin, kind)), None)

    def deciding(self, *hooks: str) -> Plugin | None:
        """Return the plug-in that overrides any of these hooks; None if none does."""
        return next(iter(overriding(self.plugins.values(), *hooks)), None)

    def findings(self) -> list[Finding]:
        """Return what has gone wrong so far with what plug-ins do."""
        return [finding for plugin in self.plugins.values() for finding in ask(plugin, "findings")]

    # ---- before the first batch ---------------------------------------------------------------------

    def check(self, facts: RunFacts, parts: Iterable[Requirement]) -> None:
        """Check that the plug-ins go with a run, and with each other.

        Args:
            facts: Numbers of the run.
            parts: What else the run has: generator, data, estimator, objective.

        Raises:
            ValueError: They do not.
        """
        for name, plugin in self.plugins.items():
            try:
                ask(plugin, "check", facts)
            except ValueError as error:
                raise ValueError(f"rollout.plugins {name}: {error}") from None
        check_together([*self.parts(), *parts])
        self._num_prompts = facts.num_prompts

    def prepare(self, facts: RunFacts) -> None:
        """Make what learns lengths, and settle what the run's numbers decide."""
        if self.predict_lengths and self.lengths is None and self.mode.overlap == "none":
            looks = [ask(plugin, "observes") for plugin in self.listening]
            observed = [look.num_tokens for look in looks if look is not None]
            self.lengths = make_predictor(
                self._prediction_points, self._points, observed, self._min_correlation, facts.max_tokens
            )
        if self.mode.carries and facts.num_prompts is not None:
            self.buffer.rule = self.mode.rule(facts.num_prompts, facts.num_generations, facts.updates_per_batch)

    def open(self, history: PromptHistory, stream: PromptSource | None) -> None:
        """Go by what is known of prompts, and take prompts from a stream.

        Args:
            history: What earlier visits of prompts have shown.
            stream: Where prompts come from; None where the user's own dataloader gives them.
        """
        self._history, self._stream = history, stream
        if self.lengths is not None:
            self.lengths.share(history)
        if stream is not None:
            stream.use_history(history)
            self.buffer.give_columns(stream.prompts)
            if self.sizer is not None:
                stream.batch_size = ask(self.sizer, "batch_size", stream.batch_size)

    def parts(self) -> list[Requirement]:
        """Return what each plug-in needs of a run, and what it takes away from others."""
        return [requirement_of(plugin, f"rollout.plugins {name}") for name, plugin in self.plugins.items()]

    # ---- a batch ------------------------------------------------------------------------------------

    def next_batch(
        self,
        run: Run,
        batch: PromptBatch,
        listeners: Sequence[Listener] = (),
        context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Fill a training batch with groups that have their rewards, and with figures of its rollout.

        Where the mode overlaps both, decoding goes on after the call.

        Args:
            run: The run whose policy samples.
            batch: Of prompts; where groups stay open between batches, the session takes the prompts that it wants.
            listeners: Hear of the rollout.
            context: In which the policy computes.

        Raises:
            CannotGoOn: A plug-in finds that the run cannot go on.
        """
        batch.without_rollouts = run.policy_version < self.first_rollout
        if batch.without_rollouts:
            if self._stream is not None:
                self._stream.give_back()
            batch.prompts = []
            return
        for plugin in self._hooks["on_batch_start"]:
            ask(plugin, "on_batch_start")
        if self.lengths is not None:
            self.lengths.end(commit=False)  # of a rollout whose update was interrupted
            if self._choice is not None and self.plan.follows_lengths:  # when all completions are brought together
                looks = [ask(plugin, "observes") for plugin in self._hooks["observes"]]
                barriers = [look.num_tokens for look in looks if look is not None and look.barrier]
                known = {point: self.lengths.within_correlation(point) for point in self.lengths.points if point}
                self._points = tuple(barriers[:1]) or self._choice.points(known)
        capacity = run.generator.capacity()
        self._num_slots, self._kept_share = capacity.slots, capacity.kept_share
        if self.mode.carries:
            assert self._stream is not None
            wanted = self.mode.num_wanted(len(self.buffer), self._stream.batch_size)
            batch.prompts = self._stream.draw(int(run.ranks.max(wanted)))  # on all ranks equally many
        if type(self.allocation) is Plugin:
            self._sizes = [run.num_generations] * len(batch.prompts)
        else:
            self._sizes = self._group_sizes(batch.prompts, run.num_generations)
        self.buffer.open(group_requests(batch.prompts, self._sizes, run.sampling, run.sampling_seed))
        if self.mode.overlap != "none":
            self._begin_beside(run, batch, listeners)
            return
        self._rounds = None
        if self.rewards is not None and (self._has_rounds or self.replaces):
            self._rounds = RoundScheduler(
                self.rewards,
                self.allocation,
                run.pass_rule,
                None if self._stream is None else self._stream.further(self.replaces),
                num_generations=run.num_generations,
                replacement=self.replacement,
            )
        scoring = self._rounds or self.rewards
        listening = run.phases.others = self.listening
        hearing = [run.phases, *listeners, *listening, *([] if scoring is None else [scoring])]
        loop = RolloutLoop(run.generator, self.buffer, self.plan, self.lengths, hearing, self._points)
        with run.phases.of("rollout"), context():
            stats = loop.run(self.buffer.ready)
            batch.groups = self.buffer.take()
        batch.spans, batch.clock = stats.spans, stats.clock
        for message in stats.messages:
            run.ranks.warn(message)
        if self.lengths is not None:
            outcome = self.lengths.outcome()
            first = zip(outcome.keys, outcome.said[:, 0].tolist(), strict=True)
            batch.predicted = {key: tokens for key, tokens in first if not math.isnan(tokens)}
        batch.prompts = [group.prompt for group in batch.groups]
        if self.replaces and self._rounds is not None and self._stream is not None:
            self._leave_out(batch, run)
        if self._hooks["add_members"]:
            self._add_members(run, batch.groups)
        parts = {name: Part(value, "max") for name, value in run.generator.sleep().items()}
        parts["rollout/probe_tokens"] = Part(self._points[0] if self._points else 0, "max")
        if self.mode.carries:
            parts |= self._carry(batch, stats)
        batch.metrics = stats.metrics(run.ranks.gather) | self._metrics(run, parts)

    def evaluate(
        self,
        run: Run,
        batch: PromptBatch,
        num_generations: int,
        sampling: SamplingParams,
        listeners: Sequence[Listener] = (),
        phase: str = "validation",
        context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Fill a batch that is not trained on: only plug-ins act that say so, and nothing is remembered."""
        scoring = [] if self.rewards is None else [self.rewards]
        evaluating = run.phases.others = self.evaluating
        loop = RolloutLoop(run.generator, listeners=[run.phases, *listeners, *evaluating, *scoring])
        with run.phases.of(phase), context():
            batch.groups, stats = loop.collect(batch.prompts, num_generations, sampling, run.sampling_seed)
        batch.spans, batch.clock = stats.spans, stats.clock
        for message in stats.messages:
            run.ranks.warn(message)
        batch.metrics = stats.metrics()  # of this rank: ranks may validate unequally many batches

    def end_update(self, run: Run, batch: PromptBatch) -> dict[str, dict[str, float]]:
        """Learn from a batch that the policy has trained on, and forget it.

        Returns:
            What to log, by source: figures of the rollout, where it went on beside the update, of what was learned, and
            of what plug-ins have learned.
        """
        if batch.without_rollouts:
            return {"learned": {}}
        logs: dict[str, dict[str, float]] = {}
        if self._pump is not None:
            logs["rollout"] = self._end_beside(self._pump, run, batch)
        self.buffer.end_update()
        learned: dict[str, float] = {}
        if self.lengths is not None:
            if self._choice is not None:
                outcome = self.lengths.outcome()
                self._choice.learn(
                    outcome,
                    run.sampling.max_tokens,
                    self._num_slots,
                    self.lengths.informative,
                    kept_tokens=self._kept_share * self._num_slots * run.sampling.room,
                )
                learned |= self._choice.metrics(run.ranks.gather)
            self.lengths.end(commit=True)
            learned |= self.lengths.metrics(run.ranks.gather)
        stream = self._stream
        if self._history is not None:
            self._history.commit_lengths(run.ranks.gather)
        logs |= {"learned": learned, "plugins": {}}
        if updating := self._hooks["on_update_end"]:
            ended = self._batch_of(run, batch.groups)
            for plugin in updating:
                logs["plugins"] |= self._own_names(plugin, ask(plugin, "on_update_end", ended))
        if stream is not None and self.sizer is not None:
            stream.batch_size = ask(self.sizer, "batch_size", stream.batch_size)
        if stream is not None and stream.chooser is not None:
            own = [group.prompt.prompt_id for group in batch.groups if not group.prompt.altered]
            stream.chooser.learn([prompt_id for part in run.ranks.gather(own) for prompt_id in part])
        return logs

    # ---- parts of a batch ---------------------------------------------------------------------------

    def _group_sizes(self, prompts: Sequence[Prompt], num_generations: int) -> list[int]:
        """Return how many completions each prompt of a batch gets to begin with, as an allocation says."""
        assert self._history is not None, "open comes first"
        records = self._history.expected([prompt.prompt_id for prompt in prompts])
        return ask(self.allocation, "first_round", records, num_generations, self._num_prompts)

    def _leave_out(self, batch: PromptBatch, run: Run) -> None:
        """Leave flat groups out of a batch's update."""
        assert self._rounds is not None and self._stream is not None and self.replacement is not None
        ranks = run.ranks
        self._stream.sync_draws_across_ranks(lambda taken: float(ranks.max(taken)))
        flat = self._rounds.flat
        for group in batch.groups:
            for rollout in group.rollouts:
                rollout.kept = group.key not in flat
        short = int(ranks.max(float(max(len(flat) - self.replaces, 0))))
        if short and not self._told_of_flat_groups:
            self._told_of_flat_groups = True
            alike = f"either all completions pass ({run.pass_rule}) or none do"
            if self.replacement.metric == "reward":
                alike = "all completions have the same reward"
            ranks.warn(
                f"All {self.replaces} prompts that may replace groups without signal have been asked: in {short} more "
                f"groups of a batch {alike}. Raise most of the plug-in, or give prompts that are passed now and then."
            )

    def _batch_of(self, run: Run, groups: Sequence[RolloutGroup]) -> GroupBatch:
        score = None if self.rewards is None else self.rewards.score
        return GroupBatch(groups, run.policy_version, run.pass_rule, run.ranks.gather, score=score)

    def _add_members(self, run: Run, groups: list[RolloutGroup]) -> None:
        """Let plug-ins in turn add members to groups, and groups to the batch."""
        for plugin in self._hooks["add_members"]:
            batch = self._batch_of(run, groups)
            ask(plugin, "add_members", batch)
            groups += batch.joining

    def _carry(self, batch: PromptBatch, stats: RolloutStats) -> dict[str, Part]:
        """Keep what was predicted of groups that stay open; return how many they are."""
        batch.carried = True
        batch.predicted = {**batch.predicted, **self._predicted}  # what was said before the first token stays
        self._predicted = {key: value for key, value in batch.predicted.items() if key[:2] in self.buffer}
        return {
            "rollout/open_prompts": Part(self.buffer.num_left),
            "rollout/waiting_groups": Part(self.buffer.num_waiting),
            "rollout/continued_tokens": Part(stats.num_continued),
            "rollout/discarded_tokens": Part(stats.num_discarded),
        }

    def _metrics(self, run: Run, parts: Mapping[str, Part] = MappingProxyType({})) -> dict[str, float]:
        """Return what plug-ins, rounds, sizes and rewards have to say of a batch, for all ranks.

        Args:
            run: The run whose rollouts the session samples.
            parts: What else this rank has of figures of all ranks.
        """
        gather, parts = run.ranks.gather, dict(parts)
        if self.rewards is not None:
            parts["num_reward_errors"] = Part(self.rewards.num_errors)
        if self._rounds is not None and self.replaces:
            parts["budget/replaced_groups"] = Part(min(len(self._rounds.flat), self.replaces))
        chooser = None if self._stream is None else self._stream.chooser
        if self._stream is not None and chooser is not None:  # a rank may have looked further for replacements
            parts["prompts/skipped"] = Part(self._stream.take_skipped(), "max")
        if self._sizes:
            parts |= {_SMALLEST: Part(min(self._sizes), "min"), _LARGEST: Part(max(self._sizes), "max")}
        metrics = over_ranks(parts, gather)
        if self._sizes and metrics[_SMALLEST] == metrics[_LARGEST]:
            del metrics[_SMALLEST], metrics[_LARGEST]
        metrics |= {} if chooser is None else chooser.metrics()
        if self._rounds is not None and self._has_rounds:
            metrics |= self._rounds.metrics(gather)
        for plugin in self._hooks["metrics"]:
            metrics |= self._own_names(plugin, ask(plugin, "metrics", gather))
        if self.rewards is not None:
            metrics |= self.rewards.take_metrics(counts=True, all_gather=gather)
        return metrics

    def _own_names(self, plugin: Plugin, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return a plug-in's metrics, under its data sets if another of its kind acts on others."""
        if not plugin.datasets or len([each for each in self.plugins.values() if _kind(each) == _kind(plugin)]) < 2:
            return metrics
        under = f"datasets/{' and '.join(sorted(plugin.datasets))}"
        return {f"{under}/{name}": value for name, value in metrics.items()}

    # ---- decoding beside an update ------------------------------------------------------------------

    def _begin_beside(self, run: Run, batch: PromptBatch, listeners: Sequence[Listener]) -> None:
        """Let decoding begin, and the batch be of what is ready, or of what is going to be."""
        assert self.rewards is not None
        self._pump = self._pump or RolloutPump(self.rewards, drains=self.mode.at_sync == "drain")
        self._pump.start(
            RolloutLoop(run.generator, self.buffer, self.plan, listeners=[*listeners, *self.listening, self._pump])
        )
        if self.mode.overlap == "within":
            batch.arriving = self._with_members(run, self._pump.arriving(batch, run.phases))
            return
        with run.phases.of("rollout"):
            batch.groups = self._pump.take(run.phases.heartbeat)
        self._add_members(run, batch.groups)
        batch.prompts, batch.carried = [group.prompt for group in batch.groups], True

    def _with_members(self, run: Run, arriving: Iterator[list[RolloutGroup]]) -> Iterator[list[RolloutGroup]]:
        """Yield groups as they become whole, once plug-ins have added members to them."""
        for groups in arriving:
            self._add_members(run, groups)
            yield groups

    def _end_beside(self, pump: RolloutPump, run: Run, batch: PromptBatch) -> dict[str, float]:
        """Stop decoding; return what was done beside the update."""
        stats = pump.stop()
        assert stats is not None
        batch.spans, batch.clock = stats.spans, stats.clock
        for message in stats.messages:
            run.ranks.warn(message)
        parts, gather = self._carry(batch, stats) if self.mode.carries else {}, run.ranks.gather
        batch.metrics = stats.metrics(gather) | pump.metrics(stats, gather) | self._metrics(run, parts)
        return batch.metrics

    # ---- the end, and checkpoints -------------------------------------------------------------------

    def stop(self) -> None:
        """Decode no more, where a run is broken off; whatever goes wrong then is not the reason."""
        if self._pump is not None and self._pump.runs:
            with contextlib.suppress(Exception):
                self._pump.stop()
            if not self.mode.carries:
                self.buffer.undo()

    def close(self) -> None:
        """Stop, and end what scores."""
        self.stop()
        if self.rewards is not None:
            self.rewards.close()
            self.rewards = None
        for plugin in self.plugins.values():
            ask(plugin, "close")

    def state_dict(self, ranks: Ranks) -> dict[str, Any]:
        """Return what each rank has learned, and has sampled and not yet trained on; all ranks ask together."""
        self.stop()
        own: dict[str, Any] = {"buffer": self.buffer.state_dict(), "predicted": list(self._predicted.items())}
        if self.lengths is not None:
            own["lengths"] = self.lengths.state_dict()
        if self._choice is not None:
            own["probe"] = self._choice.state_dict()
        states = {name: ask(plugin, "state_dict") for name, plugin in self.plugins.items()}
        own["plugins"] = {name: state for name, state in states.items() if "common" not in self.plugins[name].traits}
        common = {name: state for name, state in states.items() if "common" in self.plugins[name].traits}
        return {"mode": self._mode_name, "ranks": ranks.gather(own), "plugins": common}

    def load_state_dict(self, state: Mapping[str, Any], ranks: Ranks) -> None:
        """Load this rank's state; if N ranks have saved, rank r loads the state of rank r modulo N.

        Raises:
            ValueError: Prompts are open that another mode has begun with, or as many ranks as are not there.
        """
        states = state["ranks"]
        num_open = sum(len(each["buffer"]["groups"]) for each in states)
        if num_open and (self._mode_name, ranks.size) != (state["mode"], len(states)):
            raise ValueError(
                f"The checkpoint has {num_open} prompts in work, begun on {len(states)} ranks with {state['mode']}, "
                f"and this run has {ranks.size} and {self._mode_name}: go on as it was."
            )
        own = states[ranks.rank % len(states)]
        if self.lengths is not None and "lengths" in own:
            self.lengths.load_state_dict(own["lengths"])
        if self._choice is not None and "probe" in own:
            self._choice.load_state_dict(own["probe"])
        self.buffer.load_state_dict(own["buffer"])
        kept = {**own["plugins"], **state["plugins"]}
        for name, plugin in self.plugins.items():
            if kept.get(name):
                ask(plugin, "load_state_dict", kept[name])
        self._predicted = {(name, visit, tuple(path)): value for (name, visit, path), value in own["predicted"]}

    @property
    def _mode_name(self) -> str:
        found = [name for name, plugin in self.plugins.items() if plugin is self.mode]
        return f"rollout.plugins {found[0]}" if found else "no plug-in that keeps prompts open"


def _kind(plugin: Plugin) -> tuple[str, str]:
    """Return what plug-ins of a kind have in common; one that is limited to data sets has a class of its own."""
    return type(plugin).__module__, type(plugin).__qualname__
