"""The seam for methods: what a plug-in may decide in a run, and where it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from lit_grpo.limits import check_fields

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from lit_grpo.findings.reward_curves import Finding
    from lit_grpo.rewards.function import RewardFunction
    from lit_grpo.rollout.generator import StepEvents
    from lit_grpo.scheduling.ledger import RequestLedger
    from lit_grpo.types import Completion, Key, PassRule, Request, RolloutGroup, SamplePath


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
        go_on: These have sampled a turn, and go on after their prefixes, which may hold more observed tokens than
            before: a request that has just come to the end of a turn, or one that is away.
        hold: These have just come to the end of a turn, and are *away* until a later answer lets them ``go_on``, or
            names them in ``finish`` or ``drop``. Their slots are free meanwhile, and their groups open.
        finish: Completions of requests that are away.
        again: These are away, and begin again after their prefixes: what was sampled after those is lost.
        rewritten: These are away, and go on after other tokens than those they have come to: the listener keeps what
            they have sampled, and puts it together in what it names in ``finish``.
    """

    submit: Sequence[Request] = ()
    fork: Mapping[Key, Sequence[SamplePath]] = field(default_factory=dict)
    open: Sequence[Request] = ()
    drop: Sequence[Key] = ()
    go_on: Sequence[Request] = ()
    hold: Sequence[Key] = ()
    finish: Sequence[Completion] = ()
    again: Sequence[Request] = ()
    rewritten: Sequence[Request] = ()


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

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        """A rollout begins; ``ledger`` tells what is in work for as long as it lasts.

        ``ledger.away`` are the requests that were away when the last rollout ended: a listener that held them answers
        for them in this one.
        """

    def on_requests(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Requests are asked for, before any of them waits for a slot; return those that are to be away first.

        They stay away until a later answer lets them ``go_on``, for example after an environment has been reset, whose
        first words they then observe. At the beginning of a rollout those that were away when the last one ended are
        among them, and stay away; one that is returned without a prefix begins again.
        """
        return ()

    def on_step(self, events: StepEvents) -> Answer | None:
        """A step has been taken."""

    def on_turn(self, completion: Completion) -> Answer | None:
        """A request has sampled a turn: it is over, unless the answer lets it ``go_on`` or ``hold``s it.

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


class Plugin:
    """An optional method of a run, given by name or class path in ``rollout.plugins``.

    A plug-in is a dataclass: its fields are what the user can set, as in ``{knapsack: {budget: 256}}``, and their
    annotations say which values they take (:mod:`lit_grpo.limits`). What it decides is said by the class that it
    derives from, one of:

    ==================================================  ==========================================================
    :class:`lit_grpo.budgets.prompts.PromptRule`        which prompts are asked when they are due
    :class:`lit_grpo.budgets.rewriting.Rewriting`       what a prompt is asked with
    :class:`lit_grpo.budgets.allocation.Allocation`     how many completions each prompt gets, in how many rounds
    :class:`lit_grpo.budgets.allocation.Replacement`    how many prompts are asked in place of groups without signal
    :class:`lit_grpo.budgets.batch_size.BatchSize`      how many prompts a batch has
    :class:`lit_grpo.update.selection.Selection`        which rollouts are learnt from, and which of their tokens
    :class:`lit_grpo.update.advantages.shaping.Shaping` what each rollout is learnt from with
    :class:`lit_grpo.update.credit.Credit`              what each turn or token is learnt from with
    :class:`lit_grpo.update.chunking.Chunking`          which completions go through the policy in chunks
    :class:`lit_grpo.update.auxiliary.Auxiliary`        what is added to the objective's loss
    :class:`lit_grpo.rollout.rules.RolloutMode`         when groups leave the buffer, and what becomes of the others
    :class:`Plugin` itself                              what its :class:`Worker` does during and after a rollout
    ==================================================  ==========================================================

    There is at most one plug-in of each of these classes, and any number of others.
    """

    role: ClassVar[str] = ""
    """What a class of plug-ins decides, such as ``how many completions each prompt gets``; one of a role is enough."""

    def __post_init__(self) -> None:
        """Check the fields against their annotations; a plug-in that checks more calls it first."""
        check_fields(self)

    @property
    def needs(self) -> frozenset[str]:
        """What it needs of a run: words of :data:`lit_grpo.compatibility.REQUIREMENTS`."""
        return frozenset()

    @property
    def changes(self) -> Mapping[str, str]:
        """What it takes away from others, by the same words; see :class:`lit_grpo.compatibility.Part`."""
        return {}

    @property
    def remedy(self) -> str:
        """What to do, other than leaving it out, where it does not go with another part."""
        return ""

    def check(self, run: RunFacts) -> None:
        """Check its fields against a run's numbers.

        Raises:
            ValueError: They do not fit.
        """

    def check_policy(self, policy: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        """Check the policy that a run trains, and what takes its steps, before the first rollout.

        Plug-ins are asked that a learner goes by (:data:`lit_grpo.update.learner_settings.ROLES`).

        Raises:
            ValueError: It cannot act on them.
        """

    def worker(self) -> Worker | None:
        """Return what acts for it during a run, where it does more than to decide."""
        return None


class RunFacts:
    """The numbers of a run that a plug-in may depend on.

    Args:
        num_prompts: Prompts of a batch on each rank; None where the user's own dataloader says.
        num_generations: ``model.num_generations``.
        max_tokens: The most tokens of a completion.
        updates_per_batch: Optimizer steps on one batch.
        max_observed: The most tokens of a completion that are observed, in training or in validation: the smaller.
        divided_advantages: Whether the advantage estimator divides by a deviation of each group.
    """

    def __init__(
        self,
        num_prompts: int | None,
        num_generations: int,
        max_tokens: int,
        updates_per_batch: int,
        max_observed: int = 0,
        divided_advantages: bool = True,
    ) -> None:
        self.num_prompts, self.num_generations = num_prompts, num_generations
        self.max_tokens, self.updates_per_batch = max_tokens, updates_per_batch
        self.max_observed, self.divided_advantages = max_observed, divided_advantages


class CannotGoOn(RuntimeError):
    """A run cannot go on, as a plug-in finds between two batches, on all ranks together: the run is saved and ends."""


class Worker(Listener):
    """What acts for a plug-in during a run; it owns what the plug-in remembers.

    It hears of every training rollout, as any :class:`Listener`, and may answer.

    Attributes:
        point: The number of tokens at which it looks at the policy's hidden state of each completion; None for none.
        common: Whether all ranks have the same state, which checkpoints then keep once.
        evaluates: Whether it hears of rollouts of validation, test and predict too.
    """

    point: int | None = None
    common: bool = False
    evaluates: bool = False

    @property
    def rewards(self) -> Sequence[RewardFunction]:
        """Reward functions that it brings, beside those of ``model.rewards``."""
        return ()

    def start(self, eos_ids: Sequence[int]) -> None:
        """The policy has been loaded, before the first rollout; a completion ends at any of ``eos_ids``."""

    @property
    def gathers(self) -> bool:
        """Whether all completions are to reach ``point`` before any goes on."""
        return False

    def check_goes_on(self) -> None:
        """A training batch is about to be sampled.

        Raises:
            CannotGoOn: The run cannot go on; all ranks raise it.
        """

    def join(self, groups: Sequence[RolloutGroup], version: int) -> None:
        """Let members join whole groups before the policy of ``version`` learns from them, or leave members out."""

    def learnt(
        self,
        groups: Sequence[RolloutGroup],
        pass_rule: PassRule,
        version: int,
        gather: Callable[[Any], list[Any]],
    ) -> dict[str, float]:
        """Learn from a batch that the policy has learnt from.

        Args:
            groups: Of this rank.
            pass_rule: When a completion passes.
            version: Of the policy now.
            gather: Brings values of all ranks together in their order; all of them call it.

        Returns:
            What to log; a figure that was logged before and is left out now is logged as NaN.
        """
        return {}

    def metrics(self) -> dict[str, float]:
        """Return what to log of the last rollout, on this rank."""
        return {}

    def metrics_of_ranks(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """Return what to log of the last rollout over all ranks; by default :meth:`metrics`, which the first rank logs.

        Args:
            gather: Brings values of all ranks together in their order; all of them call it.
        """
        return self.metrics()

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


def join_all(workers: Iterable[Worker], groups: Sequence[RolloutGroup], version: int) -> None:
    """Let every worker in turn have its members join."""
    for worker in workers:
        worker.join(groups, version)
