"""What the kernels of a decode step compute, in plain torch on the host, from the same tables."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from lit_grpo.rollout.slots.attention import AttentionInputs
from lit_grpo.rollout.slots.kv.tables import RowTables


def _at(pointer: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that lie at an address, no copy."""
    memory: Any = (ctypes.c_uint8 * (num_elements * dtype.itemsize)).from_address(pointer)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(dtype)


@torch.autocast("cpu", enabled=False)
def attend_by_tables(tables: RowTables, layer: int, inputs: AttentionInputs, output: torch.Tensor) -> None:
    """Attend as ``attend_rows`` does, row by row; in a step with drafts a row's queries in their order."""
    heads, size = inputs.key.shape[1], inputs.key.shape[3]
    num_pieces, *starts = tables.bounds[: int(tables.bounds[0]) + 2].tolist()
    pointers = tables.pointers[2 * layer : 2 * layer + 2].tolist()
    sizes = tables.sizes.tolist()
    output.zero_()
    row_of = tables.rows.tolist() if tables.is_drafted else [*range(len(inputs.query))]
    for row, column in enumerate(tables.columns[: len(inputs.query)].tolist()):
        if column < 0:
            continue
        prompt_tokens, *places = tables.segments[row_of[row], : 3 + 2 * num_pieces].tolist()
        both = []
        for kind, new in zip(pointers, (inputs.key, inputs.value), strict=True):
            parts = []
            for segment, (shelf, entry) in enumerate(zip(places[::2], places[1::2], strict=True)):
                first = starts[segment - 1] if segment else 0
                count = prompt_tokens if not segment else min(column + 1, starts[segment]) - first
                if count <= 0:
                    continue
                room = heads * sizes[shelf] * size
                begin = kind[shelf] + entry * room * new.element_size()
                there = _at(begin, room, new.dtype).view(heads, sizes[shelf], size)[:, :count]
                if segment and first <= column < starts[segment]:
                    there[:, column - first] = new[row, :, 0]
                parts.append(there)
            both.append(torch.cat(parts, 1).float())
        position = prompt_tokens + column
        sees_K = inputs.sight.sees(torch.tensor(position), torch.arange(position + 1))
        query = inputs.query[row, :, 0].float().view(heads, -1, size)
        scores = (query @ both[0].transpose(1, 2) * inputs.scaling).masked_fill(~sees_K, -torch.inf)
        output[row] = (scores.softmax(-1).to(output.dtype).float() @ both[1]).view(-1, size).to(output.dtype)
