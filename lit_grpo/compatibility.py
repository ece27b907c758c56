"""Compatibility as data: parts of a run declare what they need and what they change; one function finds conflicts.

For example, ``replay`` needs ``whole_groups``, since it lets completions join a group, and ``sortedrl`` changes them,
since it lets a group leave the buffer in parts. Neither knows the other::

    check_together([
        Requirement("rollout.plugins rlep", needs=frozenset({"whole_groups"})),
        Requirement("rollout.plugins sortedrl", changes={"whole_groups": "lets groups leave in parts"}),
    ])
    ValueError: rollout.plugins rlep needs complete groups in every update, but rollout.plugins sortedrl lets groups
    leave in parts; remove one of the two settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

REQUIREMENTS: dict[str, str] = {
    "whole_groups": "complete groups in every update",
    "whole_rollouts": "every group to be sampled completely in one rollout that waits for its rewards",
    "fresh_members": "every completion of a group to be freshly sampled",
    "separate_completions": "every completion to be sampled separately, from its prompt on",
    "restorable_environments": "environments that can be restored in the middle of an episode",
    "turns": "completions of several turns",
    "turn_rewards": "a reward for each turn",
    "prompt_stream": "prompts from lit_grpo.data.PromptDataModule",
    "revisits": "prompts that are sampled more than once",
    "plain_rewards": "rewards without a KL term",
    "ratios_to_sampler": "probability ratios to the behavior policy of each token",
    "one_row": "each completion in one row of the update",
    "whole_completions": "all tokens of a completion in the same forward pass",
    "own_rows": "complete packed rows, and separate prompts, on each rank",
    "all_tokens": "all tokens of a step to choose from",
    "all_ranks": "the whole batch, of all ranks, before its first gradient",
    "unsharded_weights": "the full weights on each rank",
    "fixed_token_budget": "a fixed number of tokens per micro-batch",
}
"""Requirements of parts of a run, by word; the text continues a sentence after ``needs``."""
DENOMINATOR = "the denominator of the probability ratio"
ENTROPY_COEFFICIENT = "the coefficient of the entropy bonus"
"""What a setting of the objective decides, or a plug-in in its place: two parts of a run never decide the same."""


@dataclass(frozen=True)
class Requirement:
    """A part of a run that has been chosen: a plug-in, an estimator, a generator.

    Args:
        name: Name of the part as the user has set it, such as ``rollout.plugins april``.
        needs: Required words of ``REQUIREMENTS``.
        changes: Requirements that the part breaks for others: by word, the text after its name, such as ``lets groups
            leave in parts``.
        remedy: Another remedy than removing the part, such as ``add unit=group to it``.
        chosen: Whether the run has the part; a part that it does not have is ignored.
        fixed: Whether it cannot be left out, such as that a run has one turn per completion.
        decides: What the part decides and no other part may, such as ``DENOMINATOR``.
    """

    name: str
    needs: frozenset[str] = frozenset()
    changes: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""
    chosen: bool = True
    fixed: bool = False
    decides: frozenset[str] = frozenset()


SHARDS = Requirement(
    "trainer.strategy fsdp2",
    needs=frozenset({"fixed_token_budget"}),  # a rank whose memory runs out cannot leave the others' layers waiting
    changes={"unsharded_weights": "shards them"},
    remedy="take ddp",
)
"""Ranks that each hold a shard of the weights."""
ONE_TURN = Requirement(
    "this run",
    changes={"turns": "has one turn per completion", "turn_rewards": "has no environment that gives one"},
    remedy="add environments or agent to rollout.plugins",
    fixed=True,
)
"""A run without environments and agents."""


def check_together(parts: Iterable[Requirement]) -> None:
    """Refuse parts of a run that are incompatible."""
    for sentence in clashing(parts):
        raise ValueError(sentence)


def clashing(parts: Iterable[Requirement]) -> Iterator[str]:
    """Yield a sentence for each two parts of a run of which one needs what the other changes, or that decide the same.

    Of two that decide the same, the sentence begins with the first.
    """
    parts = [part for part in parts if part.chosen]
    for number, part in enumerate(parts):
        found = [
            (REQUIREMENTS[word], other, other.changes[word])
            for word in sorted(part.needs)
            for other in parts
            if other is not part and word in other.changes
        ]
        for other in parts[number + 1 :]:
            found += [(f"{what} for itself", other, "sets it") for what in sorted(part.decides & other.decides)]
        for needed, other, changed in found:
            remedies = [remedy for remedy in (part.remedy, other.remedy) if remedy]
            left_out = f"remove {part.name}" if other.fixed else "remove one of the two settings"
            yield f"{part.name} needs {needed}, but {other.name} {changed}; {', or '.join([*remedies, left_out])}."


@dataclass(frozen=True)
class Clash:
    """Two incompatible settings of one class, as the two halves of a sentence.

    Args:
        needs: Need of one setting, such as ``transfer changes needs weights that are sent at every sync``.
        lacks: Conflict with the other setting, such as ``adapters alone sends them once``.
        found: Whether both are set so.
        remedy: Another remedy than removing one of them, such as ``take transfer full``.
    """

    needs: str
    lacks: str
    found: bool
    remedy: str = ""


def check_clashes(clashes: Iterable[Clash]) -> None:
    """Refuse settings of one class that are incompatible."""
    for clash in clashes:
        if clash.found:
            remedies = [clash.remedy] if clash.remedy else []
            raise ValueError(
                f"{clash.needs}, but {clash.lacks}; {', or '.join([*remedies, 'remove one of the two settings'])}."
            )
