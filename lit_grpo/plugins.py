"""The seam for methods: what a plug-in may decide in a run, and where it is asked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

from lit_grpo.compatibility import Requirement
from lit_grpo.limits import check_fields

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from lit_grpo.findings.reward_curves import Finding
    from lit_grpo.rewards.function import RewardFunction
    from lit_grpo.rollout.generator import Observation, StepEvents
    from lit_grpo.scheduling.ledger import RequestLedger
    from lit_grpo.types import Completion, Key, PassRule, Request, RolloutGroup, SamplePath

AllGather = Callable[[Any], list[Any]]
"""Brings a value of each rank together, in the order of the ranks; all ranks call it together."""
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
    """What a listener wants done with requests.

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
    """Where the policy's hidden states are looked at.

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
        """Where it looks at the policy's hidden state of each completion; None where it does not."""
        return None

    def observe(self, observation: Observation) -> None:
        """The policy shows its hidden states of completions that have come to the point of :attr:`observes`."""

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
        """Whether it waits for something with a time limit that has not passed: then nothing has come to a stop."""
        return False

    def on_rollout_end(self, failed: bool) -> None:
        """The rollout is over, or has ``failed``: what was told of it is void."""


ROLLOUT_HOOKS = tuple(name for name in vars(Listener) if name[0] != "_" and name not in Listener.__annotations__)
"""What one that listens to a rollout may override."""


@dataclass(frozen=True)
class GroupBatch:
    """The groups of a batch on this rank, and what a plug-in may go by beside them.

    Args:
        groups: With their rewards.
        version: Of the policy: how many updates it has had.
        pass_rule: When a completion passes.
        all_gather: See :data:`AllGather`.
    """

    groups: Sequence[RolloutGroup]
    version: int
    pass_rule: PassRule
    all_gather: AllGather


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

    A plug-in that decides something derives from the class that does so, and at most one plug-in of a run has each of
    these :attr:`roles`:

    ===============================================  =============================================================
    :class:`lit_grpo.budgets.prompts.PromptRule`     which prompts are asked when they are due
    :class:`lit_grpo.budgets.rewriting.Rewriting`    what a prompt is asked with
    :class:`lit_grpo.budgets.allocation.Allocation`  how many completions each prompt gets, in how many rounds
    :class:`lit_grpo.budgets.allocation.Replacement` how many prompts are asked in place of groups without signal
    :class:`lit_grpo.rollout.rules.RolloutMode`      when groups leave the buffer, and what becomes of the others
    :class:`lit_grpo.update.plugin.LearningPlugin`   which rollouts and tokens are learnt from, with which advantages,
                                                     in which chunks, with which further term of the loss, and how many
                                                     prompts a batch has: a role for each of these that it overrides
    ===============================================  =============================================================

    Attributes:
        role: What it decides, such as ``how many completions each prompt gets``; empty where it shares that with any.
        needs: What it needs of a run: words of :data:`lit_grpo.compatibility.REQUIREMENTS`.
        changes: What it takes away from others, by the same words: what to say of it after its name, such as ``lets
            groups leave in parts``.
        remedy: What to do, other than leaving it out, where it does not go with another part.
        common: Whether all ranks remember the same, which checkpoints then keep once.
        evaluates: Whether it hears of rollouts of validation, test and predict too.
    """

    role: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    changes: ClassVar[Mapping[str, str]] = {}
    remedy: ClassVar[str] = ""
    common: ClassVar[bool] = False
    evaluates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the fields against their annotations; a plug-in that checks more calls it first."""
        check_fields(self)

    # ---- before a run ---------------------------------------------------------------------------------

    @property
    def roles(self) -> Sequence[str]:
        """What it decides, which no other plug-in of the run may decide."""
        return [self.role] if self.role else []

    def requirement(self, name: str) -> Requirement:
        """Return what it needs of a run and takes away from others; overridden where that depends on a field's value.

        Args:
            name: What messages call it, such as ``rollout.plugins april``.
        """
        return Requirement(name, self.needs, self.changes, self.remedy)

    def check(self, run: RunFacts) -> None:
        """Check its fields against a run's numbers, and note what they settle.

        Raises:
            ValueError: They do not fit.
        """

    def check_policy(self, policy: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        """Check the policy that a run trains, and what takes its steps, before the first rollout.

        Called for plug-ins of :class:`lit_grpo.update.plugin.LearningPlugin`.

        Raises:
            ValueError: It cannot act on them.
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

    # ---- a batch; what happens in its rollout is told by the hooks of a listener ----------------------

    def on_batch_start(self) -> None:
        """A training batch is about to be sampled.

        Raises:
            CannotGoOn: The run cannot go on; all ranks raise it.
        """

    def add_members(self, batch: GroupBatch) -> None:
        """Add members to whole groups before the policy learns from them, or leave members out."""

    def metrics(self, all_gather: AllGather) -> Mapping[str, float]:
        """Return what to log of the last rollout; the first rank logs it. All ranks call it together."""
        return {}

    def on_update_end(self, batch: GroupBatch) -> Mapping[str, float]:
        """Learn from a batch that the policy has learnt from, whose version counts that update.

        Returns:
            What to log; a figure that was logged before and is left out now is logged as NaN.
        """
        return {}

    def batch_size(self, num_prompts: int) -> int:
        """Return how many prompts the next batch has on each rank.

        Called when a run begins or is resumed, and after each update.

        Args:
            num_prompts: Of the batch before; at first ``data.batch_size``.
        """
        return num_prompts

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


Copied = TypeVar("Copied", bound=Plugin)


def fresh(plugin: Copied) -> Copied:
    """Return a copy of a plug-in that remembers nothing yet, for one run."""
    begun = copy.copy(plugin)
    begun.setup()
    return begun


def overriding(listeners: Iterable[Kind], *hooks: str, base: type[Listener] = Plugin) -> list[Kind]:
    """Return those that override any of these hooks of a base class; the others need not be called."""
    return [each for each in listeners if any(getattr(type(each), hook) is not getattr(base, hook) for hook in hooks)]


class RunFacts:
    """The numbers of a run that a plug-in may depend on.

    Args:
        num_prompts: Prompts of a batch on each rank; None where the user's own dataloader says.
        num_generations: ``model.num_generations``.
        max_tokens: The most tokens of a completion.
        updates_per_batch: Optimizer steps on one batch.
        max_observed: The most tokens of a completion that are observed, in training or in validation: the smaller.
        divided_advantages: Whether the advantage estimator divides by a deviation of each group.
        normalization: How the loss weighs tokens, a :data:`lit_grpo.update.normalization.Normalization`.
        corrected: Whether an importance-sampling correction weighs the loss.
        generator: The name of its class.
        abilities: Of the generator; None where it is not known.
    """

    def __init__(
        self,
        num_prompts: int | None,
        num_generations: int,
        max_tokens: int,
        updates_per_batch: int,
        max_observed: int = 0,
        divided_advantages: bool = True,
        normalization: str = "token",
        corrected: bool = True,
        generator: str = "",
        abilities: Collection[str] | None = None,
    ) -> None:
        self.num_prompts, self.num_generations = num_prompts, num_generations
        self.max_tokens, self.updates_per_batch = max_tokens, updates_per_batch
        self.max_observed, self.divided_advantages = max_observed, divided_advantages
        self.normalization, self.corrected = normalization, corrected
        self.generator, self.abilities = generator, abilities

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
