"""Rules, as data: when groups leave the buffer, and what becomes of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal, final

from lit_grpo.compatibility import Clash, Requirement, check_clashes
from lit_grpo.limits import Count, Limit, Number
from lit_grpo.plugins import Plugin, RunFacts

Leftovers = Literal["finish", "keep", "discard"]


@dataclass(frozen=True)
class ReleaseRule:
    """Condition for a release of the buffer, and the handling of unfinished requests at a release."""

    num_groups: int | None = None
    """Number of complete groups that a release waits for; None for all that are unfinished."""
    num_completions: int | None = None
    """Number of completions, of any groups, that a release waits for instead: a group then leaves in parts."""
    num_steps: int | None = None
    """Number of decode steps after which a rollout ends instead, with at least one completion."""
    leftovers: Leftovers = "finish"
    """Handling of requests that are unfinished at a release: none are, because it waits for all (``finish``); they
    resume from their prefixes in the next rollout (``keep``), or restart (``discard``).
    """
    max_staleness: int = 0
    """Max policy updates between the version that sampled the oldest token of a completion and the version that trains
    on it, including the time before its release. Older tokens are sampled again.
    """
    max_restarts: int | None = None
    """Max number of times that a group loses tokens; from then on a release waits for the group."""
    num_updates: int = 1
    """Number of policy updates from one release to the next."""

    @cached_property
    def releases_parts(self) -> bool:
        return self.num_completions is not None


SYNCHRONOUS = ReleaseRule()
"""All groups of a batch, whole, sampled by the policy that learns from them."""


LACKING = {
    "own_devices": (
        "a generator with devices of its own",
        "decodes on the policy's device",
        "take model.generator vllm_server",
    ),
    "keeps_kv": (
        "a generator that can keep keys and values over a sync of weights",
        "drops them",
        "take at_sync=recompute",
    ),
}
"""What a mode needs of a generator, what one without the ability does, and the remedy."""


@final
@dataclass
class RolloutMode(Plugin):
    """Rollout mode, the order of rollouts and updates: by default one batch is sampled completely, and then trained on.

    A *batch* is ``data.batch_size`` prompts with ``model.num_generations`` completions each. A mode is data: a mode of
    your own sets other values, as in ``{lit_grpo.rollout.rules.RolloutMode: {leftovers: keep, max_staleness: 4}}``.

    Raises:
        ValueError: The fields contradict each other.
    """

    role: ClassVar[str] = "when groups leave the buffer"

    batches_in_work: Annotated[float, Limit(ge=1)] | None = None
    """Number of unfinished batches of prompts at a time, 1 or more: those above 1 keep slots busy while the longest
    completions of a batch are still being decoded. By default ``max_staleness + 1``: as many as can be trained on
    before they are too old.
    """
    refill: Literal["always", "when_empty"] = "always"
    """Time at which new prompts join: at every update (``always``), or once all unfinished prompts have been trained on
    (``when_empty``).
    """
    unit: Literal["group", "completion"] = "group"
    """Unit that an update waits for: a batch of complete groups (``group``), or as many completions of any groups
    (``completion``), the first that end. A group then leaves in parts, and each part's advantages are over all
    completions of the group that have ended so far: the first parts are only short completions.
    """
    leftovers: Leftovers = "finish"
    """Handling of completions that are unfinished when a batch is ready: none are, because it waits for all
    (``finish``); they resume in the next rollout with the tokens and log-probs that they have (``keep``); or they
    restart (``discard``).
    """
    max_staleness: Number = 0
    """Max policy updates between the oldest token of a completion and the update that trains on it, waiting included;
    older tokens are sampled again. 0 is on-policy.
    """
    max_restarts: Number = 3
    """Max number of times that a prompt loses tokens by that; from then on the update waits for its completions. With 0
    nothing is lost: updates wait.
    """
    tokens_per_update: Count | None = None
    """Number of decode steps after which a rollout ends, with the completions that have ended by then."""
    overlap: Literal["none", "within", "across"] = "none"
    """Rollouts that are decoded during an update: none (``none``); groups of its own batch, while it trains on those
    that are complete, with one optimizer step at the end (``within``; on-policy); or the next batches (``across``).
    Both need a generator with devices of its own.
    """
    at_sync: Literal["recompute", "keep", "drain"] = "recompute"
    """Handling of completions that are being decoded when new weights are sent: they continue, and their KV cache is
    computed again (``recompute``) or stays that of the old weights (``keep``, only vLLM); or the weights wait for them,
    while nothing else begins (``drain``).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clashes(self._clashes)
        if self.overlap == "across" and self.max_batches > self.max_staleness + 1:
            raise ValueError(
                f"batches_in_work {self.max_batches:g} is more than max_staleness {self.max_staleness} allows: the "
                f"last of them would be too old when its turn comes; give at most {self.max_staleness + 1}, or leave "
                "it out."
            )

    @property
    def _clashes(self) -> list[Clash]:
        leftovers, overlap = f"leftovers {self.leftovers}", f"overlap {self.overlap}"
        steps, goes_on, across = self.tokens_per_update, self.leftovers == "keep", self.overlap == "across"
        ends = "leaves none unfinished" if self.leftovers == "finish" else "begins them again"
        keep = "take leftovers keep"
        leaves_open = {
            f"batches_in_work {self.max_batches:g}": self.max_batches > 1,
            "unit completion": self.unit == "completion",
            f"tokens_per_update {steps}": steps is not None,
        }
        return [
            *(
                Clash(
                    f"{name} needs completions that may be unfinished at an update",
                    "leftovers finish allows none",
                    found=is_set and not self.carries,
                    remedy=keep,
                )
                for name, is_set in leaves_open.items()
            ),
            Clash(
                f"{leftovers} needs tokens of older policies to be trained on",
                "max_staleness 0 never lets them out of the buffer",
                found=goes_on and not self.max_staleness,
                remedy="give a max_staleness of 1 or more",
            ),
            Clash(
                f"tokens_per_update {steps} needs unfinished completions to go on",
                f"{leftovers} {ends}",
                found=steps is not None and not goes_on,
                remedy=keep,
            ),
            Clash(
                "overlap within needs every prompt of a batch to end with it",
                f"{leftovers} keeps some for later ones",
                found=self.overlap == "within" and self.carries,
                remedy="take leftovers finish",
            ),
            Clash(
                "overlap across needs unfinished completions to go on",
                f"{leftovers} {ends}",
                found=across and not goes_on,
                remedy=keep,
            ),
            Clash(
                f"tokens_per_update {steps} needs rollouts that end",
                "overlap across never ends one",
                found=across and steps is not None,
            ),
            Clash(
                "at_sync drain needs decoding to go on while weights change",
                f"{overlap} stops it",
                found=self.at_sync == "drain" and not across,
                remedy="take overlap across",
            ),
        ]

    @property
    def max_batches(self) -> float:
        """Max number of batches of unfinished prompts at a time."""
        return self.max_staleness + 1 if self.batches_in_work is None else self.batches_in_work

    @cached_property
    def carries(self) -> bool:
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
        return max(math.ceil(self.max_batches * num_prompts) - num_open, 0)

    def requirement(self, name: str) -> Requirement:
        """Its source of prompts, and its effect on groups and rollouts."""
        changes: dict[str, str] = {}
        if self.unit == "completion":
            changes["whole_groups"] = "lets groups leave in parts"
        if self.carries:
            changes["whole_rollouts"] = "keeps groups open from one rollout to the next"
        if self.overlap != "none":
            changes["whole_rollouts"] = "decodes while the policy is updated"
        remedy = "add unit=group to it" if self.unit == "completion" else ""
        return Requirement(name, frozenset({"prompt_stream"} if self.carries else ()), changes, remedy)

    def check(self, run: RunFacts) -> None:
        """Check that it goes with a run's generator and updates.

        Raises:
            ValueError: It does not.
        """
        if self.overlap == "within":
            run.check_one_step()
        needs = {"own_devices": self.overlap != "none", "keeps_kv": self.at_sync == "keep"}
        for ability in (name for name, is_needed in needs.items() if is_needed):
            if run.abilities is not None and ability not in run.abilities:
                wanted, done, remedy = LACKING[ability]
                raise ValueError(
                    f"it needs {wanted}, and model.generator {run.generator} {done}; {remedy}, or leave one of the two "
                    "out."
                )
        steps_per_batch, max_tokens = run.updates_per_batch, run.max_tokens
        if self.leftovers == "keep" and self.max_staleness < steps_per_batch:
            raise ValueError(
                f"max_staleness is {self.max_staleness}, and every batch takes {steps_per_batch} optimizer "
                f"steps, so nothing could ever go on; give {steps_per_batch} or more."
            )
        if self.tokens_per_update is not None and self.tokens_per_update >= max_tokens:
            raise ValueError(
                f"tokens_per_update is {self.tokens_per_update}, and sampling.max_tokens is {max_tokens}, "
                "so every completion would end in one rollout; give less, or leave it out."
            )
