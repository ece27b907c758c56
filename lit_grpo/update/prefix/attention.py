"""Attention of packed groups on the CPU: flash kernels on pieces, joined by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lit_grpo.update.prefix.layout import Piece

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def piecewise_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: Sequence[Piece], scaling: float
) -> torch.Tensor:
    """Attend in pieces whose results are merged as if one softmax had run over all keys of a query.

    The outputs of two disjoint sets of keys are averaged with weights ``exp(logsumexp - joint logsumexp)``, and the
    backward pass runs each piece with the joint output and log-sum-exp (FlashAttention, arXiv 2205.14135, section 3.1
    and appendix B.2). Keys and values of fewer heads than the queries are shared, not repeated.

    Args:
        query: Shape (1, heads, T, head size).
        key: Shape (1, KV heads, T, head size).
        value: Of the key's shape.
        pieces: Which queries see which keys; those of a query that ``merges`` come after one that does not.
        scaling: Scores are multiplied by it.

    Returns:
        Shape (1, heads, T, head size), laid out in memory as (1, T, heads, head size).
    """
    return _PiecewiseAttention.apply(query, key, value, pieces, scaling)  # pyright: ignore[reportReturnType]


class _PiecewiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: Sequence[Piece], scaling: float
    ) -> torch.Tensor:
        batch, heads, num_tokens, size = query.shape
        output = query.new_empty((batch, num_tokens, heads, size)).transpose(1, 2)
        accumulated = torch.float64 if query.dtype == torch.float64 else torch.float32
        logsumexp = query.new_empty((batch, num_tokens, heads), dtype=accumulated).transpose(1, 2)
        for piece in pieces:
            rows, keys = piece.queries, piece.keys
            some, log_sum = _flash(
                query[:, :, rows], key[:, :, keys], value[:, :, keys], 0.0, piece.causal,
                attn_mask=piece.mask(query), scale=scaling,
            )  # fmt: skip
            if piece.merges:
                some, log_sum = _merge(output[:, :, rows], logsumexp[:, :, rows], some, log_sum)
            output[:, :, rows] = some
            logsumexp[:, :, rows] = log_sum
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.pieces, ctx.scaling = pieces, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        query_grad, key_grad, value_grad = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for piece in ctx.pieces:
            rows, keys = piece.queries, piece.keys
            query_part, key_part, value_part = _flash_backward(
                gradients[0][:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys],
                output[:, :, rows], logsumexp[:, :, rows], 0.0, piece.causal,
                attn_mask=piece.mask(query), scale=ctx.scaling,
            )  # fmt: skip
            query_grad[:, :, rows] += query_part
            key_grad[:, :, keys] += key_part
            value_grad[:, :, keys] += value_part
        return query_grad, key_grad, value_grad, None, None


def _merge(
    output: torch.Tensor, logsumexp: torch.Tensor, more: torch.Tensor, more_logsumexp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join what the same queries saw in two sets of keys."""
    joint = torch.logaddexp(logsumexp, more_logsumexp)
    first, second = (logsumexp - joint).exp()[..., None], (more_logsumexp - joint).exp()[..., None]
    return output * first + more * second, joint
