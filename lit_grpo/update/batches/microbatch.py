"""Rollouts of a step cut into micro-batches under a budget of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from lit_grpo.types import Rollout
from lit_grpo.update.batches.layout import (
    LEAST_SHARED,
    Member,
    Members,
    MicroBatch,
    SpanKey,
    by_prompt,
    in_rows,
    packed,
)
from lit_grpo.update.batches.packing import Part, pack_groups, pack_rows
from lit_grpo.update.chunking import Chunk
from lit_grpo.update.prefix.carried import CarriedSpan


def num_row_tokens(rollout: Rollout) -> int:
    """Tokens of a rollout by itself: the prompt and the completion."""
    return len(rollout.prompt.token_ids) + rollout.completion.num_tokens


def least_tokens(
    rollouts: Sequence[Rollout], shared_prefix: bool, chunks: Mapping[int, Sequence[Chunk]] | None = None
) -> int:
    """The smallest budget that works: the longest prompt or completion, or both together where they are in one row.

    Args:
        rollouts: What is to be cut into micro-batches.
        shared_prefix: Whether prompts have their own place.
        chunks: Those of each rollout that is cut, by its place; then the longest of them counts.
    """
    if not shared_prefix:
        return max(map(num_row_tokens, rollouts), default=1)
    cut = chunks or {}
    longest = [
        max((chunk.end - chunk.begin for chunk in cut.get(row, ())), default=rollout.completion.num_tokens)
        for row, rollout in enumerate(rollouts)
    ]
    return max(1, *(len(rollout.prompt.token_ids) for rollout in rollouts), *longest) if rollouts else 1


@dataclass(frozen=True)
class MicroBatches(Iterable[MicroBatch]):
    """The micro-batches of a step, each laid out when its turn comes, so that only one of them takes memory.

    They are to go through the policy in their order: of a prompt that has responses in several, the last has it in its
    row, and those before carry it (see :class:`~lit_grpo.update.prefix.carried.CarriedSpan`). Chunks of a completion
    come last first, each with those before it carried.

    Args:
        shared_prefix: Lay them out packed; otherwise in rows.
        bins: The members of each micro-batch; none make an empty one.
        chunks: Those of each rollout that is cut, by its row.
        least_shared: The fewest tokens that completions of a prompt share, where they begin with the same.
    """

    shared_prefix: bool
    bins: Sequence[Sequence[Members]]
    chunks: Mapping[int, Sequence[Chunk]] = field(default_factory=dict)
    least_shared: int = LEAST_SHARED

    def __len__(self) -> int:
        return len(self.bins)

    def __iter__(self) -> Iterator[MicroBatch]:
        split = {members.prompt_ids for bin in self.bins for members in bin if not members.has_prompt}
        spans: dict[SpanKey, CarriedSpan] = {prompt_ids: CarriedSpan(prompt_ids) for prompt_ids in split}
        for bin in self.bins:
            chunks = [(members, member) for members in bin for member in members.members if member.chunk]
            for members, member in chunks:
                self._add_spans(members.prompt_ids, member, spans)
            yield packed(bin, spans, self.least_shared) if self.shared_prefix else in_rows(bin)
            for _, member in chunks:
                if member.chunk == next(chunk for chunk in self.chunks[member.row] if chunk.weight):
                    for chunk in self.chunks[member.row]:
                        spans.pop(("chunk", member.row, chunk.end), None)

    def _add_spans(self, prompt_ids: tuple[int, ...], member: Member, spans: dict[SpanKey, CarriedSpan]) -> None:
        """Add a span for each chunk before this one, where it is the first of its completion to have its turn."""
        token_ids, before = member.rollout.completion.token_ids_T.tolist(), spans[prompt_ids]
        for chunk in self.chunks[member.row]:
            if chunk.begin >= member.begin:
                return
            key = ("chunk", member.row, chunk.end)
            if key not in spans:
                spans[key] = CarriedSpan(token_ids[chunk.begin : chunk.end], before, chunk.weight)
            before = spans[key]

    def and_empty(self, number: int) -> MicroBatches:
        """Return these, and as many empty ones after them."""
        return replace(self, bins=[*self.bins, *[()] * number])


def make_micro_batches(
    rollouts: Sequence[Rollout],
    advantages_C: Sequence[float | torch.Tensor],
    max_tokens: int,
    shared_prefix: bool = True,
    chunks: Mapping[int, Sequence[Chunk]] | None = None,
    least_shared: int = LEAST_SHARED,
) -> MicroBatches:
    """Cut rollouts into micro-batches of at most ``max_tokens``, the largest first.

    Best fit by length packs them. A prompt counts once for all of its completions, in the micro-batch that has it in
    its row. Completions that begin with the same tokens stay together if they fit, and those tokens count once. The
    largest come first, so that a shortage of memory shows at once, but for what is left of a group begun.

    Args:
        rollouts: In any order; those with the same prompt tokens share it.
        advantages_C: One a rollout: a number, or a tensor with one for each of its tokens that is learnt from.
        max_tokens: Prompt and completion tokens of a micro-batch; in rows, padding counts as well.
        shared_prefix: Lay them out packed; otherwise in rows (see :class:`MicroBatch`).
        chunks: Of packed rollouts, by their place, those that are cut. A chunk is a micro-batch of its own, and what it
            sees of the completion before it does not count towards its tokens.
        least_shared: The fewest tokens that completions of a prompt share, where they begin with the same.

    Raises:
        ValueError: ``max_tokens`` is less than :func:`least_tokens`; the message says the smallest that works.
    """
    chunks = chunks or {}
    least = least_tokens(rollouts, shared_prefix, chunks)
    if least > max_tokens:
        what = "a prompt or a completion" if shared_prefix else "a prompt with its completion"
        raise ValueError(
            f"max_tokens_per_micro_batch is {max_tokens}, but {what} has {least} tokens; set it to at least {least}."
        )
    pairs = enumerate(zip(rollouts, advantages_C, strict=True))
    scored = [Member(row, rollout, advantage) for row, (rollout, advantage) in pairs]
    if not shared_prefix:
        in_bins = pack_rows([num_row_tokens(rollout) for rollout in rollouts], max_tokens)
        return MicroBatches(False, [[Members((), [scored[row] for row in rows])] for rows in in_bins])
    groups = by_prompt(scored)
    whole = [replace(group, members=[one for one in group.members if one.row not in chunks]) for group in groups]
    cut = [[one for one in group.members if one.row in chunks] for group in groups]
    bundles = [_bundles(group, max_tokens, least_shared) for group in whole]
    lengths = [[bundle.num_tokens for bundle in its] for its in bundles]
    bins: list[Sequence[Members]] = []
    for parts in pack_groups([len(group.prompt_ids) for group in groups], lengths, max_tokens):
        for part in (part for part in parts if part.has_prompt):
            for member in cut[part.group]:
                in_turn = [chunk for chunk in reversed(chunks[member.row]) if chunk.weight]
                bins += [[Members(groups[part.group].prompt_ids, [member._replace(chunk=c)], False)] for c in in_turn]
        bins.append([whole[part.group].part(_members(bundles, part), part.has_prompt) for part in parts])
    return MicroBatches(True, bins, chunks, least_shared)


@dataclass(frozen=True)
class _Bundle:
    """Completions of a prompt, by number, that stay in one micro-batch, and the tokens that they take of it."""

    members: Sequence[int]
    num_tokens: int


def _members(bundles: Sequence[Sequence[_Bundle]], part: Part) -> list[int]:
    """Return the completions of a part, bundle by bundle."""
    return [member for number in part.responses for member in bundles[part.group][number].members]


def _bundles(group: Members, max_tokens: int, least_shared: int) -> list[_Bundle]:
    """Put completions together that begin with the same tokens, as many as fit; in the order of the first of each."""
    tree = group.tree(least_shared)
    paths: list[list[int]] = [[] for _ in group.members]
    for number, branch in enumerate(tree):
        for member in branch.members:
            paths[member].append(number)
    bundles: list[_Bundle] = []
    begun: set[int] = set()  # branches of the last bundle
    for member in sorted(range(len(paths)), key=paths.__getitem__):  # depth first
        path = paths[member]
        more = 1 + sum(tree[number].end - tree[number].begin for number in path if number not in begun)
        if begun.isdisjoint(path) or bundles[-1].num_tokens + more > max_tokens:
            begun.clear()
            bundles.append(_Bundle([member], 1 + sum(tree[number].end - tree[number].begin for number in path)))
        else:
            bundles[-1] = _Bundle([*bundles[-1].members, member], bundles[-1].num_tokens + more)
        begun |= {*path}
    return sorted(bundles, key=lambda bundle: min(bundle.members))
