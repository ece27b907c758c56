"""When groups leave the buffer and what becomes of the others, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from lit_grpo.plugins import Plugin, RunFacts
from lit_grpo.settings import check_number

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
            the one that learns from it, the time before its release included. What is older is sampled again.
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
class RolloutMode(Plugin):
    """How rollouts and updates take turns: here, one batch is sampled whole, and then learnt from.

    A *batch* is ``data.batch_size`` prompts with ``model.num_generations`` completions each.

    Args:
        batches_in_work: Batches of prompts that are open at a time, 1 or more: those above 1 keep slots busy while the
            longest completions of a batch are still being decoded. By default ``max_staleness + 1``: as many as can be
            learnt from before they are too old.
        refill: Whether new prompts join at every update (``always``), or only once every open one has been learnt from
            (``when_empty``).
        unit: What an update waits for: a batch of whole groups (``group``), or as many completions of any groups
            (``completion``), the first that end. A group then leaves in parts, each part's advantages being over all
            members that have ended so far: the first parts are of short completions alone.
        leftovers: What becomes of completions that are unfinished when a batch is ready: there are none, because it
            waits for all (``finish``); they go on next time with the tokens and log-probs that they have (``keep``), of
            which only those that are still to come are learnt from (``mask``); or they begin again (``discard``).
        max_staleness: Policy updates that may lie between the oldest token of a completion and the update that learns
            from it, waiting included; what would be older is sampled again. 0 is on-policy.
        max_restarts: How often a prompt may lose tokens by that; from then on the update waits for its completions
            before they would lose more. With 0 nothing is lost: updates wait.
        tokens_per_update: A rollout ends after so many decode steps, whatever has ended then.
        overlap: What is decoded during an update: nothing (``none``); groups of its own batch, while it learns from
            those that are whole, with one optimizer step at the end (``within``; on-policy); or the next batches
            (``across``). Both need a generator with devices of its own.
        at_sync: What becomes of completions that are being decoded when new weights come: they go on, and their keys
            and values are computed again (``recompute``) or stay those of the old weights (``keep``, vLLM alone); or
            the weights wait for them, while nothing else begins (``drain``).

    Raises:
        ValueError: The fields contradict each other.
    """

    role: ClassVar[str] = "when groups leave the buffer"

    batches_in_work: float | None = None
    refill: Refill = "always"
    unit: Unit = "group"
    leftovers: Leftovers = "finish"
    max_staleness: int = 0
    max_restarts: int = 3
    tokens_per_update: int | None = None
    overlap: Overlap = "none"
    at_sync: AtSync = "recompute"

    def __post_init__(self) -> None:
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

    @property
    def needs(self) -> frozenset[str]:
        """What it takes prompts from, and what the generator has to be able to do."""
        needs = {"prompt_stream"} if self.carries else set()
        needs |= {"own_devices"} if self.overlap != "none" else set()
        needs |= {"keeps_kv"} if self.at_sync == "keep" else set()
        return frozenset(needs)

    @property
    def changes(self) -> Mapping[str, str]:
        """What it does to groups and rollouts."""
        changes: dict[str, str] = {}
        if self.unit == "completion":
            changes["whole_groups"] = "lets groups leave in parts"
        if self.carries:
            changes["whole_rollouts"] = "keeps groups open from one rollout to the next"
        if self.overlap != "none":
            changes["whole_rollouts"] = "decodes while the policy is updated"
            changes["hidden_states"] = "looks at no hidden states"
        return changes

    @property
    def remedy(self) -> str:
        """Whole groups can be had."""
        return "add unit=group to it" if self.unit == "completion" else ""

    def check(self, run: RunFacts) -> None:
        """Check that it goes with a run's updates.

        Raises:
            ValueError: It does not.
        """
        steps_per_batch, max_tokens = run.updates_per_batch, run.max_tokens
        if self.leftovers in ("keep", "mask") and self.max_staleness < steps_per_batch:
            raise ValueError(
                f"max_staleness is {self.max_staleness}, and every batch takes {steps_per_batch} optimizer "
                f"steps, so nothing could ever go on; give {steps_per_batch} or more."
            )
        if self.tokens_per_update is not None and self.tokens_per_update >= max_tokens:
            raise ValueError(
                f"tokens_per_update is {self.tokens_per_update}, and sampling.max_tokens is {max_tokens}, "
                "so every completion would end in one rollout; give less, or leave it out."
            )
        if self.overlap == "within" and steps_per_batch > 1:
            raise ValueError(
                f"overlap is within, which takes one optimizer step once a batch is whole, and "
                f"model.num_iterations x model.num_minibatches is {steps_per_batch}; set both to 1."
            )


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
