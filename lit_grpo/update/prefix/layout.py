"""Visibility of tokens in a packed row: as labels for a GPU's mask, and as pieces that a CPU attends in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from lit_grpo.types import MutualSpan

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
MASKED_ROWS = 512  # queries of one masked piece, so that a mask takes no more than 512 x (window + 512) numbers


class Stretch(NamedTuple):
    """Tokens of a packed row that are neighbors, with positions that are: a prompt, or what responses have in common.

    It has ``length`` tokens, stands at ``start``, and its first token has the position ``first``. The stretches of a
    row are numbered depth first: a prompt, then the tree of its responses, each after the one that it begins at. Those
    that come after it, up to the number ``last``, see it. A ``carried`` one (a prompt, with the part of a response that
    was computed of it) has keys and values alone, which were computed before and follow those of the row. The tokens of
    each ``mutual`` span, counted from the stretch's first, also see those of the span that come after them.

    Example:
        Two responses that begin with the same 40 tokens, and end with 5 and 7 of their own, after a prompt of 10::

            Stretch(0, 0, 10, last=3), Stretch(10, 10, 40, last=3),
            Stretch(50, 50, 5, last=2), Stretch(55, 50, 7, last=3)
    """

    start: int
    first: int
    length: int
    last: int
    carried: bool = False
    mutual: tuple[MutualSpan, ...] = ()


class Piece(NamedTuple):
    """Queries that attend to keys in one call.

    ``causal`` and ``band`` exclude each other; with neither, every query sees every key. ``band`` is (how far the first
    query stands after the first key, the window), or without a window where each query sees the keys after it alone.
    ``merges`` is set where the queries have seen other keys before.
    """

    queries: slice
    keys: slice
    causal: bool = False
    band: tuple[int, int | None] | None = None
    merges: bool = False

    def mask(self, like: torch.Tensor, band: tuple[int, int | None]) -> torch.Tensor:
        """Return what ``band`` adds to scores, shape (1, 1, queries, keys), with dtype and device of ``like``."""
        offset, window = band
        queries_Q1 = torch.arange(self.queries.stop - self.queries.start, device=like.device)[:, None] + offset
        distance_QK = queries_Q1 - torch.arange(self.keys.stop - self.keys.start, device=like.device)
        hidden_QK = distance_QK >= 0 if window is None else (distance_QK < 0) | (distance_QK >= window)
        return torch.zeros(hidden_QK.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden_QK, -torch.inf)[
            None, None
        ]


def key_labels(stretches: Sequence[Stretch]) -> torch.Tensor:
    """Number of its stretch, of the last stretch that sees it, its position, and the first that sees it, of every key.

    So a token sees the keys whose two numbers enclose that of its own stretch, up to its position. The first
    position that sees a key is its own, and of keys in mutual spans the span's first.

    Returns:
        Shape (4, keys), int64: those of the row, then those that are carried.
    """
    labels_4K = torch.empty((4, sum(stretch.length for stretch in stretches)), dtype=torch.int64)
    for number, stretch in enumerate(stretches):
        rows = slice(stretch.start, stretch.start + stretch.length)
        labels_4K[0, rows], labels_4K[1, rows] = number, stretch.last
        labels_4K[2:, rows] = torch.arange(stretch.first, stretch.first + stretch.length)
        for span in stretch.mutual:
            labels_4K[3, stretch.start + span.begin : stretch.start + span.end] = stretch.first + span.begin
    return labels_4K


def sees_ahead(stretches: Sequence[Stretch], window: int | None) -> bool:
    """Return whether any token of a row sees one after it in layers with this sliding window."""
    return any(span.everywhere or window is not None for stretch in stretches for span in stretch.mutual)


def attention_pieces(stretches: Sequence[Stretch], window: int | None) -> list[Piece]:
    """Cut the attention of a packed row into pieces in which no key is repeated and no query padded.

    Each stretch attends to itself, its mutual spans also ahead, and then all that come after it, which are neighbors in
    the row, to it.

    Args:
        stretches: Stretches of the packed row, in order.
        window: How many tokens back a query sees, its own among them; ``None`` for all.
    """
    pieces: list[Piece] = []
    rows = [slice(stretch.start, stretch.start + stretch.length) for stretch in stretches]
    for number, own in enumerate(stretches):
        if own.length and not own.carried:
            if window is None or own.length <= window:
                pieces.append(Piece(rows[number], rows[number], causal=True))
            else:
                pieces += _windowed(own, own, window, merges=False)
            for span in own.mutual:
                if (span.everywhere or window is not None) and span.end - span.begin > 1:
                    begin, end = own.start + span.begin, own.start + span.end
                    pieces.append(Piece(slice(begin, end - 1), slice(begin + 1, end), band=(-1, None), merges=True))
    for number, seen in enumerate(stretches):
        asking = [stretch for stretch in stretches[number + 1 : seen.last + 1] if stretch.length and seen.length]
        if not asking:
            continue
        if window is None or max(stretch.first + stretch.length for stretch in asking) <= window:
            queries = slice(asking[0].start, asking[-1].start + asking[-1].length)
            pieces.append(Piece(queries, rows[number], merges=True))
        else:
            for stretch in asking:
                pieces += _windowed(stretch, seen, window, merges=True)
    return pieces


def _windowed(queries: Stretch, keys: Stretch, window: int, merges: bool) -> Iterator[Piece]:
    """Cut queries into rows of at most ``MASKED_ROWS``, each with the keys that some of them see."""
    end_of_keys = keys.first + keys.length
    last = min(queries.first + queries.length, end_of_keys + window - 1)  # later queries see none of the keys
    to_row, to_key = queries.start - queries.first, keys.start - keys.first
    for begin in range(queries.first, last, MASKED_ROWS):
        end = min(begin + MASKED_ROWS, last)
        first_seen, end_seen = max(keys.first, begin - window + 1), min(end_of_keys, end)
        whole = end_seen <= begin + 1 and end - first_seen <= window
        band = None if whole else (begin - first_seen, window)
        asking, seen = slice(begin + to_row, end + to_row), slice(first_seen + to_key, end_seen + to_key)
        yield Piece(asking, seen, band=band, merges=merges)


def piecewise_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Sequence[Piece],
    scaling: float,
    cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend in pieces whose results are merged as if one softmax had run over all keys of a query.

    The outputs of two disjoint sets of keys are averaged with weights ``exp(logsumexp - joint logsumexp)``, and the
    backward pass runs each piece with the joint output and log-sum-exp (FlashAttention, arXiv 2205.14135, section 3.1
    and appendix B.2). Keys and values of fewer heads than the queries are shared, not repeated. A sink is one more key
    of all queries of a head, whose score is learned and whose value is zero.

    Args:
        query: Shape (1, heads, T, head size).
        key: Shape (1, KV heads, T, head size).
        value: Values, of the shape of ``key``.
        pieces: Which queries see which keys; those of a query that ``merges`` come after one that does not.
        scaling: Scores are multiplied by it.
        cap: The limit of scores, ``cap tanh(score / cap)``, which torch's kernel does not know: it takes longer.
        sinks_H: The score of each head's sink.

    Returns:
        Shape (1, heads, T, head size), laid out in memory as (1, T, heads, head size).
    """
    return _PiecewiseAttention.apply(query, key, value, pieces, scaling, cap, sinks_H)


class _PiecewiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pieces: Sequence[Piece],
        scaling: float,
        cap: float | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        batch, heads, num_tokens, size = query.shape
        output = query.new_empty((batch, num_tokens, heads, size)).transpose(1, 2)
        accumulated = torch.float64 if query.dtype == torch.float64 else torch.float32
        logsumexp = query.new_empty((batch, num_tokens, heads), dtype=accumulated).transpose(1, 2)
        for piece in pieces:
            rows, keys = piece.queries, piece.keys
            parts = query[:, :, rows], key[:, :, keys], value[:, :, keys]
            if cap is None:
                mask = None if piece.band is None else piece.mask(query, piece.band)
                some, log_sum = _flash(*parts, 0.0, piece.causal, attn_mask=mask, scale=scaling)
            else:
                some, log_sum = _capped(*parts, piece, scaling, cap)
            if piece.merges:
                joint = torch.logaddexp(logsumexp[:, :, rows], log_sum)
                first, second = (logsumexp[:, :, rows] - joint).exp()[..., None], (log_sum - joint).exp()[..., None]
                some, log_sum = output[:, :, rows] * first + some * second, joint
            output[:, :, rows] = some
            logsumexp[:, :, rows] = log_sum
        if sinks_H is not None:
            joint = torch.logaddexp(logsumexp, sinks_H.to(accumulated)[:, None])
            output *= (logsumexp - joint).exp()[..., None].to(output.dtype)
            logsumexp = joint
        ctx.save_for_backward(query, key, value, output, logsumexp, sinks_H)
        ctx.pieces, ctx.scaling, ctx.cap = pieces, scaling, cap
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, logsumexp, sinks_H = ctx.saved_tensors
        query_grad, key_grad, value_grad = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for piece in ctx.pieces:
            rows, keys = piece.queries, piece.keys
            parts = (
                *(gradients[0][:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys]),
                *(output[:, :, rows], logsumexp[:, :, rows]),
            )
            if ctx.cap is None:
                mask = None if piece.band is None else piece.mask(query, piece.band)
                found = _flash_backward(*parts, 0.0, piece.causal, attn_mask=mask, scale=ctx.scaling)
            else:
                found = _capped_backward(*parts, piece, ctx.scaling, ctx.cap)
            query_part, key_part, value_part = found
            query_grad[:, :, rows] += query_part
            key_grad[:, :, keys] += key_part
            value_grad[:, :, keys] += value_part
        sinks_grad = None
        if sinks_H is not None:
            shares = (sinks_H.to(logsumexp.dtype)[:, None] - logsumexp).exp()
            sinks_grad = -(shares * (gradients[0] * output).sum(-1)).sum((0, 2)).to(sinks_H.dtype)
        return query_grad, key_grad, value_grad, None, None, None, sinks_grad


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: Piece, scaling: float, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what torch's kernel returns, with scores that are capped, some queries at a time."""
    outputs, log_sums = [], []
    for part in _some_queries(query):
        scores, _ = _capped_scores(query[:, :, part], key, piece, part, scaling, cap)
        log_sum = scores.logsumexp(-1)
        weights = (scores - log_sum[..., None]).exp().to(value.dtype)
        outputs.append((weights @ value[:, :, None]).flatten(1, 2))
        log_sums.append(log_sum.flatten(1, 2))
    return torch.cat(outputs, 2), torch.cat(log_sums, 2)


def _capped_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    piece: Piece,
    scaling: float,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, as torch's kernel would."""
    query_parts, key_grad, value_grad = [], torch.zeros_like(key), torch.zeros_like(value)
    for part in _some_queries(query):
        its, heads = query[:, :, part], key.shape[1]
        scores, bent = _capped_scores(its, key, piece, part, scaling, cap)
        weights = (scores - logsumexp[:, :, part].unflatten(1, (heads, -1))[..., None]).exp()
        above = gradient[:, :, part].unflatten(1, (heads, -1))
        delta = (gradient[:, :, part] * output[:, :, part]).sum(-1).unflatten(1, (heads, -1))[..., None]
        of_scores = weights * (above @ value[:, :, None].transpose(-1, -2) - delta) * (1 - bent.square()) * scaling
        of_scores = of_scores.to(query.dtype)
        query_parts.append((of_scores @ key[:, :, None]).flatten(1, 2))
        key_grad += (of_scores.transpose(-1, -2) @ its.unflatten(1, (heads, -1))).sum(2)
        value_grad += (weights.to(value.dtype).transpose(-1, -2) @ above).sum(2)
    return torch.cat(query_parts, 2), key_grad, value_grad


def _some_queries(query: torch.Tensor) -> Iterator[slice]:
    for begin in range(0, query.shape[2], MASKED_ROWS):
        yield slice(begin, min(begin + MASKED_ROWS, query.shape[2]))


def _capped_scores(
    query: torch.Tensor, key: torch.Tensor, piece: Piece, part: slice, scaling: float, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of some queries of a piece, shape (1, KV heads, queries per KV head, queries, keys).

    And what they are of the cap, with which the gradient is bent.
    """
    grouped = query.unflatten(1, (key.shape[1], -1))
    bent = torch.tanh(grouped @ key[:, :, None].transpose(-1, -2) * (scaling / cap))
    bent = bent if bent.dtype == torch.float64 else bent.float()
    scores = bent * cap
    if piece.causal:
        places_Q1 = torch.arange(part.start, part.stop, device=query.device)[:, None]
        scores = scores.masked_fill(torch.arange(key.shape[2], device=query.device) > places_Q1, -torch.inf)
    elif piece.band is not None:
        scores = scores + piece.mask(scores, piece.band)[:, :, None, part]
    return scores, bent
