"""Which queries of a packed row meet which keys: a prompt once, its responses after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MASKED_ROWS = 512  # queries of one masked piece, so that a mask takes no more than 512 x (window + 512) numbers


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of the row whose positions are neighbours too: ``start`` in the row, ``first`` position."""

    start: int
    first: int
    length: int

    def cut(self, begin: int, end: int) -> Stretch:
        """Return the tokens at the positions from ``begin`` to before ``end``."""
        return Stretch(self.start + begin - self.first, begin, end - begin)

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + self.length

    @property
    def rows(self) -> slice:
        """Where it stands in the row."""
        return slice(self.start, self.start + self.length)


@dataclass(frozen=True)
class PackedGroup:
    """Where a prompt and some of its responses stand in a packed row: the prompt once, the responses after it.

    The responses are a tree of branches (:mod:`lit_grpo.trajectory`), each after the branch that it begins at:
    what several responses begin with is one branch, and stands in the row once. ``branch_tokens`` counts what of each
    goes through the model: all of a response but its last token, which predicts nothing. ``parents`` has the number of
    the branch before each, None for the prompt; by default no branch is after another. Branches are in depth-first
    order. The prompt of a group that is split may be carried instead of standing in the row: its keys and values were
    computed for all of its micro-batches, and follow those of the row from ``carried_at`` on.

    Example:
        Two responses that begin with the same 40 tokens, and end with 5 and 7 of their own, after a prompt of 10::

            PackedGroup(start=0, prompt_tokens=10, branch_tokens=(40, 5, 7), parents=(None, 0, 0))
    """

    start: int
    prompt_tokens: int
    branch_tokens: tuple[int, ...]
    carried_at: int | None = None
    parents: tuple[int | None, ...] = ()

    @property
    def prompt_start(self) -> int:
        """Where its prompt's keys begin."""
        return self.start if self.carried_at is None else self.carried_at

    @property
    def response_start(self) -> int:
        """Where its first response begins in the row."""
        return self.start + (self.prompt_tokens if self.carried_at is None else 0)

    @property
    def end(self) -> int:
        """Where it ends in the row."""
        return self.response_start + sum(self.branch_tokens)

    @property
    def prompt(self) -> Stretch:
        """Its prompt's keys."""
        return Stretch(self.prompt_start, 0, self.prompt_tokens)

    @property
    def branches(self) -> list[Stretch]:
        """Its branches, in order."""
        stretches, start = list[Stretch](), self.response_start
        for length, parent in zip(self.branch_tokens, self._parents, strict=True):
            first = self.prompt_tokens if parent is None else stretches[parent].end
            stretches.append(Stretch(start, first, length))
            start += length
        return stretches

    @property
    def last_below(self) -> list[int]:
        """The number of the last branch that comes after each, directly or not; its own where none does."""
        last = list(range(len(self.branch_tokens)))
        for number, parent in reversed([*enumerate(self._parents)]):
            if parent is not None:
                last[parent] = max(last[parent], last[number])
        return last

    @property
    def _parents(self) -> Sequence[int | None]:
        return self.parents or [None] * len(self.branch_tokens)


@dataclass(frozen=True)
class Piece:
    """Queries that attend to keys in one call.

    ``causal`` and ``band`` exclude each other; with neither, every query sees every key. ``band`` is (how far the first
    query stands after the first key, the window). ``merges`` is set where the queries have seen other keys before.
    """

    queries: slice
    keys: slice
    causal: bool = False
    band: tuple[int, int] | None = None
    merges: bool = False

    def mask(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return what is added to the scores, shape (1, 1, queries, keys), with dtype and device of ``like``."""
        if self.band is None:
            return None
        offset, window = self.band
        queries_Q1 = torch.arange(self.queries.stop - self.queries.start, device=like.device)[:, None] + offset
        distance_QK = queries_Q1 - torch.arange(self.keys.stop - self.keys.start, device=like.device)
        hidden_QK = (distance_QK < 0) | (distance_QK >= window)
        return torch.zeros(hidden_QK.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden_QK, -torch.inf)[
            None, None
        ]


def key_labels(groups: Sequence[PackedGroup]) -> torch.Tensor:
    """Number of its stretch, number of the last stretch that sees it, and position, for every key.

    A stretch is a prompt or a branch; the numbers count all groups, depth first. So a token sees the keys whose two
    numbers enclose that of its own stretch, up to its position.

    Returns:
        Shape (3, keys), int64: those of the row, then those of carried prompts.
    """
    num_keys = sum(group.prompt_tokens + sum(group.branch_tokens) for group in groups)
    labels_3K = torch.empty((3, num_keys), dtype=torch.int64)
    number = 0
    for group in groups:
        lasts = [len(group.branch_tokens), *(last + 1 for last in group.last_below)]
        for place, (stretch, last) in enumerate(zip([group.prompt, *group.branches], lasts, strict=True)):
            labels_3K[0, stretch.rows], labels_3K[1, stretch.rows] = number + place, number + last
            labels_3K[2, stretch.rows] = torch.arange(stretch.first, stretch.end)
        number += len(lasts)
    return labels_3K


def group_pieces(group: PackedGroup, window: int | None) -> list[Piece]:
    """Cut the attention of a group into pieces in which no key is repeated and no query padded.

    Each stretch attends to itself, and then all that comes after it, which are neighbours in the row, to it.

    Args:
        group: Where it stands in the row.
        window: How many tokens back a query sees, its own among them; ``None`` for all.
    """
    branches, last_below = group.branches, group.last_below
    stretches = branches if group.carried_at is not None else [group.prompt, *branches]
    pieces = [piece for stretch in stretches if stretch.length for piece in _own_pieces(stretch, window)]
    below = [branches, *(branches[number + 1 : last + 1] for number, last in enumerate(last_below))]
    for seen, after in zip([group.prompt, *branches], below, strict=True):
        asking = [stretch for stretch in after if stretch.length and seen.length]
        if asking and (window is None or max(stretch.end for stretch in asking) <= window):
            pieces.append(Piece(slice(asking[0].start, asking[-1].rows.stop), seen.rows, merges=True))
        else:
            pieces += [piece for stretch in asking for piece in _windowed(stretch, seen, window or 0, merges=True)]
    return pieces


def _own_pieces(span: Stretch, window: int | None) -> Iterator[Piece]:
    """Causal attention of a span to itself."""
    if window is None or span.length <= window:
        yield Piece(span.rows, span.rows, causal=True)
    else:
        yield from _windowed(span, span, window, merges=False)


def _windowed(queries: Stretch, keys: Stretch, window: int, merges: bool) -> Iterator[Piece]:
    """Cut queries into rows of at most ``MASKED_ROWS``, each with the keys that some of them see."""
    last = min(queries.end, keys.end + window - 1)  # later queries see none of the keys
    for begin in range(queries.first, last, MASKED_ROWS):
        end = min(begin + MASKED_ROWS, last)
        seen = keys.cut(max(keys.first, begin - window + 1), min(keys.end, end))
        whole = seen.end <= begin + 1 and end - seen.first <= window
        band = None if whole else (begin - seen.first, window)
        yield Piece(queries.cut(begin, end).rows, seen.rows, band=band, merges=merges)
