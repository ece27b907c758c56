"""When groups leave the buffer and what becomes of the others, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

from lit_grpo.compatibility import Clash, Requirement, check_clashes
from lit_grpo.limits import Count, Limit, Number
from lit_grpo.plugins import Plugin, RunFacts

Leftovers = Literal["finish", "keep", "discard"]


@dataclass(frozen=True)
class ReleaseRule:
    """What a buffer waits for, and what becomes of what is unfinished then.

    Args:
        num_groups: Whole groups that a release waits for; None for all that are open.
        num_completions: Completions that a release waits for instead, of whatever groups: a group then leaves in parts.
        num_steps: Decode steps that a rollout takes instead, whatever has ended then (at least one completion).
        leftovers: What is done with requests that are unfinished at a release: there are none, because it waits for all
            (``finish``); they go on from their prefixes next time (``keep``), or begin again (``discard``).
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


LACKING = {
    "own_devices": ("a generator with devices of its own", "decodes on the policy's device", "take vllm_servers"),
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
    """How rollouts and updates take turns: by default one batch is sampled completely, and then trained on.

    A *batch* is ``data.batch_size`` prompts with ``model.num_generations`` completions each. A mode is data: a mode of
    your own sets other values, as in ``{lit_grpo.rollout.rules.RolloutMode: {leftovers: keep, max_staleness: 4}}``.

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
            waits for all (``finish``); they go on next time with the tokens and log-probs that they have (``keep``); or
            they begin again (``discard``).
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

    batches_in_work: Annotated[float, Limit(ge=1)] | None = None
    refill: Literal["always", "when_empty"] = "always"
    unit: Literal["group", "completion"] = "group"
    leftovers: Leftovers = "finish"
    max_staleness: Number = 0
    max_restarts: Number = 3
    tokens_per_update: Count | None = None
    overlap: Literal["none", "within", "across"] = "none"
    at_sync: Literal["recompute", "keep", "drain"] = "recompute"

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
                f"{leftovers} needs tokens of older policies to be learnt from",
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
        return max(math.ceil(self.max_batches * num_prompts) - num_open, 0)

    def requirement(self, name: str) -> Requirement:
        """What it takes prompts from, and what it does to groups and rollouts."""
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
