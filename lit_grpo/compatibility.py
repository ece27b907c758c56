"""What goes with what, as data: parts of a run declare what they need and what they change, and one function decides.

For example, ``replay`` needs ``whole_groups``, since it lets members join a group, and ``sortedrl`` changes them, since
it lets a group leave the buffer in parts. Neither knows the other::

    check_together([
        Requirement("rollout.plugins rlep", needs=frozenset({"whole_groups"})),
        Requirement("rollout.plugins sortedrl", changes={"whole_groups": "lets groups leave in parts"}),
    ])
    ValueError: rollout.plugins rlep needs all members of a group to be in one update, and rollout.plugins sortedrl lets
    groups leave in parts; leave one of the two out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

REQUIREMENTS: dict[str, str] = {
    "whole_groups": "all members of a group to be in one update",
    "whole_rollouts": "every group to be sampled whole in one rollout that waits for its rewards",
    "fresh_members": "every member of a group to be sampled at this visit of its prompt",
    "separate_completions": "every completion to be sampled by itself, from its prompt on",
    "restorable_environments": "environments that can be restored in the middle",
    "turns": "completions of several turns",
    "turn_rewards": "what each turn earned by itself",
    "prompt_stream": "prompts from lit_grpo.data.PromptDataModule",
    "revisits": "prompts that come again",
    "plain_rewards": "rewards without a KL term",
    "ratios_to_sampler": "probability ratios to the policy that sampled each token",
    "one_row": "each completion to be learnt from in one row",
    "whole_completions": "all tokens of a completion to go through the policy together",
    "own_rows": "whole packed rows of tokens, and prompts, of its own on each rank",
    "all_tokens": "all tokens of a step to choose from",
    "all_ranks": "the whole batch, of all ranks, before its first gradient",
    "unsharded_weights": "whole weights on each rank",
    "fixed_token_budget": "micro-batches of a fixed number of tokens",
}
"""What a part of a run may need, by the word that stands for it; the text goes on after ``needs``."""


@dataclass(frozen=True)
class Requirement:
    """A part of a run that has been chosen: a plug-in, an estimator, a generator.

    Args:
        name: As the user has set it, such as ``rollout.plugins april``.
        needs: Words of ``REQUIREMENTS``.
        changes: What it takes away from the others: by word, what to say of it after its name, such as ``lets groups
            leave in parts``.
        remedy: What else helps than leaving the part out, such as ``add unit=group to it``.
        chosen: Whether the run has the part; one that it does not have is passed over.
        fixed: Whether it cannot be left out, such as that a run has one turn per completion.
    """

    name: str
    needs: frozenset[str] = frozenset()
    changes: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""
    chosen: bool = True
    fixed: bool = False


SHARDS = Requirement(
    "trainer.strategy fsdp2",
    needs=frozenset({"fixed_token_budget"}),  # a rank whose memory runs out cannot leave the others' layers waiting
    changes={"unsharded_weights": "leaves a shard of them there"},
    remedy="take ddp",
)
"""Ranks that have a part of the weights each."""
ONE_TURN = Requirement(
    "this run",
    changes={"turns": "has one turn per completion", "turn_rewards": "has no environment that tells it"},
    remedy="add environments or agent to rollout.plugins",
    fixed=True,
)
"""A run in which nothing answers what the policy says."""


def check_together(parts: Iterable[Requirement]) -> None:
    """Refuse parts of a run that do not go together.

    Raises:
        ValueError: One part needs what another changes.
    """
    for sentence in clashing(parts):
        raise ValueError(sentence)


def clashing(parts: Iterable[Requirement]) -> Iterator[str]:
    """Yield a sentence for each two parts of a run of which one needs what the other changes."""
    parts = [part for part in parts if part.chosen]
    for part in parts:
        for word in sorted(part.needs):
            for other in parts:
                if other is not part and word in other.changes:
                    remedies = [remedy for remedy in (part.remedy, other.remedy) if remedy]
                    left_out = f"leave {part.name} out" if other.fixed else "leave one of the two out"
                    yield (
                        f"{part.name} needs {REQUIREMENTS[word]}, and {other.name} {other.changes[word]}; "
                        f"{', or '.join([*remedies, left_out])}."
                    )


@dataclass(frozen=True)
class Clash:
    """Two settings of one class that do not go together, as the two halves of a sentence.

    Args:
        needs: What one setting needs, such as ``transfer changes needs weights that travel with every sync``.
        lacks: What the other makes of it, such as ``adapters alone sends them once``.
        found: Whether both are set so.
        remedy: What else helps than leaving one out, such as ``take transfer full``.
    """

    needs: str
    lacks: str
    found: bool
    remedy: str = ""


def check_clashes(clashes: Iterable[Clash]) -> None:
    """Refuse settings of one class that do not go together.

    Raises:
        ValueError: Two clash; the sentence is that of the first clash that is found.
    """
    for clash in clashes:
        if clash.found:
            remedies = [clash.remedy] if clash.remedy else []
            raise ValueError(
                f"{clash.needs}, and {clash.lacks}; {', or '.join([*remedies, 'leave one of the two out'])}."
            )
