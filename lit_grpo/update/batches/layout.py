"""Rollouts laid out as the tensors that go through the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lit_grpo.process.copies import in_one_copy
from lit_grpo.trajectory import Branch, prefix_tree
from lit_grpo.types import Rollout
from lit_grpo.update.chunking import Chunk
from lit_grpo.update.prefix.layout import PackedGroup, key_labels

if TYPE_CHECKING:
    from lit_grpo.update.prefix.carried import CarriedSpan


LEAST_SHARED = 32
"""Tokens that completions of a prompt have to begin with in common to share them: fewer are not worth a call."""
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass
class MicroBatch:
    """What goes through the policy at once, laid out in one of two ways.

    *Packed*, for models that can share a prefix: one row without padding, in which each of ``groups`` stands as [prompt
    | response 1 | response 2 | ...], every response counting its positions from the prompt's end. Tokens that several
    responses begin with stand there once, as a branch of their own, wherever they come from: a tree of rollouts, or
    equal completions. *In rows*, where
    ``groups`` is empty: a completion a row after a prompt of its own, padded on the right (under causal attention
    padding on the right is never seen, so there is no attention mask, and no pad id can be mistaken for a token).

    The completion tokens that are learnt from, one completion after another, are the N axis; all others (observed ones)
    stand in the row and nowhere else, so that no sum, mean or ratio can meet them. ``source_N`` says where in the
    flattened (B, T) the *predecessor* of each token stands, whose hidden state predicts it; that of a response's first
    token is the prompt's last. The last tokens of carried prompts count as standing after the row, one after another.
    ``versions_N`` are the policy versions that sampled them, and ``advantages_N`` their advantages, of which those of
    one completion may differ. ``prompts`` are those of groups that are split, by group, and None for all others; where
    a group is a chunk of a completion, the span before it, and ``chunks`` has its own, None for the last of them.
    ``lengths_C``, the number of its tokens on the N axis, is per completion, in the order of that axis, and
    ``turn_lengths_S`` per turn; on the host, ``rows`` is each completion's place among the rollouts of the step,
    ``places`` which of its tokens that are learnt from these are, and ``weights`` what a chunk counts. ``labels_3K`` is
    there on a device other than the host, for a packed row: see :func:`lit_grpo.update.prefix.layout.key_labels`.

    Where completions share tokens, ``distinct_U`` are the places, on the N axis, of one of each that are the same, and
    ``same_N`` says which of them each token is: log-probs are computed of the distinct ones alone.

    Example:
        The prompt [5, 6] with the completions [7, 8] and [9, 4, 3], packed::

            input_ids_BT    = [[5, 6, 7, 9, 4]]    groups = (PackedGroup(0, 2, (1, 2)),)
            position_ids_BT = [[0, 1, 2, 2, 3]]
            source_N = [1, 2, 1, 3, 4]    target_ids_N = [7, 8, 9, 4, 3]    lengths_C = [2, 3]
    """

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    source_N: torch.Tensor
    target_ids_N: torch.Tensor
    sampled_logprobs_N: torch.Tensor
    versions_N: torch.Tensor
    advantages_N: torch.Tensor
    lengths_C: torch.Tensor
    turn_lengths_S: torch.Tensor
    rows: tuple[int, ...]
    groups: tuple[PackedGroup, ...] = ()
    prompts: tuple[CarriedSpan | None, ...] = ()
    chunks: tuple[CarriedSpan | None, ...] = ()
    places: tuple[slice, ...] = ()
    weights: tuple[float, ...] = ()
    labels_3K: torch.Tensor | None = None
    distinct_U: torch.Tensor | None = None
    same_N: torch.Tensor | None = None

    def distinct(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the values of the distinct tokens alone, along the first axis."""
        return values_N if self.distinct_U is None else values_N.index_select(0, self.distinct_U)

    def spread(self, values_U: torch.Tensor) -> torch.Tensor:
        """Give each token the value of the distinct one that it is, along the first axis."""
        return values_U if self.same_N is None else values_U.index_select(0, self.same_N)

    @property
    def weight(self) -> float:
        """What the tokens of a packed row count: 1, or a chunk's weight; 0 where it is one that stands for nothing."""
        means_nothing = self.groups[:1] == (PackedGroup(0, 1, ()),) and self.prompts[0] is None
        if means_nothing and self.input_ids_BT.numel() == 1 and (not self.rows or len(self.groups) > 1):
            return 0.0
        return self.weights[0] if self.chunks else 1.0

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return a copy on ``device``, or itself where it is there already."""
        there = torch.device(device)
        if there == self.input_ids_BT.device:
            return self
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        if self.groups:
            tensors["labels_3K"] = key_labels(self.groups)
        return replace(self, **in_one_copy(tensors, there))


class Member(NamedTuple):
    """A rollout of a step: its place there, itself, and its advantage, or one for each token that is learnt from.

    ``chunk`` is set where it is a part of it.
    """

    row: int
    rollout: Rollout
    advantage: float | torch.Tensor
    chunk: Chunk | None = None

    @property
    def begin(self) -> int:
        """How many tokens of the completion come before it."""
        return 0 if self.chunk is None else self.chunk.begin

    @property
    def tokens(self) -> slice:
        """Which tokens of the completion it is."""
        return slice(self.begin, self.rollout.completion.num_tokens if self.chunk is None else self.chunk.end)

    @property
    def num_in_row(self) -> int:
        """How many of them go through the policy: all but the last token of a completion, which predicts nothing."""
        tokens, num_tokens = self.tokens, self.rollout.completion.num_tokens
        return max(min(tokens.stop, num_tokens - 1) - tokens.start, 0)

    @property
    def input_ids_T(self) -> torch.Tensor:
        """Those tokens, in order."""
        return self.rollout.completion.token_ids_T[self.begin : self.begin + self.num_in_row]

    @property
    def turn_lengths(self) -> list[int]:
        """How many tokens of each turn are learnt from; all of a chunk are taken for one turn."""
        return self.rollout.completion.trained_of_turns if self.chunk is None else [self.place.stop - self.place.start]

    @property
    def place(self) -> slice:
        """Which of the completion's tokens that are learnt from it has."""
        trained_T = self.rollout.completion.trained_T
        first = int(trained_T[: self.begin].sum())
        return slice(first, first + int(trained_T[self.tokens].sum()))


@dataclass(frozen=True)
class Members:
    """Rollouts of one prompt that go through the policy together, with it or after what was computed of it before."""

    prompt_ids: tuple[int, ...]
    members: Sequence[Member]
    has_prompt: bool = True

    def part(self, numbers: Sequence[int], has_prompt: bool) -> Members:
        """Return some of them."""
        return Members(self.prompt_ids, [self.members[number] for number in numbers], has_prompt)

    @property
    def prefix_tokens(self) -> int:
        """Tokens that all of them follow: the prompt's, and for a chunk those of the completion before it."""
        return len(self.prompt_ids) + max((member.begin for member in self.members), default=0)

    def tree(self, least_shared: int) -> list[Branch]:
        """Return the tree of what goes through the policy of its completions."""
        return prefix_tree([member.input_ids_T.numpy() for member in self.members], least_shared)


def by_prompt(members: Sequence[Member]) -> list[Members]:
    """Group rollouts whose prompts are the same for the policy."""
    groups: dict[bytes, list[Member]] = {}
    for member in members:
        groups.setdefault(member.rollout.prompt.digest, []).append(member)
    return [Members(some[0].rollout.prompt.token_ids, some) for some in groups.values()]


SpanKey = tuple[int, ...] | tuple[str, int, int]
"""A prompt's tokens, or ``("chunk", row, end)``: what a chunk of a rollout is named by."""


def packed(
    parts: Sequence[Members],
    spans: Mapping[SpanKey, CarriedSpan] = MappingProxyType({}),
    least_shared: int = LEAST_SHARED,
) -> MicroBatch:
    """Lay rollouts out as one row without padding, a prompt, and what responses begin with in common, once.

    Where nothing would be in the row it has one token, so that a rank that has nothing to learn from can take part.

    Args:
        parts: The rollouts of each prompt, or one chunk of one.
        spans: Prompts that have responses in other micro-batches too, and chunks that others follow.
        least_shared: The fewest common tokens of responses that stand in the row once.
    """
    tokens, positions, groups, carried_tokens = [], [], [], 0
    trees = [part.tree(least_shared) for part in parts]
    for part, tree in zip(parts, trees, strict=True):
        groups.append(
            PackedGroup(
                groups[-1].end if groups else 0,
                part.prefix_tokens,
                tuple(branch.end - branch.begin for branch in tree),
                carried_at=None if part.has_prompt else carried_tokens,
                parents=tuple(branch.parent for branch in tree),
            )
        )
        if part.has_prompt:
            tokens.append(torch.tensor(part.prompt_ids))
            positions.append(torch.arange(len(part.prompt_ids)))
        else:
            carried_tokens += part.prefix_tokens
        for branch in tree:
            tokens.append(part.members[branch.members[0]].input_ids_T[branch.begin : branch.end])
            positions.append(torch.arange(branch.begin, branch.end) + part.prefix_tokens)
    split = [spans.get(_before(part)) for part in parts]
    chunks = [spans.get(("chunk", one.row, one.chunk.end)) for part in parts for one in part.members if one.chunk]
    num_tokens = groups[-1].end if groups else 0
    places: list[Members | None] = [*parts]
    if not num_tokens:
        tokens, positions, num_tokens = [torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)], 1
        groups, split, places, trees = [PackedGroup(0, 1, ()), *groups], [None, *split], [None, *places], [[], *trees]
    groups = [_after_row(group, num_tokens) for group in groups]
    sources = _sources(groups, num_tokens, places, trees)
    micro_batch = MicroBatch(
        input_ids_BT=torch.cat(tokens)[None],
        position_ids_BT=torch.cat(positions)[None],
        groups=tuple(groups),
        prompts=tuple(split),
        chunks=tuple(chunks),
        **_completions([member for part in parts for member in part.members], [*sources, _NONE]),
    )
    shares = any(len(branch.members) > 1 for tree in trees for branch in tree)
    return _with_distinct(micro_batch) if shares else micro_batch


def _with_distinct(micro_batch: MicroBatch) -> MicroBatch:
    """Note which tokens are the same: of one id, predicted from one place."""
    pairs_N2 = torch.stack([micro_batch.source_N, micro_batch.target_ids_N], 1)
    pairs_U2, same_N = pairs_N2.unique(dim=0, return_inverse=True)
    distinct_U = torch.empty(len(pairs_U2), dtype=torch.int64)
    distinct_U[same_N] = torch.arange(len(same_N))
    return replace(micro_batch, distinct_U=distinct_U, same_N=same_N)


def in_rows(parts: Sequence[Members]) -> MicroBatch:
    """Lay rollouts out one a row, padded on the right; without rollouts, one row of one token."""
    members = [member for part in parts for member in part.members]
    rollouts = [member.rollout for member in members]
    longest = max((len(r.prompt.token_ids) + r.completion.num_tokens - 1 for r in rollouts), default=1)
    input_ids_BT = torch.zeros((max(1, len(rollouts)), longest), dtype=torch.int64)
    sources = []
    for row, rollout in enumerate(rollouts):
        prompt, completion = rollout.prompt.token_ids, rollout.completion.token_ids_T
        tokens = torch.cat([torch.tensor(prompt), completion[:-1]])
        input_ids_BT[row, : len(tokens)] = tokens
        sources.append(torch.arange(len(completion)) + row * longest + len(prompt) - 1)
    return MicroBatch(
        input_ids_BT=input_ids_BT,
        position_ids_BT=torch.arange(longest).repeat(len(input_ids_BT), 1),
        **_completions(members, [*sources, _NONE]),
    )


def _before(part: Members) -> SpanKey:
    """Name what a part follows."""
    first = part.members[0] if part.members else None
    return part.prompt_ids if first is None or not first.begin else ("chunk", first.row, first.begin)


def _after_row(group: PackedGroup, num_tokens: int) -> PackedGroup:
    """Put a carried prompt after a row of so many tokens."""
    return group if group.carried_at is None else replace(group, carried_at=group.carried_at + num_tokens)


def _sources(
    groups: Sequence[PackedGroup],
    num_tokens: int,
    parts: Sequence[Members | None],
    trees: Sequence[Sequence[Branch]],
) -> Iterator[torch.Tensor]:
    """Where each completion token's predecessor stands: in the row, or after it for the last of a carried prompt.

    Args:
        groups: In the row.
        num_tokens: Of the row.
        parts: By group, whose completions; None for one without.
        trees: By group, the branches of its completions.
    """
    num_carried = 0
    for group, part, tree in zip(groups, parts, trees, strict=True):
        if group.carried_at is None:
            last = group.start + group.prompt_tokens - 1
        else:
            last = num_tokens + num_carried
            num_carried += 1
        paths: list[list[torch.Tensor]] = [[_NONE] for _ in ([] if part is None else part.members)]
        for branch, stretch in zip(tree, group.branches, strict=True):
            rows_T = torch.arange(stretch.start, stretch.start + stretch.length)
            for member in branch.members:
                paths[member].append(rows_T)
        for member, path in zip([] if part is None else part.members, paths, strict=True):
            num_own = member.tokens.stop - member.tokens.start
            yield torch.full((min(num_own, 1),), last)
            yield torch.cat(path)[: max(num_own - 1, 0)]


def _completions(members: Sequence[Member], sources: Sequence[torch.Tensor]) -> dict[str, Any]:
    """What the objective wants, completion after completion, of the tokens that are learnt from.

    Args:
        members: Whose completions.
        sources: Where the predecessors of all their tokens stand, one after another.
    """
    parts = [(member.rollout.completion, member.tokens) for member in members]
    advantages = [torch.as_tensor(member.advantage, dtype=torch.float32) for member in members]
    advantages = [each.expand(one.num_trained) for each, (one, _) in zip(advantages, parts, strict=True)]
    of_chunk = any(member.chunk for member in members)
    places = [
        member.place if of_chunk else slice(completion.num_trained)
        for member, (completion, _) in zip(members, parts, strict=True)
    ]
    trained = torch.cat([*(completion.trained_T[tokens] for completion, tokens in parts), _NONE.bool()])
    logprobs = [*(completion.logprobs_T[tokens] for completion, tokens in parts), torch.empty(0, dtype=torch.float32)]
    return {
        "source_N": torch.cat([*sources])[trained],
        "target_ids_N": torch.cat([*(completion.token_ids_T[tokens] for completion, tokens in parts), _NONE])[trained],
        "sampled_logprobs_N": torch.cat(logprobs)[trained],
        "versions_N": torch.cat([*(completion.versions_T[tokens] for completion, tokens in parts), _NONE])[trained],
        "advantages_N": torch.cat(
            [
                *(each[place] for each, place in zip(advantages, places, strict=True)),
                torch.empty(0, dtype=torch.float32),
            ]
        ),
        "lengths_C": torch.tensor([place.stop - (place.start or 0) for place in places], dtype=torch.int64),
        "turn_lengths_S": torch.tensor([n for member in members for n in member.turn_lengths], dtype=torch.int64),
        "rows": tuple(member.row for member in members),
        "places": tuple(places),
        "weights": tuple(1.0 if member.chunk is None else member.chunk.weight for member in members),
    }
