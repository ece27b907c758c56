"""Pieces between the products of a decoder's layer as three Triton kernels, each of one launch.

They compute in float32. Under autocast they round where the model's modules round, so that log-probs are as near to
those of an update as without them; for weights in bfloat16 they round less often. A launch depends on no length and no
place, so a CUDA graph of a step stays right. What they replace is written out in ``FusedDecoder.__call__``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_and_norm(
    hidden, added, weight, total, normed, eps,
    ADDS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    there, place = column < SIZE, row * SIZE + column
    number = tl.load(hidden + place, mask=there, other=0.0)
    if ADDS:
        more = tl.load(added + place, mask=there, other=0.0)
        number = (number.to(tl.float32) + more.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + place, number, mask=there)  # elsewhere, because several threads may read a number
    number = number.to(tl.float32)
    scale = tl.rsqrt(tl.sum(number * number, 0) / SIZE + eps)
    factor = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + place, (number * scale * factor).to(normed.dtype.element_ty), mask=there)


@triton.jit
def _norm_and_rotate(
    query, key, query_weight, key_weight, cosine, sine, positions, heads, query_row, key_row, eps,
    NORMS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, head, column = tl.program_id(0), tl.program_id(1), tl.arange(0, HALF)
    if head < QUERIES:
        source, weight = query + row * query_row + head * 2 * HALF, query_weight
    else:
        source, weight = key + row * key_row + (head - QUERIES) * 2 * HALF, key_weight
    first = tl.load(source + column).to(tl.float32)
    second = tl.load(source + HALF + column).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
        first = (first * scale).to(query.dtype.element_ty).to(tl.float32) * tl.load(weight + column).to(tl.float32)
        second = (second * scale).to(query.dtype.element_ty).to(tl.float32)
        second = second * tl.load(weight + HALF + column).to(tl.float32)
    turn = tl.load(positions + row) * 2 * HALF + column
    begin = first * tl.load(cosine + turn).to(tl.float32) + second * tl.load(sine + turn).to(tl.float32)
    end = second * tl.load(cosine + HALF + turn).to(tl.float32) + first * tl.load(sine + HALF + turn).to(tl.float32)
    there = heads + (row * HEADS + head) * 2 * HALF + column
    tl.store(there, begin.to(heads.dtype.element_ty))
    tl.store(there + HALF, end.to(heads.dtype.element_ty))


@triton.jit
def _silu_and_multiply(gate, up, mixed, gate_row, up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < SIZE
    number = tl.load(gate + row * gate_row + column, mask=there, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_row + column, mask=there, other=0.0).to(tl.float32)
    number = (number / (1.0 + tl.exp(-number))).to(gate.dtype.element_ty).to(tl.float32) * factor
    tl.store(mixed + row * SIZE + column, number.to(mixed.dtype.element_ty), mask=there)


class LayerKernels:
    """Launches of the pieces between the products of a layer."""

    def add_and_norm(
        self,
        hidden_BD: torch.Tensor,
        added_BD: torch.Tensor | None,
        weight_D: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, if there is something to add, and take the RMS norm; return the sum, and the normed in ``dtype``."""
        rows, size = hidden_BD.shape
        normed_BD = torch.empty_like(hidden_BD, dtype=dtype)
        total_BD = hidden_BD if added_BD is None else torch.empty_like(hidden_BD)
        block = triton.next_power_of_2(size)
        _add_and_norm[(rows,)](
            hidden_BD, hidden_BD if added_BD is None else added_BD, weight_D, total_BD, normed_BD, eps,
            ADDS=added_BD is not None, SIZE=size, BLOCK=block, num_warps=min(16, max(4, block // 512)),
        )  # fmt: skip
        return total_BD, normed_BD

    def norm_and_rotate(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None,
        tables: tuple[torch.Tensor, ...],
        positions_B: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Norm query and key heads, if they have norms, and rotate them.

        Args:
            query: Shape (rows, query heads x size); a row's numbers are next to one another.
            key: Shape (rows, key heads x size), in the same order.
            norms: Weights of their norms, shape (size,), and epsilon.
            tables: Cosine and sine of all positions, shape (positions, size); the sine's first half is negative.
            positions_B: The position of each row, int64.
            dtype: Dtype of the result.

        Returns:
            Query heads, then key heads, shape (rows, heads, size).
        """
        rows, size = len(query), tables[0].shape[-1]
        num_queries, num_heads = query.shape[1] // size, (query.shape[1] + key.shape[1]) // size
        heads = torch.empty((rows, num_heads, size), dtype=dtype, device=query.device)
        *weights, eps = (query, key, 0.0) if norms is None else norms
        _norm_and_rotate[rows, num_heads](
            query, key, *weights, *tables, positions_B, heads, query.stride(0), key.stride(0), eps,
            NORMS=norms is not None, QUERIES=num_queries, HEADS=num_heads, HALF=size // 2, num_warps=1,
        )  # fmt: skip
        return heads

    def silu_and_multiply(self, gate_BF: torch.Tensor, up_BF: torch.Tensor) -> torch.Tensor:
        """Return ``silu(gate) x up``; a row's numbers are next to one another."""
        rows, size = gate_BF.shape
        mixed_BF = torch.empty((rows, size), dtype=up_BF.dtype, device=up_BF.device)
        block = min(1024, triton.next_power_of_2(size))  # numbers of a row that one program multiplies
        _silu_and_multiply[rows, triton.cdiv(size, block)](
            gate_BF, up_BF, mixed_BF, gate_BF.stride(0), up_BF.stride(0), SIZE=size, BLOCK=block
        )
        return mixed_BF
