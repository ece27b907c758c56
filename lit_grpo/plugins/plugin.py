"""Hooks of listeners and plug-ins, and those that at most one of them may decide."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from lit_grpo.budgets.history import NUM_RECENT
from lit_grpo.compatibility import DENOMINATOR, ENTROPY_COEFFICIENT, Requirement
from lit_grpo.limits import check_fields
from lit_grpo.types import AllGather, GroupBatch

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from lit_grpo.budgets.history import Record, Tally
    from lit_grpo.budgets.rewriting import TextWriter
    from lit_grpo.data.examples import AnsweredData
    from lit_grpo.findings.rewards import Finding
    from lit_grpo.ranks import Ranks
    from lit_grpo.rewards.function import RewardFunction
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.scheduling.ledger import RequestLedger
    from lit_grpo.types import Completion, Key, Prompt, Request, Rollout, RolloutGroup, SamplePath
    from lit_grpo.update.advantages.estimator import GroupRewards
    from lit_grpo.update.objective.policy_loss import LossInputs
    from lit_grpo.update.objective.tokens import Tokens
    from lit_grpo.update.plugin import Chunk, LearningBatch, Measure, OptimizerStep, Term, TrainingRun, Visit

Kind = TypeVar("Kind", bound="Listener")


class Resume(NamedTuple):
    """A request that waits for its environment is to wait for a slot again.

    Args:
        request: With the prefix that it goes on from.
        how: ``go_on`` after what it has come to, and perhaps further observed tokens; ``again`` after a part of that,
            the rest of which is lost; ``rewritten`` after other tokens: the listener keeps what was sampled, and puts
            it together in what it names in :attr:`Answer.finish`.
    """

    request: Request
    how: Literal["go_on", "again", "rewritten"] = "go_on"


@dataclass(frozen=True)
class Answer:
    """A listener's wishes for requests.

    Args:
        submit: Further requests of open groups. One with a ``prefix`` goes on from it: with
            ``prefix=trajectory.until(n)`` it is a *fork* of a completion that has ended, or of a request that is away.
            In answer to ``on_completion`` they keep the group open, where it would be whole.
        fork: Active requests that divide: by their keys, the paths of further requests that begin with all that each
            has come to.
        open: Requests of new groups.
        drop: These are left out of their groups.
        hold: These have just come to the end of a turn, and are *away* until a later answer names them in ``resume``,
            ``finish`` or ``drop``. Their slots are free meanwhile, and their groups open.
        resume: These wait for a slot again, in this order, each before those that wait already: requests that are away,
            or that have just come to the end of a turn.
        finish: Completions of requests that are away.
    """

    submit: Sequence[Request] = ()
    fork: Mapping[Key, Sequence[SamplePath]] = field(default_factory=dict)
    open: Sequence[Request] = ()
    drop: Sequence[Key] = ()
    hold: Sequence[Key] = ()
    resume: Sequence[Resume] = ()
    finish: Sequence[Completion] = ()


class ObservationPoint(NamedTuple):
    """Places at which the policy's hidden states are observed.

    Args:
        num_tokens: After how many sampled tokens of a completion.
        barrier: Whether all completions are to come to the point before any goes on.
    """

    num_tokens: int
    barrier: bool = False


class Listener:
    """Hears what happens in a rollout, and may answer. Each method does nothing where it is not overridden.

    Attributes:
        forks: Whether it asks for requests that begin within others. The path of a fork is that of its parent and one
            number more. As long as a group is open, its prompt is then kept, and the states of its environments.
        lock_step: Whether it is asked between any two steps as if nothing were left to decode (:meth:`on_idle`), so
            that what it waits for is taken at the same steps in every run.
    """

    forks: bool = False
    lock_step: bool = False

    @property
    def observes(self) -> ObservationPoint | None:
        """Return the place at which it observes the policy's hidden state of each completion; None if it does not.

        :meth:`on_step` then finds in ``events.observations`` those of completions that have come to the point, by their
        ``num_tokens``, among observations at other points.
        """
        return None

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        """A rollout begins; ``ledger`` tells what is in work for as long as it lasts.

        ``ledger.awaiting_env`` has the requests that waited for their environments when the last rollout ended: a
        listener that held them answers for them in this one.
        """

    def on_requests(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Requests are asked for, before any of them waits for a slot; return those that are to be away first.

        They stay away until a later answer lets them ``resume``, for example after an environment has been reset, whose
        first words they then observe. At the beginning of a rollout those that were away when the last one ended are
        among them, and stay away; one that is returned without a prefix begins again.
        """
        return ()

    def on_step(self, events: StepEvents) -> Answer | None:
        """A step has been taken."""

    def on_turn(self, completion: Completion) -> Answer | None:
        """A request has sampled a turn: it is over, unless the answer lets it ``resume`` or ``hold``s it.

        All that was asked of it before is in ``completion``, observed tokens too. The first listener that answers
        decides. For example a turn that calls a tool is held, and goes on later followed by the tool's answer::

            def on_turn(self, completion):
                call = self.parse(completion.turns[-1])  # tokens
                if call is None or completion.finish_reason != "stop":
                    return None
                self.pool.submit(call, completion)
                return Answer(hold=[completion.request.key])
        """

    def on_completion(self, completion: Completion) -> Answer | None:
        """A completion has ended: after its last turn, where it has several."""

    def on_drop(self, request: Request) -> None:
        """A request has been left out of its group, by whichever listener; its prefix is what it had come to."""

    def on_group(self, group: RolloutGroup) -> Answer | None:
        """The last member of a group has ended."""

    def on_idle(self) -> Answer | None:
        """Nothing is left to decode: a listener that has more to ask for does so now.

        While requests are away it is asked every millisecond.
        """

    @property
    def waits_in_time(self) -> bool:
        """True if it waits for something with a time limit that has not passed: then nothing has come to a stop."""
        return False

    def on_rollout_end(self, failed: bool) -> None:
        """The rollout is over, or has ``failed``: what was told of it is void."""


class CoreListener(Listener):
    """A listener that is part of the core: what its hooks return is not checked."""


ROLLOUT_HOOKS = tuple(name for name in vars(Listener) if name[0] != "_" and name not in Listener.__annotations__)
"""What one that listens to a rollout may override."""


@dataclass
class Plugin(Listener):
    """An optional method of a run, given by name or class path in ``rollout.plugins``.

    A plug-in is one class, as a Lightning ``Callback`` is, and a dataclass: its fields are what the user can set, as in
    ``{knapsack: {budget: 256}}``, and their annotations say which values they take (:mod:`lit_grpo.limits`). It
    overrides the hooks that it wants, those of :class:`Listener` among them, and only these are called. What it
    remembers is made in :meth:`setup`. For example, a metric of one's own::

        @dataclass
        class Longest(Plugin):
            above: int = 0

            def setup(self):
                self.longest = self.above

            def on_completion(self, completion):
                self.longest = max(self.longest, completion.num_tokens)

            def metrics(self, all_gather):
                return {"mine/longest": float(max(all_gather(self.longest)))}

    And smaller advantages for long completions::

        @dataclass
        class ByLength(Plugin):
            cost: float = 0.001

            def shape_advantages(self, batch, advantages):
                return [
                    [value - self.cost * each.completion.num_sampled for value, each in zip(values, group.rollouts)]
                    for values, group in zip(advantages, batch.groups)
                ]

    What a hook returns is read in one place (:mod:`lit_grpo.plugins.hooks`): another shape, dtype or range than the
    hook says is refused, with the names of plug-in, hook and row. A plug-in that overrides no hook is refused too, and
    one with a public method whose name is nearly that of a hook.

    Some hooks decide something that only one plug-in of a run may decide; :data:`DECISIONS` lists them. A batch passes
    the hooks of the update in this order: rollouts are chosen (:meth:`choose_rollouts`), the run's estimator compares
    their rewards, their advantages change (:meth:`shape_advantages`), some are left out by comparison with the whole
    batch (:meth:`choose_from_batch`), and turns or tokens get advantages of their own (:meth:`credit`), and
    further tokens to compare the policy's distribution with (:meth:`candidate_tokens`, :meth:`token_loss`). At each
    optimizer step tokens are chosen (:meth:`token_mask`, :meth:`token_weights`) and long completions are cut
    (:meth:`chunks`), the loss gets a further term (:meth:`loss_term`), norms of the gradient are measured
    (:attr:`num_parts`), by which the size of batches may change (:meth:`batch_size`), and the learning rate of the step
    is scaled (:meth:`step_scale`).

    Attributes:
        role: What it decides beside :data:`DECISIONS`, such as ``which completions are stopped early``, so that no
            other plug-in with the same role joins it; empty if any may.
        needs: What it needs of a run: words of :data:`lit_grpo.compatibility.REQUIREMENTS`. Hooks of :data:`DECISIONS`
            have needs of their own. It is ``all_ranks`` if it compares groups in the update or calls
            ``batch.all_gather`` there, ``whole_groups`` if it compares members of a group, ``plain_rewards`` if it uses
            ``Rollout.reward``, and ``revisits`` if it goes by earlier visits of prompts.
        changes: What it takes away from others, by the same words: what to say of it after its name, such as ``lets
            groups leave in parts``.
        common: Whether all ranks remember the same, which checkpoints then keep once.
        learns_unrewarded: Whether completions without a reward are trained on: their advantage is 0 until their tokens
            get others (:meth:`credit`), and ``model.rewards`` may be empty.
        asks_teacher: Whether it needs ``model.teacher``; :meth:`on_train_start` gets the teacher.
        evaluates: Whether it hears of rollouts of validation, test and predict too.
        datasets: Data sets whose rows it acts on, as the user limits it; all if empty. Its hooks see no other rows.
    """

    role: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    changes: ClassVar[Mapping[str, str]] = {}
    common: ClassVar[bool] = False
    learns_unrewarded: ClassVar[bool] = False
    asks_teacher: ClassVar[bool] = False
    evaluates: ClassVar[bool] = False
    datasets: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Check the fields against their annotations; a plug-in that checks more calls it first."""
        check_fields(self)

    # ---- before a run ---------------------------------------------------------------------------------

    def requirement(self, name: str) -> Requirement:
        """Return what it needs of a run and takes away from others; overridden where that depends on a field's value.

        What its hooks of :data:`DECISIONS` need is added to that (:func:`requirement_of`).

        Args:
            name: What messages call it, such as ``rollout.plugins april``.
        """
        return Requirement(name, self.needs, self.changes)

    def check(self, run: RunFacts) -> None:
        """Check its fields against what is known of a run, and note what they settle.

        Called before anything is loaded, for a plug-in with hooks of the update again once policy and optimizer are
        there, before anything is written, and at last when training starts: each time more of ``run`` is known.

        Raises:
            ValueError: They do not fit; the message goes on after the plug-in's name, as in ``it needs groups of 3``.
        """

    def setup(self) -> None:
        """Make what is remembered during a run: each run has a copy of the plug-in, on which this is called first.

        Raises:
            ValueError: What a field names cannot be loaded.
        """

    @property
    def rewards(self) -> Sequence[RewardFunction]:
        """Reward functions that it brings, beside those of ``model.rewards``."""
        return ()

    def on_policy_start(self, eos_ids: Sequence[int]) -> None:
        """The policy has been loaded, before the first rollout; a completion ends at any of ``eos_ids``."""

    # ---- which prompts are asked, with what, and how often --------------------------------------------

    @property
    def prompt_candidates(self) -> int:
        """From how many prompts that are due each one that is asked is taken.

        With 1 a prompt is asked or not by its own chance, which is drawn. With more nothing is drawn: of so many times
        as many prompts as are wanted, those with the largest chances are asked. Then a chance may be any number.
        """
        return 1

    @property
    def num_recent(self) -> int | None:
        """Of how many of a prompt's last visits it needs the outcomes one by one (``Record.recent``); None for all."""
        return NUM_RECENT

    def prompt_state(self, prompts: Sequence[Prompt]) -> Mapping[str, float]:
        """Return what the choice of prompts remembers at the beginning of a run: numbers by name, which are logged.

        Args:
            prompts: All training prompts.

        Raises:
            ValueError: The prompts lack a column that it needs.
        """
        return {}

    def prompt_chance(self, prompt: Prompt, record: Record, state: Mapping[str, float]) -> float:
        """Return the chance, from 0 to 1, that a prompt is asked when it is due.

        Whether it is asked is drawn from a hash of the seed, its id and its visit, so that runs can be repeated.

        Args:
            prompt: The one that is due.
            record: What its earlier visits have shown.
            state: What :meth:`next_prompt_state` returned last.
        """
        return 1.0

    def next_prompt_state(
        self, state: Mapping[str, float], prompts: Sequence[Prompt], records: Sequence[Record]
    ) -> Mapping[str, float]:
        """Return what the choice of prompts remembers after a batch.

        Args:
            state: What it remembered before.
            prompts: Those of all ranks that were asked.
            records: Of each prompt, this visit included.
        """
        return state

    def rewrite(self, prompt: Prompt, writer: TextWriter) -> Prompt:
        """Return a training prompt as it is asked now, never longer than its :meth:`longest_rewrite`.

        The loader marks it as ``altered`` if the policy reads something else than the row says; the history of prompts
        then leaves the visit out. It keeps its ``prompt_id`` and ``visit``, and all ranks must rewrite alike.

        Args:
            prompt: As its row says.
            writer: Puts text into prompts.
        """
        return prompt

    def longest_rewrite(self, prompt: Prompt, writer: TextWriter) -> Prompt:
        """Return a prompt with as many tokens as it may ever be asked with, or itself if it is never rewritten.

        It is called for all training prompts before the run starts. The run checks that the longest of them fits into
        the policy's context.

        Raises:
            ValueError: The prompt cannot be rewritten; the message goes on after the row's number, as in
                ``has no column 'solution'``.
        """
        return prompt

    def first_round(self, records: Sequence[Record], num_generations: int, num_prompts: int | None = None) -> list[int]:
        """Return how many completions each of some prompts gets to begin with.

        Args:
            records: What is known of each prompt; ``mean_tokens`` of a new one is that of all prompts, if any is known,
                else 0.
            num_generations: ``model.num_generations``.
            num_prompts: Prompts of an update, on each rank, if a mode opens more or fewer of them; by default these.
        """
        return [num_generations] * len(records)

    def next_round(self, num_rewarded: int, num_passed: int, num_rounds: int, num_first: int) -> int:
        """Return how many more a prompt gets, all of which so far have been rewarded; 0 ends it.

        Args:
            num_rewarded: Completions with a reward.
            num_passed: Those of them that passed.
            num_rounds: Rounds that it has had, 1 or more.
            num_first: Completions of the first of them.
        """
        return 0

    def shared_round(self, tallies: Sequence[Tally], num_rounds: int, num_generations: int) -> list[int]:
        """Return how many more each prompt of this rank's batch gets, once all have been rewarded; all 0 ends it.

        It takes the place of :meth:`next_round` for a plug-in that compares prompts.

        Args:
            tallies: Of the prompts, in the order of their ids.
            num_rounds: Rounds that there have been, 1 or more.
            num_generations: ``model.num_generations``.
        """
        return [0] * len(tallies)

    # ---- a batch; what happens in its rollout is told by the hooks of a listener ----------------------

    @property
    def first_rollout(self) -> float:
        """The policy version from which on batches have rollouts; infinite if none has.

        A batch before it samples nothing and takes no prompt: its optimizer steps are on :meth:`examples` alone.
        """
        return 0

    def on_batch_start(self) -> None:
        """A training batch is about to be sampled.

        Raises:
            CannotGoOn: The run cannot go on; all ranks raise it.
        """

    def add_members(self, batch: GroupBatch) -> None:
        """Add members to whole groups before the policy learns from them, or leave members out."""

    def metrics(self, all_gather: AllGather) -> Mapping[str, float]:
        """Return what to log of the last rollout of all ranks, which call it together; the first rank logs it.

        If another plug-in of its kind acts on other data sets, the names begin with ``datasets/`` and its own.
        """
        return {}

    def on_update_end(self, batch: GroupBatch) -> Mapping[str, float]:
        """Learn from a batch that the policy has trained on, whose version counts that update.

        Returns:
            What to log; a figure that was logged before and is left out now is logged as NaN.

        Raises:
            CannotGoOn: The run cannot go on; all ranks raise it.
        """
        return {}

    def batch_size(self, num_prompts: int) -> int:
        """Return how many prompts the next batch has on each rank.

        Called when a run begins or is resumed, and after each update.

        Args:
            num_prompts: Of the batch before; at first ``data.batch_size``.
        """
        return num_prompts

    def on_train_start(self, run: TrainingRun) -> None:
        """Training begins or goes on; what a checkpoint had is loaded, and nothing has been sampled yet.

        Raises:
            ValueError: It cannot act on the run.
        """

    # ---- what the policy learns from a batch ----------------------------------------------------------

    def choose_rollouts(self, batch: LearningBatch) -> torch.Tensor | GroupRewards:
        """Return which rollouts are trained on, by comparison within their groups: booleans, shape R.

        The others were sampled and rewarded, and their rewards count in the statistics of the estimator, unless
        ``batch.rewards.only(chosen_R)`` is returned in place of the booleans: then those of the chosen ones alone do.
        """
        return ~batch.rewards.rewards_R.isnan()

    def shape_advantages(self, batch: GroupBatch, advantages: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
        """Return an advantage for each rollout of each group.

        Args:
            batch: Groups with any number of rollouts each.
            advantages: The estimator's, in the same order; NaN for one that is not trained on, which stays so.
        """
        return advantages

    def choose_from_batch(self, batch: LearningBatch, advantages_R: torch.Tensor, num_groups: int) -> torch.Tensor:
        """Return which rollouts are trained on, by comparison within the batch: booleans, shape R; needs ``all_ranks``.

        Args:
            batch: The part of the batch on this rank.
            advantages_R: Of the rollouts of all ranks; NaN for those that are not trained on.
            num_groups: Number of groups of all ranks.
        """
        return ~advantages_R.isnan()

    def credit(self, batch: LearningBatch) -> Sequence[Sequence[float] | torch.Tensor | None] | None:
        """Return for each rollout of the batch an advantage for each of its turns, or for each token trained on.

        For example, the advantage of the whole rollout plus half of what each turn earned by itself
        (``rollout.turn_rewards``, which an environment gives) above the mean of all turns::

            def credit(self, batch):
                mean = fmean(reward for rollout in batch.rollouts for reward in rollout.turn_rewards)
                return [
                    [rollout.advantage + 0.5 * (reward - mean) for reward in rollout.turn_rewards]
                    for rollout in batch.rollouts
                ]

        Args:
            batch: The part of the batch on this rank. Each rollout has its advantage; that of a rollout that is not
                trained on is NaN, and the values returned for it are ignored. ``batch.whitened`` gives tensors mean 0
                and variance 1 over all tokens of the batch.

        Returns:
            For each rollout a sequence of numbers, one per turn, or a tensor of shape ``(completion.num_trained,)``,
            one per token, or None if all its tokens have the rollout's advantage; None if that holds for all rollouts.
        """
        return None

    def old_logprobs(self, batch: LearningBatch, several_steps: bool) -> Mapping[Key, torch.Tensor] | None:
        """Return the log-probs in the denominator of probability ratios, by completion, shape ``num_trained``.

        Called before the first step on a batch, by all ranks together. A value that is NaN is the log-prob of the pass
        that trains on the token, which the policy now has to have sampled.

        Args:
            batch: Of the policy before its first step on the batch.
            several_steps: Whether there are several: the policy of the later passes is another one.

        Returns:
            None if all log-probs are those of the pass that trains on the token; a completion that is missing has NaN.
        """
        return None

    def ce_weights(self, batch: LearningBatch) -> Sequence[torch.Tensor | Sequence[float] | None] | None:
        """Return for each rollout of the batch the weight of each of its tokens in the channel ``ce``.

        A token with weight ``c`` adds ``-c log pi(token) / n`` to the loss of a step, where ``n`` is the number of the
        step's tokens, on all ranks, to which this plug-in gives a weight that is not 0. It is independent of
        advantages: masks, clipping and the choice of rollouts and tokens act on the channel ``rl`` alone, and a rollout
        without an advantage (NaN) goes through the policy if it has a weight. Called once per batch, when rollouts have
        their advantages.

        For example, imitation of the correct completions besides the objective::

            def ce_weights(self, batch):
                return [[0.1 * (each.reward == 1)] * each.completion.num_tokens for each in batch.rollouts]

        Returns:
            For each rollout values of shape (completion.num_tokens,), of observed tokens too, or None if it has no
            weight; None if no rollout has one.
        """
        return None

    def candidate_tokens(self, batch: LearningBatch) -> Mapping[Key, tuple[torch.Tensor, torch.Tensor]] | None:
        """Return for tokens that are trained on further tokens of the vocabulary, for :meth:`token_loss`.

        Called once per batch, after :meth:`credit`. All ranks return the same K.

        Returns:
            By completion the ids of K tokens at each place, int64, shape (num_trained, K), and a value for each of
            them, such as its log-prob under a teacher, with or without a further column for all other tokens together
            (``rest_logprobs_N`` of :meth:`token_loss`); None if no completion has any. A completion that is missing has
            NaN for all values.
        """
        return None

    # ---- at each optimizer step -----------------------------------------------------------------------

    def examples(self, version: int, ranks: Ranks) -> Sequence[Rollout]:
        """Return sequences that the step imitates besides its rollouts, with their ``ce_weights``.

        They belong to no group: no reward, statistic or advantage sees them. They go through the policy in the same
        micro-batches, and share the prompts of rollouts. Called before each optimizer step, by all ranks together.

        Args:
            version: Of the policy that takes the step.
            ranks: Of the run; each rank returns its own part.

        Returns:
            Rollouts whose completion has no token that is trained on, with unique keys.
        """
        return ()

    def token_loss(self, tokens: LossInputs) -> torch.Tensor:
        """Return what is added to the loss of each token of a micro-batch, shape N, with gradient.

        It is weighted as the objective's loss of the token is, and neither clipped nor masked. ``tokens`` has the
        policy's log-probs of the :meth:`candidate_tokens`, with gradient, and their values. A plug-in that overrides it
        overrides :meth:`candidate_tokens` too.
        """
        return torch.zeros_like(tokens.logprobs_N)

    def proximal_logprobs(
        self, logprobs_N: torch.Tensor, sampled_logprobs_N: torch.Tensor, versions_N: torch.Tensor, version: int
    ) -> torch.Tensor:
        """Return the log-probs in the denominator of a micro-batch's ratios, in place of :meth:`old_logprobs`.

        Args:
            logprobs_N: Of the policy now, with gradient; the result has none.
            sampled_logprobs_N: Those that the tokens were sampled with.
            versions_N: Versions of the policy that sampled the tokens.
            version: Of the policy now.
        """
        return sampled_logprobs_N

    def token_metrics(self, tokens: Tokens) -> Mapping[str, torch.Tensor]:
        """Return values of a micro-batch's tokens by name, shape N, whose means over all tokens are logged.

        A value of another shape is refused: a scalar says nothing of how many tokens it stands for.
        """
        return {}

    def token_mask(self, batch: LearningBatch, rollouts: Sequence[Rollout]) -> Mapping[Key, torch.Tensor] | None:
        """Return which tokens are trained on, bool by completion; None for all. Called before each optimizer step.

        Args:
            batch: The batch, whose ``version`` and ``progress`` are those of the step.
            rollouts: Those of the step on this rank, with their advantages.
        """
        return None

    def token_weights(self, rollouts: Sequence[Rollout], version: int) -> Mapping[Key, torch.Tensor] | None:
        """Return what each token counts that would be trained on, by completion; None if each counts 1.

        Called once for each part of an optimizer step, and again where the part is taken again: the same rollouts and
        version have the same weights. A token of weight 0 is not trained on, and those after the last token with a
        weight do not go through the policy: the row is shorter. The step's denominator is still of all tokens, so the
        gradient is that of all in expectation where each weight is 1 on average. A plug-in that has weights changes
        ``whole_completions``.

        Args:
            rollouts: Of a step on this rank, each with a token that would be trained on.
            version: Of the policy that takes the step.

        Returns:
            Finite numbers of 0 or more, shape ``num_trained`` of each completion; a negative one would turn the
            gradient.
        """
        return None

    @property
    def largest_chunk(self) -> int | None:
        """The largest number of tokens of a chunk; None if no completion is cut."""
        return None

    def chunks(self, completion: Completion, version: int) -> Sequence[Chunk]:
        """Return the chunks of a completion in their order, without a gap; none if it goes through whole.

        A chunk is a micro-batch of its own, and the last has its turn first. Keys and values of the chunks before it
        have been computed without a gradient; its backward pass leaves theirs
        (:class:`lit_grpo.update.prefix.carried.CarriedSpan`). The gradient is that of the whole completion. It is
        called again where a step is taken again: the same completion and version have the same chunks. A plug-in that
        has chunks sets :attr:`largest_chunk`.

        Args:
            completion: Trained on.
            version: Of the policy that takes the step.
        """
        return ()

    def loss_term(self, policy: PreTrainedModel, visit: Visit, ranks: Ranks) -> Term | None:
        """Return what is added to the loss of an optimizer step, before its first backward pass.

        The log of ``loss`` stays the objective's.

        Args:
            policy: The policy being trained.
            visit: Calls a function for each micro-batch of the step, with what sends it through the policy's layers
                without gradient, and with what its tokens count. All ranks call it together or not at all.
            ranks: Of the run.
        """
        return None

    def validate(self, measure: Measure, ranks: Ranks) -> Mapping[str, float]:
        """Return what a validation logs besides the rewards of completions, such as a loss on held-out examples.

        Args:
            measure: Measures tokens under the policy; all ranks call it together.
            ranks: Of the run.

        Returns:
            Values by name, without ``val/``, the same on every rank.
        """
        return {}

    @property
    def entropy_coefficient(self) -> float:
        """Weight of the entropy bonus in the next step, in place of ``model.objective.entropy.coefficient``."""
        return 0.0

    @property
    def num_parts(self) -> int:
        """In how many parts of its prompts a step's gradient is added up, to measure its norm after each of them.

        :meth:`on_optimizer_step` gets the norms. No norm is measured if no plug-in overrides this.
        """
        return 1

    def step_scale(self, log_weights_C: torch.Tensor, all_gather: AllGather) -> float:
        """Return the factor of the learning rate of a step; several plug-ins' factors are multiplied.

        All ranks call it together, unless the step's loss or gradient is not finite.

        Args:
            log_weights_C: Log of policy / behavior policy of each completion that went through the policy in the step,
                on this rank: the sum over its tokens, not truncated.
            all_gather: See :data:`AllGather`.
        """
        return 1.0

    def on_optimizer_step(self, step: OptimizerStep) -> None:
        """An optimizer step has been taken; all ranks call it."""

    # ---- checkpoints, and the end ---------------------------------------------------------------------

    def findings(self) -> Sequence[Finding]:
        """Return what has gone wrong so far, for the card at the end of a run and for ``doctor``."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""

    def close(self) -> None:
        """The run is over."""


def overriding(listeners: Iterable[Kind], *hooks: str) -> list[Kind]:
    """Return those that override any of these hooks; the others need not be called."""
    return [each for each in listeners if any(getattr(type(each), hook) is not getattr(Plugin, hook) for hook in hooks)]


class Decision(NamedTuple):
    """Something that at most one plug-in of a run may decide.

    Args:
        what: For messages, as in ``which both decide ...``.
        hooks: The hooks of :class:`Plugin` that decide it.
        needs: What deciding it needs of a run: words of :data:`lit_grpo.compatibility.REQUIREMENTS`.
        replaces: What a setting of the run decides otherwise, such as :data:`lit_grpo.compatibility.DENOMINATOR`.
        by_rows: Whether it is decided row by row, so that each data set may have a plug-in of its own for it.
    """

    what: str
    hooks: tuple[str, ...]
    needs: frozenset[str] = frozenset()
    replaces: str = ""
    by_rows: bool = False


ROUNDS = ("next_round", "shared_round")
"""Hooks that give prompts further completions once earlier ones have their rewards."""
DECISIONS = (
    Decision("which prompts are asked", ("prompt_chance",), frozenset({"whole_groups", "prompt_stream"})),
    Decision("what prompts are asked with", ("rewrite",), frozenset({"prompt_stream"}), by_rows=True),
    Decision("how many completions each prompt gets", ("first_round", *ROUNDS)),
    Decision(
        "how many more completions each prompt gets", ROUNDS, frozenset({"whole_rollouts", "separate_completions"})
    ),
    Decision("what turns are answered by", ("on_turn",)),
    Decision(
        "which rollouts are trained on",
        ("choose_rollouts", "choose_from_batch", "token_mask", "token_weights"),
        by_rows=True,
    ),
    Decision("what each rollout is trained on with", ("shape_advantages",), by_rows=True),
    Decision("what each turn is trained on with", ("credit",), by_rows=True),
    Decision("which tokens have a cross-entropy loss", ("ce_weights",), by_rows=True),
    Decision("which examples are imitated", ("examples",)),
    Decision("which further tokens have a loss", ("candidate_tokens", "token_loss")),
    Decision("which completions go through the policy in chunks", ("chunks",), by_rows=True),
    Decision("what is added to the objective's loss", ("loss_term",)),
    Decision("which log-probs ratios are taken to", ("old_logprobs", "proximal_logprobs"), replaces=DENOMINATOR),
    Decision("how much the entropy bonus counts", ("entropy_coefficient",), replaces=ENTROPY_COEFFICIENT),
    Decision("how many prompts a batch has", ("num_parts", "batch_size")),
)
UPDATE_HOOKS = (
    "choose_rollouts",
    "shape_advantages",
    "choose_from_batch",
    "credit",
    "token_mask",
    "token_weights",
    "ce_weights",
    "examples",
    "candidate_tokens",
    "token_loss",
    "chunks",
    "loss_term",
    "old_logprobs",
    "proximal_logprobs",
    "token_metrics",
    "entropy_coefficient",
    "num_parts",
    "step_scale",
    "on_train_start",
    "on_optimizer_step",
)
"""Hooks that a learner calls."""


def decided_by(plugin: Plugin) -> list[Decision]:
    """Return what a plug-in decides by the hooks that it overrides."""
    return [decision for decision in DECISIONS if overriding([plugin], *decision.hooks)]


def check_decisions(plugins: Sequence[tuple[str, Plugin]]) -> None:
    """Refuse plug-ins of which two decide the same, by their roles or by hooks of :data:`DECISIONS`.

    Two may decide the same for different data sets, where it is decided row by row.

    Args:
        plugins: Each with its name.

    Raises:
        ValueError: Two decide the same.
    """
    by_rows = {decision.what for decision in DECISIONS if decision.by_rows}
    roles = [(name, plugin, [plugin.role, *(each.what for each in decided_by(plugin))]) for name, plugin in plugins]
    for (name, plugin, of_plugin), (other, another, of_other) in itertools.combinations(roles, 2):
        apart = plugin.datasets and another.datasets and not plugin.datasets & another.datasets
        for role in filter(None, of_plugin):
            if role in of_other and not (apart and role in by_rows):
                limits = ", or limit each to other data sets" if role in by_rows and not apart else ""
                both = f"{name} and {other}"
                raise ValueError(f"rollout.plugins has {both}, which both decide {role}; take one of them{limits}.")


@dataclass(frozen=True)
class RunFacts:
    """The numbers of a run that a plug-in may depend on.

    Args:
        num_prompts: Prompts of a batch on each rank; None where the user's own dataloader says.
        num_generations: ``model.num_generations``.
        max_tokens: The most tokens of a completion.
        updates_per_batch: Optimizer steps on one batch.
        max_observed: The most tokens of a completion that are observed, in training or in validation: the smaller.
        divided_advantages: Whether the advantage estimator divides by a deviation of each group.
        normalization: How the loss weighs tokens, a :data:`lit_grpo.update.objective.tokens.Normalization`.
        corrected: Whether an importance-sampling correction weighs the loss.
        kl_beta: Weight of the KL term, ``model.objective.kl.beta``.
        adapters: The setting that has adapters trained, such as ``model.lora``; empty if all weights are trained.
        generator: The name of its class.
        abilities: Of the generator; None where it is not known.
        total_updates: Optimizer steps of the whole run; infinite if nothing limits them, None if not yet known.
        data: The data of the run, whose prompts have been read; None where that is not known.
        policy: The policy to train; None before it is loaded.
        optimizer: What takes its steps; None before it is made.
        teacher: ``model.teacher.policy``; empty without a teacher.
        micro_batch_tokens: The most tokens of a micro-batch; None if ``model.max_tokens_per_micro_batch`` is ``auto``.
        shares_prefix: Whether a prompt and its completion may be in different micro-batches, once the policy is loaded.
        largest_chunk: The most tokens of a chunk of a completion, once plug-ins are set; None if none cuts completions.
    """

    num_prompts: int | None
    num_generations: int
    max_tokens: int
    updates_per_batch: int
    max_observed: int = 0
    divided_advantages: bool = True
    normalization: str = "token"
    corrected: bool = True
    kl_beta: float = 0.0
    adapters: str = ""
    generator: str = ""
    abilities: Collection[str] | None = None
    total_updates: float | None = None
    data: AnsweredData | None = None
    policy: PreTrainedModel | None = None
    optimizer: torch.optim.Optimizer | None = None
    teacher: str = ""
    micro_batch_tokens: int | None = None
    shares_prefix: bool = True
    largest_chunk: int | None = None

    def check_one_step(self) -> None:
        """Refuse several optimizer steps on a batch.

        Raises:
            ValueError: There are.
        """
        if self.updates_per_batch > 1:
            raise ValueError(
                "it needs one optimizer step on each batch, and model.num_iterations x num_minibatches takes "
                f"{self.updates_per_batch}; set both to 1, or leave it out."
            )


class CannotGoOn(RuntimeError):
    """A run cannot go on, as a plug-in finds between two batches, on all ranks together: the run is saved and ends."""
