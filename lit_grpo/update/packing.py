"""Which completions go through the policy together: best fit under a token budget. Pure, on lengths alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Bin:
    """Items, by index, and the tokens that they take."""

    tokens: int = 0
    items: list[int] = field(default_factory=list)


def best_fit(sizes: Sequence[int], capacity: int) -> list[Bin]:
    """Put each item, largest first, into the fullest bin that has room for it, or into a new one.

    Best-fit decreasing: at most 11/9 of the fewest bins possible, plus 4 (D. S. Johnson, "Near-optimal bin packing
    algorithms", 1973). No item may be larger than ``capacity``.
    """
    bins: list[Bin] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), in order
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        place = bisect_left(room, (sizes[item], 0))
        if place < len(room):
            free, number = room.pop(place)
        else:
            free, number = capacity, len(bins)
            bins.append(Bin())
        bins[number].items.append(item)
        bins[number].tokens += sizes[item]
        insort(room, (free - sizes[item], number))
    return bins


def pack_groups(prompts: Sequence[int], responses: Sequence[Sequence[int]], capacity: int) -> list[list[list[int]]]:
    """Pack groups whose prompt counts once wherever responses of theirs go; the fullest bin comes first.

    A group that is larger than ``capacity`` is split into as few parts as best fit finds, and each part takes the
    prompt again; a group that fits is never split.

    Args:
        prompts: Tokens of each group's prompt.
        responses: Tokens of each response, by group; none is longer than ``capacity`` less the prompt.
        capacity: The most tokens of a bin.

    Returns:
        For every bin its parts, each a list of responses, counted through over all groups.
    """
    parts: list[Bin] = []
    first = 0
    for prompt, lengths in zip(prompts, responses, strict=True):
        for split in best_fit(lengths, capacity - prompt):
            parts.append(Bin(prompt + split.tokens, [first + item for item in split.items]))
        first += len(lengths)
    bins = best_fit([part.tokens for part in parts], capacity)
    return [[parts[item].items for item in one.items] for one in sorted(bins, key=lambda one: -one.tokens)]


def pack_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack rows that are padded to the longest of their bin, the longest first; return the rows of each bin."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    bins = []
    while order:
        rows = capacity // lengths[order[0]]
        bins.append(order[:rows])
        order = order[rows:]
    return bins
