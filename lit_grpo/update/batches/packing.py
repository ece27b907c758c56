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


def best_fit(sizes: Sequence[int], capacity: int, taken: int = 0) -> list[Bin]:
    """Put each item, largest first, into the fullest bin that has room for it, or into a new one.

    Best-fit decreasing: at most 11/9 of the fewest bins possible, plus 4 (D. S. Johnson, "Near-optimal bin packing
    algorithms", 1973). No item may be larger than ``capacity``. Of the first bin ``taken`` tokens are taken beforehand.
    """
    bins = [Bin(taken)] if taken else []
    room = [(capacity - taken, 0)] if taken else []  # (free tokens, bin), in order
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


@dataclass(frozen=True)
class Part:
    """Responses of a group that go through the policy together, by number within it; with their prompt or without."""

    group: int
    responses: tuple[int, ...]
    has_prompt: bool
    tokens: int


def pack_groups(prompts: Sequence[int], responses: Sequence[Sequence[int]], capacity: int) -> list[list[Part]]:
    """Pack groups whose prompt counts once for all of their responses; the fullest bin comes first.

    A group that fits is never split. Of one that is larger than ``capacity`` one part has the prompt, with responses or
    by itself. The others have bins of their own, right before that part's, so that few groups are begun at a time.

    Args:
        prompts: Tokens of each group's prompt, none longer than ``capacity``.
        responses: Tokens of each response, by group; none is longer than ``capacity``.
        capacity: The most tokens of a bin.

    Returns:
        The parts of each bin.
    """
    with_prompt: list[Part] = []
    others: list[list[Part]] = []
    for group, (prompt, lengths) in enumerate(zip(prompts, responses, strict=True)):
        first, *more = best_fit(lengths, capacity, taken=prompt)
        with_prompt.append(Part(group, tuple(first.items), True, first.tokens))
        others.append([Part(group, tuple(one.items), False, one.tokens) for one in more])
    order: list[list[Part]] = []
    for one in sorted(best_fit([part.tokens for part in with_prompt], capacity), key=lambda one: -one.tokens):
        parts = [with_prompt[item] for item in one.items]
        order += [[other] for part in parts for other in others[part.group]]
        order.append(parts)
    return order


def pack_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack rows that are padded to the longest of their bin, the longest first; return the rows of each bin."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    bins = []
    while order:
        rows = capacity // lengths[order[0]]
        bins.append(order[:rows])
        order = order[rows:]
    return bins
