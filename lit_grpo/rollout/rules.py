"""When groups leave the buffer and what becomes of the others, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from lit_grpo.settings import by_name, check_number

if TYPE_CHECKING:
    from lit_grpo.rollout.generator import Generator

Refill = Literal["always", "when_empty"]
Unit = Literal["group", "completion"]
Leftovers = Literal["finish", "keep", "mask", "discard"]
Overlap = Literal["none", "within", "across"]
AtSync = Literal["recompute", "keep", "drain"]


@dataclass(frozen=True)
class ReleaseRule:
    """What a buffer waits for, and what becomes of what is unfinished then.

    Args:
        num_groups: Whole groups that a release waits for; None for all that are open.
        num_completions: Completions that a release waits for instead, of whatever groups: a group then leaves in parts.
        num_steps: Decode steps that a rollout takes instead, whatever has ended then (at least one completion).
        leftovers: What is done with requests that are unfinished at a release: there are none, because it waits for all
            (``finish``); they go on from their prefixes next time (``keep``), which are not learnt from (``mask``), or
            from their beginnings (``discard``).
        max_staleness: Policy updates that may lie between the version that sampled the oldest token of a completion and
            the one that learns from it, the time that it waits for its release included. What is older is sampled anew.
        max_restarts: How often a group may lose tokens; from then on a release waits for it where it would lose more.
        num_updates: Policy updates from one release to the next.
    """

    num_groups: int | None = None
    num_completions: int | None = None
    num_steps: int | None = None
    leftovers: Leftovers = "finish"
    max_staleness: int = 0
    max_restarts: int | None = None
    num_updates: int = 1

    @property
    def releases_parts(self) -> bool:
        """Whether a group may leave in parts."""
        return self.num_completions is not None


SYNCHRONOUS = ReleaseRule()
"""All groups of a batch, whole, sampled by the policy that learns from them."""


@dataclass(frozen=True)
class RolloutMode:
    """How rollouts and updates take turns.

    A *batch* is ``data.batch_size`` prompts with ``model.num_generations`` completions each.

    Args:
        batches_in_work: Batches of prompts that are open at a time, 1 or more: those above 1 keep slots busy while the
            longest completions of a batch are still being decoded. By default ``max_staleness + 1``: as many as can be
            learnt from before they are too old.
        refill: Whether new prompts join at every update (``always``), or only once every open one has been learnt from
            (``when_empty``; SortedRL's grouped loading).
        unit: What an update waits for: a batch of whole groups (``group``), or as many completions of any groups
            (``completion``), the first that end. A group then leaves in parts, each part's advantages being over all
            members that have ended so far: the first parts are of short completions alone.
        leftovers: What becomes of completions that are unfinished when a batch is ready: there are none, because it
            waits for all (``finish``); they go on next time with the tokens and log-probs that they have (``keep``), of
            which only those that are still to come are learnt from (``mask``); or they begin anew (``discard``).
        max_staleness: Policy updates that may lie between the oldest token of a completion and the update that learns
            from it, waiting included; what would be older is sampled anew. 0 is on-policy.
        max_restarts: How often a prompt may lose tokens by that; from then on the update waits for its completions
            before they would lose more. With 0 nothing is lost: updates wait.
        tokens_per_update: A rollout ends after so many decode steps, whatever has ended then.
        overlap: What is decoded during an update: nothing (``none``); groups of its own batch, while it learns from
            those that are whole, with one optimizer step at the end (``within``; on-policy); or the next batches
            (``across``). Both need a generator with devices of its own.
        at_sync: What becomes of completions that are being decoded when new weights come: they go on, and their keys
            and values are computed anew (``recompute``) or stay those of the old weights (``keep``, vLLM alone); or
            the weights wait for them, while nothing else begins (``drain``).
        prune_at: Once all completions of a group have so many tokens or have ended, some are dropped
            (:class:`lit_grpo.rollout.pruning.Pruner`); None drops nobody.
        keep: Share of those that are still decoded then that goes on.
        positive_share: Of successes, that a group is to have then.

    Raises:
        ValueError: The fields contradict each other.
    """

    batches_in_work: float | None = None
    refill: Refill = "always"
    unit: Unit = "group"
    leftovers: Leftovers = "finish"
    max_staleness: int = 0
    max_restarts: int = 3
    tokens_per_update: int | None = None
    overlap: Overlap = "none"
    at_sync: AtSync = "recompute"
    prune_at: int | None = None
    keep: float = 0.5
    positive_share: float = 0.5

    def __post_init__(self) -> None:
        self._check_pruning()
        for name, choices in CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, not {getattr(self, name)!r}.")
        if self.batches_in_work is not None:
            check_number("batches_in_work", self.batches_in_work, 1, int | float)
        for name, least in (("max_staleness", 0), ("max_restarts", 0), ("tokens_per_update", 1)):
            if not (name == "tokens_per_update" and self.tokens_per_update is None):
                check_number(name, getattr(self, name), least, int)
        goes_on, steps = self.leftovers in ("keep", "mask"), self.tokens_per_update
        if self.leftovers == "finish" and (self.num_batches > 1 or steps is not None or self.unit == "completion"):
            raise ValueError(
                f"batches_in_work {self.num_batches:g}, unit {self.unit!r} and tokens_per_update {steps} leave "
                "completions unfinished, and leftovers 'finish' allows none: take keep, mask or discard."
            )
        if goes_on and not self.max_staleness:
            raise ValueError(
                f"leftovers {self.leftovers!r} goes on from tokens of an older policy, which max_staleness 0 never "
                "lets out; give a max_staleness of 1 or more, or discard them."
            )
        if steps is not None and not goes_on:
            raise ValueError(
                f"tokens_per_update {steps} with leftovers 'discard' would never end a completion that is longer: take "
                "keep or mask."
            )
        _check_overlap(self)

    @property
    def num_batches(self) -> float:
        """Batches of prompts that are open at a time."""
        return self.max_staleness + 1 if self.batches_in_work is None else self.batches_in_work

    def _check_pruning(self) -> None:
        if self.prune_at is not None:
            check_number("prune_at", self.prune_at, 1, int)
            if self.leftovers != "finish":
                raise ValueError(
                    f"prune_at {self.prune_at} compares the completions of one rollout, and leftovers "
                    f"{self.leftovers!r} spreads a group over several: take finish, or leave prune_at out."
                )
            if self.overlap != "none":
                raise ValueError(
                    f"prune_at {self.prune_at} looks at hidden states, which overlap {self.overlap!r} does without: "
                    "take overlap none, or leave prune_at out."
                )
        for name in ("keep", "positive_share"):
            check_number(name, getattr(self, name), 0, int | float)
            if getattr(self, name) > 1:
                raise ValueError(f"{name} is a share, so it must be at most 1, not {getattr(self, name)}.")

    @property
    def carries(self) -> bool:
        """Whether prompts stay open from one update to the next."""
        return self.leftovers != "finish"

    def rule(self, num_prompts: int, num_generations: int, num_updates: int = 1) -> ReleaseRule:
        """Return what the buffer waits for, where a batch is of so many prompts, completions each, and updates."""
        if not self.carries:
            return SYNCHRONOUS
        steps, by_completion = self.tokens_per_update, self.unit == "completion"
        return ReleaseRule(
            num_groups=None if by_completion else num_prompts,
            num_completions=num_prompts * num_generations if by_completion else None,
            num_steps=steps,
            leftovers=self.leftovers,
            max_staleness=self.max_staleness,
            max_restarts=self.max_restarts,
            num_updates=num_updates,
        )

    def num_wanted(self, num_open: int, num_prompts: int) -> int:
        """Return how many prompts are to be opened, where so many are open and a batch is of ``num_prompts``."""
        if self.refill == "when_empty" and num_open:
            return 0
        return max(math.ceil(self.num_batches * num_prompts) - num_open, 0)

    def check(self, steps_per_batch: int, max_tokens: int, num_generations: int = 2, predicts: bool = True) -> None:
        """Check that it goes with a run's updates.

        Args:
            steps_per_batch: Optimizer steps on one batch.
            max_tokens: Of a completion.
            num_generations: Completions of a group.
            predicts: Whether hidden states are looked at, which lengths are predicted from.

        Raises:
            ValueError: It does not.
        """
        if self.leftovers in ("keep", "mask") and self.max_staleness < steps_per_batch:
            raise ValueError(
                f"The mode's max_staleness is {self.max_staleness}, and every batch takes {steps_per_batch} optimizer "
                f"steps, so nothing could ever go on; give {steps_per_batch} or more."
            )
        if self.tokens_per_update is not None and self.tokens_per_update >= max_tokens:
            raise ValueError(
                f"The mode's tokens_per_update is {self.tokens_per_update}, and sampling.max_tokens is {max_tokens}, "
                "so every completion would end in one rollout; give less, or take the mode synchronous."
            )
        if self.overlap == "within" and steps_per_batch > 1:
            raise ValueError(
                f"The mode's overlap is within, which takes one optimizer step once a batch is whole, and "
                f"model.num_iterations x model.num_minibatches is {steps_per_batch}; set both to 1."
            )
        if self.prune_at is not None:
            _check_pruning(self.prune_at, max_tokens, num_generations, predicts)


CHOICES = {"refill": Refill, "unit": Unit, "leftovers": Leftovers, "overlap": Overlap, "at_sync": AtSync}


def _check_overlap(mode: RolloutMode) -> None:
    if mode.overlap == "within" and mode.carries:
        raise ValueError(
            f"overlap 'within' learns from one batch as it becomes whole, and leftovers {mode.leftovers!r} keeps "
            "prompts for later ones; take overlap across, or leftovers finish."
        )
    if mode.overlap == "across" and mode.leftovers not in ("keep", "mask"):
        raise ValueError(
            f"overlap 'across' decodes while weights change, and leftovers {mode.leftovers!r} lets nothing go on; take "
            "keep or mask."
        )
    if mode.overlap == "across" and mode.tokens_per_update is not None:
        raise ValueError(
            f"tokens_per_update {mode.tokens_per_update} ends a rollout, and with overlap 'across' none ends; leave it "
            "out, or take overlap none."
        )
    if mode.overlap == "across" and mode.num_batches > mode.max_staleness + 1:
        raise ValueError(
            f"batches_in_work {mode.num_batches:g} is more than max_staleness {mode.max_staleness} allows: the last of "
            f"them would be too old when its turn comes; give at most {mode.max_staleness + 1}, or leave it out."
        )
    if mode.at_sync == "drain" and mode.overlap != "across":
        raise ValueError("at_sync 'drain' waits for what is decoded beside an update; take overlap across with it.")


def _check_pruning(prune_at: int, max_tokens: int, num_generations: int, predicts: bool) -> None:
    if prune_at > max_tokens - 2:
        raise ValueError(
            f"The mode's prune_at is {prune_at}, and sampling.max_tokens is {max_tokens}: {max(max_tokens - 2, 0)} is "
            "the largest that leaves anything to save; give less (rollout.mode pruned:prune_at=...)."
        )
    if num_generations < 3:
        raise ValueError(
            f"The mode's prune_at needs groups of 3 or more, of which two stay, and num_generations is "
            f"{num_generations}; give more, or take the mode synchronous."
        )
    if not predicts:
        raise ValueError(
            "The mode's prune_at foretells success from hidden states, and rollout.predict_lengths is false: "
            "set it to true."
        )


MODES: dict[str, RolloutMode] = {
    "synchronous": RolloutMode(),
    "april": RolloutMode(batches_in_work=2, leftovers="keep", max_staleness=8),
    "sortedrl": RolloutMode(batches_in_work=4, refill="when_empty", unit="completion", leftovers="discard"),
    "sortedrl_partial": RolloutMode(
        batches_in_work=4, refill="when_empty", unit="completion", leftovers="keep", max_staleness=16
    ),
    "chunked": RolloutMode(
        batches_in_work=2, unit="completion", leftovers="keep", max_staleness=16, tokens_per_update=1024
    ),
    "periodic": RolloutMode(overlap="within"),
    "asynchronous": RolloutMode(leftovers="keep", max_staleness=2, max_restarts=0, overlap="across"),
    "pruned": RolloutMode(prune_at=512, keep=0.5, positive_share=0.5),
}
"""Modes by name: docs/modes.md says where each comes from."""


def make_mode(spec: str) -> RolloutMode:
    """Return a mode.

    Args:
        spec: A name of ``MODES``, or the class path of a :class:`RolloutMode`; behind a colon fields and their values,
            as in ``april:batches_in_work=3,max_staleness=4``.

    Raises:
        ValueError: There is no such mode or field, or a value does not fit.
    """
    return by_name("rollout.mode", spec, MODES, RolloutMode)


def check_generator(spec: str, mode: RolloutMode, generator: Generator) -> None:
    """Check that a generator can do what a mode asks of it.

    Raises:
        ValueError: It decodes on the policy's device, or drops keys and values that are to be kept.
    """
    name = type(generator).__name__
    if mode.overlap != "none" and "own_devices" not in generator.abilities:
        others = ", ".join(name for name, other in MODES.items() if other.overlap == "none")
        raise ValueError(
            f"rollout.mode {spec} decodes while the policy is updated, and {name} decodes on the policy's "
            f"device: take model.generator vllm_servers, or a mode that takes turns ({others})."
        )
    if mode.at_sync == "keep" and "keeps_kv" not in generator.abilities:
        raise ValueError(
            f"rollout.mode {spec} keeps keys and values over a sync, and {name} drops them as it is set up; take "
            "at_sync=recompute, or a generator of vLLM's without adapters: alone."
        )


def check_resumed(own: tuple[str, int], before: tuple[str, int], num_open: int) -> None:
    """Check that a run can go on with the prompts that a checkpoint has in work.

    Args:
        own: Its mode and number of ranks.
        before: Those of the run that saved.
        num_open: Prompts in work.

    Raises:
        ValueError: Prompts are open that another mode has begun with, or as many ranks as are not there.
    """
    if num_open and own != before:
        raise ValueError(
            f"The checkpoint has {num_open} prompts in work, begun on {before[1]} ranks in the rollout.mode "
            f"{before[0]}, and this run has {own[1]} and {own[0]}: go on as it was."
        )


def check_estimator(spec: str, mode: RolloutMode, estimator: str) -> None:
    """Check that an estimator of advantages, by its name, can do with the groups that a mode lets out.

    Raises:
        ValueError: It remembers whole visits, and groups leave in parts.
    """
    if mode.unit == "completion" and estimator == "dcpo":
        raise ValueError(
            f"advantages.estimator dcpo remembers each visit of a prompt, and rollout.mode {spec} lets its "
            "group leave in parts; add unit=group, or take another estimator."
        )
