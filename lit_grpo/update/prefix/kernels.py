"""Torch's attention kernels for sequences of any lengths, for which nothing is compiled; a row of ``KERNELS`` each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_aten = torch.ops.aten
# Of the memory-efficient kernels: log-sum-exps of a sequence are padded, and masks have numbers (here the last query
# sees all keys of its sequence).
_ALIGNED, _MASKS = 32, {False: 0, True: 2}


class Kernels(NamedTuple):
    """Kernels of one kind.

    Args:
        name: What torch calls them.
        forward: Arguments and results of ``aten::_flash_attention_forward``.
        backward: Arguments and results of ``aten::_flash_attention_backward``.
        takes: Returns whether they take queries (``torch.backends.cuda.SDPAParams``) on this device.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    takes: Callable[[Any], bool]


class _Seats(NamedTuple):
    """Places of queries in the memory-efficient kernels, and of their log-sum-exps: padded, sequence by sequence.

    In the backward pass their windows are right only with as many queries as keys, so with a window queries are laid
    out as the keys are, with queries of zero where a sequence has keys of its prompt.

    Args:
        bounds: Where sequences of queries and of keys begin, and the longest of both, as the kernels want them.
        of_T: The sequence of each query.
        in_T: Its place in that sequence.
        row_T: Its place in the row that is laid out, with a window; None without: the row stays as it is.
        blind_T11: Whether its sequence has no key.
    """

    bounds: tuple[torch.Tensor, torch.Tensor, int, int]
    of_T: torch.Tensor
    in_T: torch.Tensor
    row_T: torch.Tensor | None
    blind_T11: torch.Tensor

    @classmethod
    def of(
        cls, query: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor, max_q: int, max_k: int, windowed: bool
    ) -> _Seats:
        of_T = torch.repeat_interleave(starts_q.diff(), output_size=len(query))
        row_T, num_keys = torch.arange(len(query), device=query.device), starts_k.diff()
        in_T, blind_T11 = row_T - starts_q[of_T], (num_keys == 0)[of_T, None, None]
        if not windowed:
            return cls((starts_q, starts_k, min(max_q, len(query)), max_k), of_T, in_T, None, blind_T11)
        in_T += (num_keys - starts_q.diff())[of_T]
        return cls((starts_k, starts_k, max_k, max_k), of_T, in_T, starts_k[of_T] + in_T, blind_T11)

    def seat(self, rows_THS: torch.Tensor, num_keys: int) -> torch.Tensor:
        """Lay out queries, or what has their shape, as one row of a batch."""
        if self.row_T is not None:
            rows_THS = rows_THS.new_zeros((num_keys, *rows_THS.shape[1:])).index_copy_(0, self.row_T, rows_THS)
        return rows_THS[None]

    def unseat(self, rows_1THS: torch.Tensor) -> torch.Tensor:
        """Undo :meth:`seat`, with 0 for queries without a key, which the kernels leave as memory was."""
        rows_THS = rows_1THS[0] if self.row_T is None else rows_1THS[0, self.row_T]
        return rows_THS.masked_fill(self.blind_T11, 0)


def _efficient_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor,
    max_q: int, max_k: int, dropout: float, causal: bool, debug: bool, *, scale: float, window_size_left: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    window = None if window_size_left is None else window_size_left + 1
    seats = _Seats.of(query, starts_q, starts_k, max_q, max_k, window is not None)
    output, logsumexp_SHL, *_ = _aten._efficient_attention_forward(
        seats.seat(query, len(key)), *(_repeated(each, query) for each in (key, value)), None, *seats.bounds,
        dropout, _MASKS[causal], True, scale=scale, window_size=window,
    )  # fmt: skip
    return seats.unseat(output), logsumexp_SHL[seats.of_T, :, seats.in_T].T.contiguous()


def _efficient_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
    logsumexp_HT: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor, max_q: int, max_k: int, dropout: float,
    causal: bool, *_: torch.Tensor, scale: float, window_size_left: int | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    window = None if window_size_left is None else window_size_left + 1
    seats = _Seats.of(query, starts_q, starts_k, max_q, max_k, window is not None)
    padded = -(-seats.bounds[2] // _ALIGNED) * _ALIGNED
    logsumexp_SHL = logsumexp_HT.new_full((len(starts_q) - 1, query.shape[1], padded), torch.inf)
    logsumexp_SHL[seats.of_T, :, seats.in_T] = logsumexp_HT.T
    laid_out = (seats.seat(each, len(key)) for each in (gradient, query, output))
    repeated, unused = (_repeated(each, query) for each in (key, value)), starts_q.new_empty((), dtype=torch.int64)
    gradient, query, output = laid_out
    of_query, *of_keys, _ = _aten._efficient_attention_backward(
        gradient, query, *repeated, None, output, *seats.bounds, logsumexp_SHL,
        dropout, unused, unused, _MASKS[causal], False, scale=scale, window_size=window,
    )  # fmt: skip
    return seats.unseat(of_query), *(each[0].unflatten(1, (key.shape[1], -1)).sum(2) for each in of_keys)


def _repeated(heads_TKS: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return keys or values for each query head, as one row of a batch; these kernels do not share them."""
    return heads_TKS.repeat_interleave(query.shape[-2] // heads_TKS.shape[1], 1)[None]


def _takes_flash(asked: Any) -> bool:
    return asked.query.shape[-1] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(asked)


def _takes_efficient(asked: Any) -> bool:
    return torch.backends.cuda.can_use_efficient_attention(asked)


KERNELS = (
    Kernels("flash", _aten._flash_attention_forward, _aten._flash_attention_backward, _takes_flash),
    Kernels("memory-efficient", _efficient_forward, _efficient_backward, _takes_efficient),
)
"""In the order in which they are tried: 16 bits from sm_80 on; then float32, and float16 of older GPUs."""
