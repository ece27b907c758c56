"""Which queries of a packed row meet which keys: a prompt once, its responses after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MASKED_ROWS = 512  # queries of one masked piece, so that a mask takes no more than 512 x (window + 512) numbers


@dataclass(frozen=True)
class PackedGroup:
    """Where a prompt and some of its responses stand in a packed row: the prompt once, the responses after it.

    ``response_tokens`` counts what of each response goes through the model: all but its last token, which predicts
    nothing. The prompt of a group that is split may be carried instead of standing in the row: its keys and values were
    computed for all of its micro-batches, and follow those of the row from ``carried_at`` on.
    """

    start: int
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    carried_at: int | None = None

    @property
    def prompt_start(self) -> int:
        """Where its prompt's keys begin."""
        return self.start if self.carried_at is None else self.carried_at

    @property
    def response_start(self) -> int:
        """Where its first response begins in the row."""
        return self.start + (self.prompt_tokens if self.carried_at is None else 0)


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
    """Number of its group, number of its response within that (0 for the prompt) and position, for every key.

    Returns:
        Shape (3, keys), int64: those of the row, then those of carried prompts.
    """
    num_keys = sum(group.prompt_tokens + sum(group.response_tokens) for group in groups)
    labels_3K = torch.empty((3, num_keys), dtype=torch.int64)
    for number, group in enumerate(groups):
        start = group.prompt_start
        for segment, length in enumerate((group.prompt_tokens, *group.response_tokens)):
            rows = slice(start, start + length)
            labels_3K[0, rows], labels_3K[1, rows] = number, segment
            labels_3K[2, rows] = torch.arange(length) + (group.prompt_tokens if segment else 0)
            start = rows.stop if segment else group.response_start
    return labels_3K


def group_pieces(group: PackedGroup, window: int | None) -> list[Piece]:
    """Cut the attention of a group into pieces in which no key is repeated and no query padded.

    Args:
        group: Where it stands in the row.
        window: How many tokens back a query sees, its own among them; ``None`` for all.
    """
    prompt = Stretch(group.prompt_start, 0, group.prompt_tokens)
    responses, start = [], group.response_start
    for length in group.response_tokens:
        if length:
            responses.append(Stretch(start, group.prompt_tokens, length))
            start += length
    pieces = list(_own_pieces(prompt, window)) if group.carried_at is None else []
    for response in responses:
        pieces += _own_pieces(response, window)
    if responses and (window is None or max(response.end for response in responses) <= window):
        pieces.append(Piece(slice(responses[0].start, start), prompt.rows, merges=True))
    else:
        for response in responses:
            pieces += _windowed(response, prompt, window or 0, merges=True)
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
