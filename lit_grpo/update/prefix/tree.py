"""Which sequences begin with the same tokens: the tree of their common prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Branch:
    """Tokens that some sequences have in common, at the positions from ``begin`` to before ``end``.

    Args:
        parent: The number of the branch that ends where this one begins; None for one that begins at position 0.
        begin: Of its first token.
        end: The position after its last token.
        members: The numbers of the sequences that pass through it, ascending.
    """

    parent: int | None
    begin: int
    end: int
    members: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """At least one."""
        return self.end - self.begin


def prefix_tree(sequences: Sequence[np.ndarray], least: int = 1) -> list[Branch]:
    """Return the branches of a tree in which each sequence is a path from a root, in depth-first order.

    For example, ``[5, 6, 7]``, ``[5, 6, 8, 9]`` and ``[4]`` have ``[5, 6]`` (both members), ``[7]``, ``[8, 9]`` and
    ``[4]``. A sequence without tokens passes through none, and equal sequences pass through the same. Branches after
    the same one are in the order of their first members.

    Args:
        sequences: Token ids of one dtype, each of shape (T,).
        least: Fewer common tokens than these are left with each sequence, so that a branch of several members has at
            least so many.
    """
    contents = [np.ascontiguousarray(sequence).tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=contents.__getitem__)  # those with a common prefix are neighbours
    common = [0, *(_num_common(sequences[a], sequences[b]) for a, b in itertools.pairwise(order))]
    branches: list[Branch] = []
    todo: list[tuple[slice, int, int | None]]
    todo = [(part, 0, None) for part in _parts(common, order, slice(0, len(order)), least)]
    while todo:
        neighbours, depth, parent = todo.pop()
        members = order[neighbours]
        end = len(sequences[members[0]]) if len(members) == 1 else min(common[neighbours.start + 1 : neighbours.stop])
        if end > depth:
            branches.append(Branch(parent, depth, end, tuple(sorted(members))))
        if len(members) > 1:
            todo += [(part, end, len(branches) - 1) for part in _parts(common, order, neighbours, end + least)]
    return branches


def _parts(common: Sequence[int], order: Sequence[int], neighbours: slice, least: int) -> list[slice]:
    """Part neighbours in ``order`` where fewer than ``least`` tokens are common; that of the first member is last."""
    cuts = [place for place in range(neighbours.start + 1, neighbours.stop) if common[place] < least]
    bounds = [neighbours.start, *cuts, neighbours.stop]
    parts = [slice(begin, end) for begin, end in itertools.pairwise(bounds) if begin < end]
    return sorted(parts, key=lambda part: -min(order[part]))


def _num_common(first: np.ndarray, second: np.ndarray) -> int:
    """The number of tokens with which both begin."""
    shorter = min(len(first), len(second))
    differing = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differing[0]) if len(differing) else shorter
