"""Rollouts of a step cut into micro-batches under a budget of tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

import numpy as np

from lit_grpo.trajectory import prefix_tree
from lit_grpo.types import Rollout
from lit_grpo.update.batches.layout import LEAST_SHARED, PackedRow, RowPart, lay_out, lay_out_padded
from lit_grpo.update.plugin import Chunk
from lit_grpo.update.prefix.carried import CarriedSpan


def num_row_tokens(rollout: Rollout) -> int:
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
    least = 1
    for row, rollout in enumerate(rollouts):
        longest = rollout.completion.num_tokens
        if chunks and row in chunks:
            longest = max(chunk.end - chunk.begin for chunk in chunks[row])
        least = max(least, len(rollout.prompt.token_ids), longest)
    return least


def make_micro_batches(
    rollouts: Sequence[Rollout],
    max_tokens: int,
    shared_prefix: bool = True,
    chunks: Mapping[int, Sequence[Chunk]] | None = None,
    least_shared: int = LEAST_SHARED,
    least_counted: int = 0,
) -> list[PackedRow]:
    """Cut rollouts into micro-batches of at most ``max_tokens``, the largest first, and lay them out.

    Best fit by length packs them. A prompt counts once for all of its completions, in the micro-batch that has it in
    its row. Completions that begin with the same tokens stay together if they fit, and those tokens count once. The
    largest come first, so that a shortage of memory shows at once, but for what is left of a group begun.

    Args:
        rollouts: In any order; those with the same prompt tokens share it.
        max_tokens: Prompt and completion tokens of a micro-batch; in rows, padding counts as well.
        shared_prefix: Lay them out packed; otherwise in padded rows (see :class:`PackedRow`).
        chunks: Of packed rollouts, by their place, those that are cut. A chunk is a micro-batch of its own, and what it
            sees of the completion before it does not count towards its tokens.
        least_shared: The fewest tokens that completions of a prompt share, where they begin with the same.
        least_counted: What a completion counts at least, as far as the budget goes: layers with states fill each up.

    Raises:
        ValueError: ``max_tokens`` is less than :func:`least_tokens`; the message says the smallest that works.
    """
    least = least_tokens(rollouts, shared_prefix, chunks)
    if least > max_tokens:
        what = "a prompt or a completion" if shared_prefix else "a prompt with its completion"
        raise ValueError(
            f"max_tokens_per_micro_batch is {max_tokens}, but {what} has {least} tokens; set it to at least {least}."
        )
    if shared_prefix:
        cut = _cut_groups(rollouts, max_tokens, chunks or {}, least_shared, least_counted)
        return [lay_out(rollouts, parts, least_shared) for parts in cut]
    padded = pack_padded([num_row_tokens(rollout) for rollout in rollouts], max_tokens)
    return [lay_out_padded(rollouts, members) for members in padded]


def _cut_groups(
    rollouts: Sequence[Rollout],
    max_tokens: int,
    chunks: Mapping[int, Sequence[Chunk]],
    least_shared: int,
    least_counted: int,
) -> list[list[RowPart]]:
    """Say which completions go through the policy together, the fullest micro-batch first.

    A group that fits is never split. Of a larger one a part has the prompt, with completions or by itself; the others
    have micro-batches of their own right before, so that few groups are begun at a time, as chunks of completions have.
    """
    groups: dict[bytes, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        groups.setdefault(rollout.prompt.digest, []).append(place)
    with_prompt, sizes = list[RowPart](), list[int]()
    split, in_chunks = list[list[RowPart]](), list[list[RowPart]]()  # those that are before, by group
    for members in groups.values():
        prompt_ids, pictures = (prompt := rollouts[members[0]].prompt).token_ids, prompt.pictures
        whole = [member for member in members if member not in chunks]
        own = (rollouts[member].completion for member in whole)
        contents = [each.contents if each.pictures else each.arrays[0] for each in own]
        bundles, lengths = _bundles(contents, max_tokens, least_shared)
        if least_counted:
            lengths = [
                min(max(length, least_counted * len(bundle)), max_tokens)
                for length, bundle in zip(lengths, bundles, strict=True)
            ]
        first, *more = best_fit(lengths, max_tokens, taken=len(prompt_ids))
        parts = [[whole[number] for bundle in part for number in bundles[bundle]] for part in (first, *more)]
        span = CarriedSpan(prompt_ids, pictures=pictures) if more or len(whole) < len(members) else None
        with_prompt.append(RowPart(prompt_ids, parts[0], span=span, pictures=pictures))
        sizes.append(len(prompt_ids) + sum(lengths[bundle] for bundle in first))
        split.append([RowPart(prompt_ids, part, before=span, pictures=pictures) for part in parts[1:]])
        in_chunks.append([])
        for member in members:
            if member in chunks and span is not None:
                in_chunks[-1] += _cut_completion(rollouts[member], member, chunks[member], span)
    cut: list[list[RowPart]] = []
    fitted = best_fit(sizes, max_tokens)
    fitted.sort(key=lambda some: -sum(sizes[group] for group in some))
    for some in fitted:
        for before in (split, in_chunks):
            cut += [[part] for group in some for part in before[group]]
        cut.append([with_prompt[group] for group in some])
    return cut


def _cut_completion(rollout: Rollout, member: int, chunks: Sequence[Chunk], prompt: CarriedSpan) -> list[RowPart]:
    """Return a part for each chunk that has a backward pass, the last first: it follows the chunks before it."""
    token_ids_T, before = rollout.completion.arrays[0], prompt
    if rollout.completion.pictures:
        raise ValueError(
            f"A completion of prompt {rollout.prompt.prompt_id!r} has observed images and is cut into chunks, which "
            "are of texts alone; leave out the plug-in that cuts completions."
        )
    last = max((number for number, chunk in enumerate(chunks) if chunk.weight), default=-1)
    parts: list[RowPart] = []
    for number, chunk in enumerate(chunks[: last + 1]):
        span = None
        if number < last:
            span = CarriedSpan(token_ids_T[chunk.begin : chunk.end].tolist(), before, chunk.weight)
        if chunk.weight:
            parts.insert(0, RowPart(rollout.prompt.token_ids, [member], before, span, chunk, rollout.prompt.pictures))
        before = span or before
    return parts


def _bundles(token_ids: Sequence[np.ndarray], max_tokens: int, least_shared: int) -> tuple[list[list[int]], list[int]]:
    """Put completions together that begin with the same tokens, as many as fit; in the order of the first of each.

    Returns:
        The completions of each bundle, by number, and the tokens that they take.
    """
    tree = prefix_tree([token_ids_T[:-1] for token_ids_T in token_ids], least_shared)
    paths: list[list[int]] = [[] for _ in token_ids]
    for number, branch in enumerate(tree):
        for member in branch.members:
            paths[member].append(number)
    bundles: list[tuple[list[int], int]] = []
    begun: set[int] = set()  # branches of the last bundle
    for member in sorted(range(len(paths)), key=paths.__getitem__):  # depth first
        together = not begun.isdisjoint(paths[member])
        more = 1 + sum(tree[number].end - tree[number].begin for number in paths[member] if number not in begun)
        if together and bundles[-1][1] + more <= max_tokens:
            bundles[-1] = [*bundles[-1][0], member], bundles[-1][1] + more
        else:
            begun.clear()
            bundles.append(([member], 1 + sum(tree[number].end - tree[number].begin for number in paths[member])))
        begun.update(paths[member])
    bundles.sort(key=lambda bundle: min(bundle[0]))
    return [members for members, _ in bundles], [num_tokens for _, num_tokens in bundles]


def best_fit(sizes: Sequence[int], capacity: int, taken: int = 0) -> list[list[int]]:
    """Put each item, largest first, into the fullest bin that has room for it, or into a new one; return bins of items.

    Best-fit decreasing: at most 11/9 of the fewest bins possible, plus 4 (D. S. Johnson, "Near-optimal bin packing
    algorithms", 1973). No item may be larger than ``capacity``. Of the first bin ``taken`` tokens are taken beforehand.
    """
    bins: list[list[int]] = [[]] if taken else []
    room = [(capacity - taken, 0)] if taken else []  # (free tokens, bin), in order
    for item in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        place = bisect_left(room, (sizes[item], 0))
        if place < len(room):
            free, number = room.pop(place)
        else:
            free, number = capacity, len(bins)
            bins.append([])
        bins[number].append(item)
        insort(room, (free - sizes[item], number))
    return bins


def pack_padded(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack rows that are padded to the longest of their bin, the longest first; return the rows of each bin."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    bins = []
    while order:
        rows = capacity // lengths[order[0]]
        bins.append(order[:rows])
        order = order[rows:]
    return bins
