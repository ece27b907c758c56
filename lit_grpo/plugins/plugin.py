"""Hooks of listeners and plug-ins, and those that at most one of them may decide."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from lit_grpo.budgets.history import NUM_RECENT
from lit_grpo.compatibility import Requirement
from lit_grpo.limits import Count, NotNegative, Number, check_fields
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
    from lit_grpo.types import Completion, Key, Prompt, Request, RolloutGroup, SamplePath
    from lit_grpo.update.objective.tokens import Tokens
    from lit_grpo.update.plugin import Batch, Measure, TrainingRun
    from lit_grpo.update.step import Step

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


TRAITS: Mapping[str, str] = {
    "forks": "asks for requests that begin within others: the path of a fork is that of its parent and one number "
    "more; as long as a group is open, its prompt is kept, and the states of its environments",
    "lock_step": "is asked between any two steps as if nothing were left to decode (on_idle), so that what it waits "
    "for is taken at the same steps in every run",
    "by_progress": "asks for more or less by the tokens of requests that decode (ledger.progress), so none of them may "
    "get several in a step; the number of tokens that observes names is not passed anyway",
    "common": "remembers the same on all ranks, which checkpoints then keep once",
    "learns_unrewarded": "trains on completions without a reward: their advantage is 0 until a column gives their "
    "tokens others, and model.rewards may be empty",
    "asks_teacher": "needs model.teacher; on_train_start gets the teacher",
    "evaluates": "hears of rollouts of validation, test and predict too",
}
"""Words of ``traits``, and what is true of a listener or plug-in with each of them."""


class RunNumbers(NamedTuple):
    """Numbers of a run that a plug-in sets.

    Args:
        prompt_candidates: From how many prompts that are due each one that is asked is taken. With 1 a prompt is asked
            or not by its own chance, which is drawn. With more nothing is drawn: of so many times as many prompts as
            are wanted, those with the largest chances are asked. Then a chance may be any number.
        num_recent: Of how many of a prompt's last visits it needs the outcomes one by one (``Record.recent``); None
            for all.
        first_rollout: The policy version from which on batches have rollouts; infinite if none has. A batch before it
            samples nothing and takes no prompt: its optimizer steps are on examples (``Step.add``) alone.
        num_parts: In how many parts of its prompts a step's gradient is added up, to measure its norm after each of
            them, which :meth:`Plugin.on_optimizer_step` gets; with 1 no norm is measured.
        largest_chunk: The largest number of tokens of a chunk; None for a plug-in that does not write ``chunks``.
    """

    prompt_candidates: Count = 1
    num_recent: Number | None = NUM_RECENT
    first_rollout: NotNegative = 0
    num_parts: Count = 1
    largest_chunk: Count | None = None


def _join(name: str, cls: type) -> None:
    joined = frozenset[str]().union(*(getattr(base, name, ()) for base in cls.__bases__))
    if name not in vars(cls) and getattr(cls, name) != joined:
        setattr(cls, name, joined)


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
        traits: What is true of it: words of :data:`TRAITS`; those of all its bases if a class does not say.
    """

    traits: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        """Give a class the traits of all its bases, if it does not say its own."""
        super().__init_subclass__()
        _join("traits", cls)

    @property
    def observes(self) -> ObservationPoint | None:
        """Return the place at which it observes the policy's hidden state of each completion; None if it does not.

        :meth:`on_step` then finds in ``events.observations`` those of completions that have come to the point, by their
        ``num_tokens``, among observations at other points.
        """
        return None

    @property
    def likeliest(self) -> int:
        """Return how many of the likeliest tokens it looks at, of each distribution that a token is drawn from.

        :meth:`on_step` then finds them in ``events.likeliest``, and no step brings a request several tokens. 0 if it
        does not look.
        """
        return 0

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
            writes = frozenset({"advantage"})
            cost: float = 0.001

            def on_batch(self, batch):
                for rollout in batch.rollouts:
                    batch.set("advantage", rollout, rollout.advantage - self.cost * rollout.completion.num_sampled)

    What a hook returns, and what is written in a column, is read in one place (:mod:`lit_grpo.plugins.hooks`,
    :mod:`lit_grpo.plugins.columns`): another shape, dtype or range than is declared is refused, with the names of
    plug-in, hook or column, and row. A plug-in that overrides no hook is refused too, and one with a public method
    whose name is nearly that of a hook.

    Some hooks and columns decide something that only one plug-in of a run may decide
    (:func:`lit_grpo.plugins.hooks.decided_by`). A batch passes the hooks of the update in this order: :meth:`on_batch`;
    for each optimizer step :meth:`on_minibatch`, :meth:`loss` for each micro-batch, :meth:`on_gradient`, and
    :meth:`on_optimizer_step`.

    Attributes:
        writes: Columns of :data:`lit_grpo.plugins.columns.COLUMNS` that it may write in the update; those of all its
            bases if a class does not say.
        role: What it decides beside these and :data:`DECISIONS`, such as ``which completions are stopped early``, so
            that no other plug-in with the same role joins it; empty if any may.
        needs: What it needs of a run: words of :data:`lit_grpo.compatibility.REQUIREMENTS`. Columns and hooks of
            :data:`DECISIONS` have needs of their own. It is ``all_ranks`` if it compares groups in the update or calls
            ``batch.all_gather`` there, ``whole_groups`` if it compares members of a group, ``plain_rewards`` if it uses
            ``Rollout.reward``, and ``revisits`` if it goes by earlier visits of prompts.
        changes: What it takes away from others, by the same words: what to say of it after its name, such as ``lets
            groups leave in parts``.
        datasets: Data sets whose rows it acts on, as the user limits it; all if empty. Its hooks see no other rows.
    """

    writes: ClassVar[frozenset[str]] = frozenset()
    role: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    changes: ClassVar[Mapping[str, str]] = {}
    datasets: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        """Let a class of several plug-ins write what each of them does."""
        super().__init_subclass__()
        _join("writes", cls)

    def __post_init__(self) -> None:
        """Check the fields against their annotations; a plug-in that checks more calls it first."""
        check_fields(self)

    # ---- before a run ---------------------------------------------------------------------------------

    def requirement(self, name: str) -> Requirement:
        """Return what it needs of a run and takes away from others; overridden where that depends on a field's value.

        What its columns and its hooks of :data:`DECISIONS` need is added to that (:func:`requirement_of`).

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
    def numbers(self) -> RunNumbers:
        """Numbers of the run that it sets; its fields alone decide them."""
        return RunNumbers()

    @property
    def rewards(self) -> Sequence[RewardFunction]:
        """Reward functions that it brings, beside those of ``model.rewards``."""
        return ()

    def on_policy_start(self, eos_ids: Sequence[int]) -> None:
        """The policy has been loaded, before the first rollout; a completion ends at any of ``eos_ids``."""

    # ---- which prompts are asked, with what, and how often --------------------------------------------

    def prompt_state(
        self, prompts: Sequence[Prompt], records: Sequence[Record] = (), state: Mapping[str, float] | None = None
    ) -> Mapping[str, float]:
        """Return what the choice of prompts remembers: numbers by name, which are logged.

        It is called with ``prompts`` alone at the beginning of a run, and with all three after each batch.

        Args:
            prompts: All prompts that training may draw, with their columns; after a batch those of all ranks that were
                asked.
            records: Record of each prompt that was asked, this visit included.
            state: What it remembered before the batch; None at the beginning.

        Raises:
            ValueError: The prompts lack a column that it needs.
        """
        return state or {}

    def prompt_chance(self, prompt: Prompt, record: Record, state: Mapping[str, float]) -> float:
        """Return the chance, from 0 to 1, that a prompt is asked when it is due.

        Whether it is asked is drawn from a hash of the seed, its id and its visit, so that runs can be repeated.

        Args:
            prompt: The one that is due.
            record: What its earlier visits have shown.
            state: What :meth:`prompt_state` returned last.
        """
        return 1.0

    def rewrite(self, prompt: Prompt, writer: TextWriter, longest: bool = False) -> Prompt:
        """Return a training prompt as it is asked now, never longer than with ``longest``.

        The loader marks it as ``altered`` if the policy reads something else than the row says; the history of prompts
        then leaves the visit out. It keeps its ``prompt_id`` and ``visit``, and all ranks must rewrite alike.

        Args:
            prompt: Prompt as its row says.
            writer: Puts text into prompts.
            longest: Whether it is to have as many tokens as it may ever be asked with. So all training prompts are
                rewritten before the run starts, which checks that the longest fits into the policy's context.

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
            num_generations: Completions per prompt that the run sets, ``model.num_generations``.
            num_prompts: Prompts of an update, on each rank, if a mode opens more or fewer of them; by default these.
        """
        return [num_generations] * len(records)

    def next_round(self, num_rewarded: int, num_passed: int, num_rounds: int, num_first: int) -> int:
        """Return how many more a prompt gets, all of which so far have been rewarded; 0 ends it.

        Args:
            num_rewarded: Completions with a reward.
            num_passed: Number of rewarded completions that passed.
            num_rounds: Rounds that it has had, 1 or more.
            num_first: Completions of the first of them.
        """
        return 0

    def shared_round(self, tallies: Sequence[Tally], num_rounds: int, num_generations: int) -> list[int]:
        """Return how many more each prompt of this rank's batch gets, once all have been rewarded; all 0 ends it.

        It takes the place of :meth:`next_round` for a plug-in that compares prompts.

        Args:
            tallies: Tally of each prompt, in the order of their ids.
            num_rounds: Rounds that there have been, 1 or more.
            num_generations: Completions per prompt that the run sets, ``model.num_generations``.
        """
        return [0] * len(tallies)

    # ---- a batch; what happens in its rollout is told by the hooks of a listener ----------------------

    def on_batch_start(self) -> None:
        """A training batch is about to be sampled.

        Raises:
            CannotGoOn: The run cannot go on; all ranks raise it.
        """

    def add_members(self, batch: GroupBatch) -> None:
        """Add members to whole groups before the policy learns from them, or leave members out.

        Further groups of rollouts that are ``replayed`` join the batch if they are appended to ``batch.joining``.
        """

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
            num_prompts: Prompts of the batch before; at first ``data.batch_size``.
        """
        return num_prompts

    def on_train_start(self, run: TrainingRun) -> None:
        """Training begins or goes on; what a checkpoint had is loaded, and nothing has been sampled yet.

        Raises:
            ValueError: It cannot act on the run.
        """

    # ---- the update: columns are written, and nothing is returned --------------------------------------

    def on_batch(self, batch: Batch) -> None:
        """Write columns of rollouts, once for each batch: they have the advantages of the run's estimator.

        Plug-ins are called in the order of the columns that they declare in :attr:`writes`, by
        :data:`lit_grpo.plugins.columns.COLUMNS`. Of a rollout that is not trained on, the advantage is NaN and stays
        so, whatever is written for it. For example, imitation of correct completions besides the objective::

            writes = frozenset({"ce_weight"})

            def on_batch(self, batch):
                for rollout in batch.rollouts:
                    if rollout.reward == 1:
                        batch.set("ce_weight", rollout, [0.1] * rollout.completion.num_tokens)

        Args:
            batch: The part of the batch on this rank that the plug-in acts on. All ranks call the hook; it may gather
                their values if the plug-in needs ``all_ranks``.
        """

    def on_minibatch(self, step: Step) -> None:
        """Write columns of the rollouts of an optimizer step, before its first backward pass.

        It is called again where a step is taken again, or for each part of a step whose groups arrive one after
        another: the same rollouts and version have the same values. A plug-in that writes ``chunks`` or ``term`` is
        called when it is known which rows go through the policy, and ``step.rollouts`` are these.

        Args:
            step: Rollouts with an advantage and a token that is trained on, those of this rank that the plug-in acts
                on. A batch without rollouts has none.
        """

    def loss(self, tokens: Tokens) -> None:
        """Write columns of a micro-batch's tokens on its device, before its loss is computed.

        Args:
            tokens: With their log-probs by the policy, which carry the gradient.
        """

    def on_gradient(self, step: Step) -> None:
        """Write the ``scale`` of a step's learning rate, now that its gradient is complete; several are multiplied.

        All ranks call it together, unless the step's loss or gradient is not finite.

        Args:
            step: The optimizer step, whose ``log_weights_C`` is known now.
        """

    def on_optimizer_step(self, step: Step) -> None:
        """An optimizer step has been taken; all ranks call it.

        Args:
            step: With ``entropy`` and ``norms``.
        """

    def validate(self, measure: Measure, ranks: Ranks) -> Mapping[str, float]:
        """Return what a validation logs besides the rewards of completions, such as a loss on held-out examples.

        Args:
            measure: Measures tokens under the policy; all ranks call it together.
            ranks: Reductions over the ranks of the run, such as sums.

        Returns:
            Values by name, without ``val/``, the same on every rank.
        """
        return {}

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


def writing(plugins: Iterable[Kind], *columns: str) -> list[Kind]:
    """Return the plug-ins that write any of these columns of the update."""
    return [each for each in plugins if isinstance(each, Plugin) and not each.writes.isdisjoint(columns)]


class Decision(NamedTuple):
    """Something that at most one plug-in of a run may decide, beside what columns decide.

    Args:
        what: For messages, as in ``which both decide ...``.
        hooks: The hooks of :class:`Plugin` that decide it.
        needs: What deciding it needs of a run: words of :data:`lit_grpo.compatibility.REQUIREMENTS`.
        by_rows: Whether it is decided row by row, so that each data set may have a plug-in of its own for it.
        replaces: What a setting of the run decides otherwise, such as :data:`lit_grpo.compatibility.DENOMINATOR`.
    """

    what: str
    hooks: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    by_rows: bool = False
    replaces: str = ""


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
    Decision("how many prompts a batch has", ("batch_size",)),
)
UPDATE_HOOKS = ("on_batch", "on_minibatch", "loss", "on_gradient", "on_optimizer_step", "on_train_start")
"""Hooks that a learner calls."""


@dataclass(frozen=True)
class RunFacts:
    """The numbers of a run that a plug-in may depend on.

    Args:
        num_prompts: Prompts of a batch on each rank; None where the user's own dataloader says.
        num_generations: Completions per prompt, ``model.num_generations``.
        max_tokens: The most tokens of a completion.
        updates_per_batch: Optimizer steps on one batch.
        max_observed: The most tokens of a completion that are observed, in training or in validation: the smaller.
        divided_advantages: Whether the advantage estimator divides by a deviation of each group.
        normalization: How the loss weighs tokens, a :data:`lit_grpo.update.objective.tokens.Normalization`.
        corrected: Whether an importance-sampling correction weighs the loss.
        kl_beta: Weight of the KL term, ``model.objective.kl.beta``.
        adapters: The setting that has adapters trained, such as ``model.lora``; empty if all weights are trained.
        generator: The name of its class.
        abilities: Abilities of the generator; None if they are not known.
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
