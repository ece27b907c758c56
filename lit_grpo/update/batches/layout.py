"""Rollouts laid out as the tensors that go through the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lit_grpo.process.copies import in_one_copy
from lit_grpo.types import Rollout
from lit_grpo.update.chunking import Chunk
from lit_grpo.update.prefix.layout import PackedGroup, key_labels

if TYPE_CHECKING:
    from lit_grpo.update.prefix.carried import CarriedSpan


_NONE = torch.empty(0, dtype=torch.int64)


@dataclass
class MicroBatch:
    """What goes through the policy at once, laid out in one of two ways.

    *Packed*, for models that can share a prefix: one row without padding, in which each of ``groups`` stands as [prompt
    | response 1 | response 2 | ...], every response counting its positions from the prompt's end. *In rows*, where
    ``groups`` is empty: a completion a row after a prompt of its own, padded on the right (under causal attention
    padding on the right is never seen, so there is no attention mask, and no pad id can be mistaken for a token).

    The completion tokens that are learnt from, one completion after another, are the N axis; all others (observed ones)
    stand in the row and nowhere else, so that no sum, mean or ratio can meet them. ``source_N`` says where in the
    flattened (B, T) the *predecessor* of each token stands, whose hidden state predicts it; that of a response's first
    token is the prompt's last. The last tokens of carried prompts count as standing after the row, one after another.
    ``versions_N`` are the policy versions that sampled them, and ``advantages_N`` their advantages, of which those of
    one completion may differ. ``prompts`` are those of groups that are split, by group, and None for all others; where
    a group is a chunk of a completion, the span before it, and ``chunks`` has its own, None for the last of them.
    ``lengths_C``, the number of its tokens on the N axis, is per completion, in the order of that axis; on the host,
    ``rows`` is each one's place among the rollouts of the step, ``places`` which of its tokens that are learnt from
    these are, and ``weights`` what a chunk counts. ``labels_3K`` is there on a device other than the
    host, for a packed row: see :func:`lit_grpo.update.prefix.layout.key_labels`.

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
    rows: tuple[int, ...]
    groups: tuple[PackedGroup, ...] = ()
    prompts: tuple[CarriedSpan | None, ...] = ()
    chunks: tuple[CarriedSpan | None, ...] = ()
    places: tuple[slice, ...] = ()
    weights: tuple[float, ...] = ()
    labels_3K: torch.Tensor | None = None

    @property
    def weight(self) -> float:
        """What the tokens of a packed row count: 1, or a chunk's weight; 0 where it is one that stands for nothing."""
        if self.chunks:
            return self.weights[0]
        return float(bool(self.groups[0].response_tokens) or self.prompts[0] is not None) if self.groups else 1.0

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


def by_prompt(members: Sequence[Member]) -> list[Members]:
    """Group rollouts whose prompts are the same for the policy."""
    groups: dict[bytes, list[Member]] = {}
    for member in members:
        groups.setdefault(member.rollout.prompt.digest, []).append(member)
    return [Members(some[0].rollout.prompt.token_ids, some) for some in groups.values()]


SpanKey = tuple[int, ...] | tuple[str, int, int]
"""A prompt's tokens, or ``("chunk", row, end)``: what a chunk of a rollout is named by."""


def packed(parts: Sequence[Members], spans: Mapping[SpanKey, CarriedSpan] = MappingProxyType({})) -> MicroBatch:
    """Lay rollouts out as one row without padding, a prompt once before all of its responses.

    Where nothing would be in the row it has one token, so that a rank that has nothing to learn from can take part.

    Args:
        parts: The rollouts of each prompt, or one chunk of one.
        spans: Prompts that have responses in other micro-batches too, and chunks that others follow.
    """
    tokens, positions, groups, start, carried_tokens = [], [], [], 0, 0
    for part in parts:
        lengths, prefix = tuple(member.num_in_row for member in part.members), part.prefix_tokens
        groups.append(PackedGroup(start, prefix, lengths, None if part.has_prompt else carried_tokens))
        if part.has_prompt:
            tokens.append(torch.tensor(part.prompt_ids))
            positions.append(torch.arange(len(part.prompt_ids)))
        else:
            carried_tokens += prefix
        for member, length in zip(part.members, lengths, strict=True):
            tokens.append(member.rollout.completion.token_ids_T[member.begin : member.begin + length])
            positions.append(torch.arange(length) + prefix)
        start = groups[-1].response_start + sum(lengths)
    split = [spans.get(_before(part)) for part in parts]
    chunks = [spans.get(("chunk", one.row, one.chunk.end)) for part in parts for one in part.members if one.chunk]
    if not start:
        tokens, positions, start = [torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)], 1
        groups, split = [PackedGroup(0, 1, ()), *groups], [None, *split]
    groups = [_after_row(group, start) for group in groups]
    members = [member for part in parts for member in part.members]
    sources = _sources(groups, start, [member.tokens.stop - member.tokens.start for member in members])
    return MicroBatch(
        input_ids_BT=torch.cat(tokens)[None],
        position_ids_BT=torch.cat(positions)[None],
        groups=tuple(groups),
        prompts=tuple(split),
        chunks=tuple(chunks),
        **_completions(members, [*sources, _NONE]),
    )


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


def _sources(groups: Sequence[PackedGroup], num_tokens: int, num_targets: Sequence[int]) -> Iterator[torch.Tensor]:
    """Where each completion token's predecessor stands: in the row, or after it for the last of a carried prompt."""
    targets, num_carried = iter(num_targets), 0
    for group in groups:
        if group.carried_at is None:
            last = group.start + group.prompt_tokens - 1
        else:
            last = num_tokens + num_carried
            num_carried += 1
        start = group.response_start
        for length in group.response_tokens:
            num = next(targets)
            yield torch.full((min(num, 1),), last)
            yield torch.arange(start, start + max(num - 1, 0))
            start += length


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
        "rows": tuple(member.row for member in members),
        "places": tuple(places),
        "weights": tuple(1.0 if member.chunk is None else member.chunk.weight for member in members),
    }
