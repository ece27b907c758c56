"""Attention of a decode step as two Triton kernels, whose shapes are the same in every step.

A row's keys and values lie in segments: its prompt, then the pieces of its completion. A program goes over a part of
one row's tokens for the queries that share one KV head, segment by segment, and keeps a running softmax; a second
kernel puts the parts of a row together (flash decoding, as in T. Dao et al., *Flash-Decoding for long-context
inference*, 2023). What a program reads is told by tables in the device's memory, and by nothing that a launch is given.
So a CUDA graph of a whole step stays right while rows, lengths and places change.

In a step with drafts a row has several queries, each of which attends to the ones before it. So a kernel of its own
puts the keys and values of all of them in place first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from lit_grpo.rollout.slots.attention import AttentionInputs

if TYPE_CHECKING:
    from lit_grpo.rollout.slots.kv.tables import RowTables

_PROGRAMS = 264  # that a step is cut into where rows and heads are fewer: two for each multiprocessor of an H100
_MOST_SPLITS = 16
_NO_LIMIT = 2**30
_LEAST_QUERIES = 16  # of a product


@triton.jit
def _put(
    key, key_d, value_d, head, column, column_d, own_segments, bounds, sizes, keys, values,
    HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    piece = 0
    while tl.load(bounds + piece + 2) <= column:
        piece += 1
    shelf = tl.load(own_segments + 3 + 2 * piece)
    entry = tl.load(own_segments + 4 + 2 * piece).to(tl.int64)
    room = tl.load(sizes + shelf)
    place = ((entry * HEADS + head) * room + column - tl.load(bounds + piece + 1)) * SIZE
    tl.store(tl.load(keys + shelf).to(key.dtype) + place + column_d, key_d)
    tl.store(tl.load(values + shelf).to(key.dtype) + place + column_d, value_d)


@triton.jit(do_not_specialize=["keys_row", "values_row", "segment_row"])
def _write(
    key, value, columns, rows, segments, bounds, sizes, pointers, keys_row, values_row, key_row, value_row, segment_row,
    HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    query, head, column_d = tl.program_id(0), tl.program_id(1), tl.arange(0, SIZE)
    column = tl.load(columns + query).to(tl.int32)
    if column >= 0:
        key_d = tl.load(key + query * key_row + head * SIZE + column_d)
        value_d = tl.load(value + query * value_row + head * SIZE + column_d)
        own_segments = segments + tl.load(rows + query) * segment_row
        _put(
            key, key_d, value_d, head, column, column_d, own_segments, bounds, sizes, pointers + keys_row,
            pointers + values_row, HEADS, SIZE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["keys_row", "values_row", "segment_row"])  # or some values compile it again
def _attend(
    query, key, value, parts, totals, columns, rows, segments, bounds, sizes, pointers, keys_row, values_row,
    query_row, key_row, value_row, segment_row, scaling, window, chunk,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, WRITTEN: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    member, column_d, token_k = tl.arange(0, QUERIES), tl.arange(0, SIZE), tl.arange(0, BLOCK)
    column = tl.load(columns + row).to(tl.int32)
    own_segments = segments + row * segment_row
    if WRITTEN:
        own_segments = segments + tl.load(rows + row) * segment_row
    prompt_tokens = tl.load(own_segments)
    position = tl.where(column < 0, 0, prompt_tokens + column)
    before = position  # tokens that are there; a row without a column is idle
    if WRITTEN:
        before = tl.where(column < 0, 0, position + 1)
    first = tl.maximum(tl.maximum(position + 1 - window, position // chunk * chunk), 0)
    span = tl.cdiv(tl.cdiv(before - first, SPLITS), BLOCK) * BLOCK
    begin = first + split * span
    end = tl.minimum(begin + span, before)

    query_gd = tl.load(
        query + row * query_row + (head * GROUP + member)[:, None] * SIZE + column_d[None],
        mask=(member < GROUP)[:, None], other=0.0,
    )  # fmt: skip
    element = query.dtype
    highest_g = tl.full((QUERIES,), float("-inf"), tl.float32)
    total_g = tl.zeros((QUERIES,), tl.float32)
    mixed_gd = tl.zeros((QUERIES, SIZE), tl.float32)
    if not WRITTEN:  # noqa: SIM102 (what is known when it is compiled)
        if (split == SPLITS - 1) & (column >= 0):  # this program has the new token, and puts it where it belongs
            key_d = tl.load(key + row * key_row + head * SIZE + column_d)
            value_d = tl.load(value + row * value_row + head * SIZE + column_d)
            highest_g = tl.sum(query_gd.to(tl.float32) * key_d.to(tl.float32)[None], 1) * scaling
            total_g += 1.0
            mixed_gd += value_d.to(tl.float32)[None]
            _put(
                key, key_d, value_d, head, column, column_d, own_segments, bounds, sizes, pointers + keys_row,
                pointers + values_row, HEADS, SIZE,
            )  # fmt: skip

    start = 0
    for segment in range(0, tl.load(bounds) + 1):
        shelf = tl.load(own_segments + 1 + 2 * segment)
        entry = tl.load(own_segments + 2 + 2 * segment).to(tl.int64)
        length = prompt_tokens
        if segment > 0:
            length = tl.load(bounds + segment + 1) - tl.load(bounds + segment)
        room = tl.load(sizes + shelf)
        place = (entry * HEADS + head) * room * SIZE
        keys = tl.load(pointers + keys_row + shelf).to(element) + place
        values = tl.load(pointers + values_row + shelf).to(element) + place
        stop = tl.minimum(end - start, length)
        for token in range(tl.maximum(begin - start, 0), stop, BLOCK):
            there_k = token + token_k < stop
            at_kd = (token + token_k)[:, None] * SIZE + column_d[None]
            key_kd = tl.load(keys + at_kd, mask=there_k[:, None], other=0.0)
            scores_gk = tl.dot(query_gd, tl.trans(key_kd), input_precision=PRECISION) * scaling
            scores_gk = tl.where(there_k[None], scores_gk, float("-inf"))
            raised_g = tl.maximum(highest_g, tl.max(scores_gk, 1))
            rescale_g = tl.exp(highest_g - raised_g)
            chances_gk = tl.exp(scores_gk - raised_g[:, None])
            value_kd = tl.load(values + at_kd, mask=there_k[:, None], other=0.0)
            mixed_gd = mixed_gd * rescale_g[:, None]
            mixed_gd += tl.dot(chances_gk.to(value_kd.dtype), value_kd, input_precision=PRECISION)
            total_g = total_g * rescale_g + tl.sum(chances_gk, 1)
            highest_g = raised_g
        start += length

    part = (row * HEADS + head) * SPLITS + split
    tl.store(parts + part * QUERIES * SIZE + member[:, None] * SIZE + column_d[None], mixed_gd)
    tl.store(totals + part * 2 * QUERIES + member, highest_g)
    tl.store(totals + part * 2 * QUERIES + QUERIES + member, total_g)


@triton.jit
def _merge(
    output, parts, totals, output_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    member, column_d = tl.arange(0, QUERIES), tl.arange(0, SIZE)
    first = (row * HEADS + head) * SPLITS
    highest_g = tl.full((QUERIES,), float("-inf"), tl.float32)
    for split in range(SPLITS):
        highest_g = tl.maximum(highest_g, tl.load(totals + (first + split) * 2 * QUERIES + member))
    highest_g = tl.where(highest_g == float("-inf"), 0.0, highest_g)  # of an idle row, which mixes nothing
    total_g = tl.zeros((QUERIES,), tl.float32)
    mixed_gd = tl.zeros((QUERIES, SIZE), tl.float32)
    for split in range(SPLITS):
        weight_g = tl.exp(tl.load(totals + (first + split) * 2 * QUERIES + member) - highest_g)
        total_g += weight_g * tl.load(totals + (first + split) * 2 * QUERIES + QUERIES + member)
        part = parts + (first + split) * QUERIES * SIZE + member[:, None] * SIZE + column_d[None]
        mixed_gd += weight_g[:, None] * tl.load(part)
    mixed_gd = mixed_gd / tl.where(total_g == 0, 1.0, total_g)[:, None]
    there = output + row * output_row + (head * GROUP + member)[:, None] * SIZE + column_d[None]
    tl.store(there, mixed_gd.to(output.dtype.element_ty), mask=(member < GROUP)[:, None])


def attend_rows(tables: RowTables, layer: int, inputs: AttentionInputs, output: torch.Tensor) -> None:
    """Write each row's key and value where the tables say, attend over all its tokens, and fill ``output``.

    Args:
        tables: Where the rows' tokens lie.
        layer: The number of the attention call.
        inputs: One query, key and value a row; all heads have one size, a power of two.
        output: Shape (rows, heads, size), in the dtype of the values.
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    rows, num_queries, _, size = query.shape
    heads = key.shape[1]
    group = num_queries // heads
    queries = max(_LEAST_QUERIES, triton.next_power_of_2(group))
    splits = min(_MOST_SPLITS, triton.next_power_of_2(triton.cdiv(_PROGRAMS, rows * heads)))
    parts = torch.empty((rows * heads * splits, queries, size), dtype=torch.float32, device=query.device)
    totals = torch.empty((rows * heads * splits, 2, queries), dtype=torch.float32, device=query.device)
    shape: dict[str, Any] = {"HEADS": heads, "GROUP": group, "QUERIES": queries, "SIZE": size, "SPLITS": splits}
    block: Any = max(16, min(64, 2**14 // (size * query.element_size())))
    precision: Any = "ieee" if query.dtype == torch.float32 else "tf32"
    pointers = tables.pointers
    places = (tables.columns, tables.rows, tables.segments, tables.bounds, tables.sizes, pointers)
    of_layer = 2 * layer * pointers.shape[1], (2 * layer + 1) * pointers.shape[1]
    strides = key.stride(0), value.stride(0), tables.segments.stride(0)
    written: Any = tables.is_drafted
    if written:
        _write[rows, heads](key, value, *places, *of_layer, *strides, HEADS=shape["HEADS"], SIZE=shape["SIZE"])
    _attend[rows, heads, splits](
        query, key, value, parts, totals, *places, *of_layer, query.stride(0), *strides,
        inputs.scaling, inputs.sight.window or _NO_LIMIT, inputs.sight.chunk or _NO_LIMIT,
        **shape, BLOCK=block, PRECISION=precision, WRITTEN=written,
    )  # fmt: skip
    _merge[rows, heads](output, parts, totals, output.stride(0), **shape)
