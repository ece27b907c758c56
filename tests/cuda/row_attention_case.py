"""Steps of a cache whose rows come, grow and go: through the kernels in Triton's interpreter, and by the shelves."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch

from lit_grpo.policy.architecture.attention import Sight
from lit_grpo.rollout.slots.attention import AttentionInputs, KVLayer, KVShape
from lit_grpo.rollout.slots.kv.cache import SlotCache
from lit_grpo.rollout.slots.kv.kernel import attend_rows
from lit_grpo.rollout.slots.kv.tables import RowAttention, RowTables

HEADS, GROUP, SIZE, MOST_ROWS, MAX_TOKENS = 2, 3, 16, 6, 70


def largest_gap(device: str, num_steps: int, attention: RowAttention = attend_rows) -> float:
    """Return the largest difference over all steps and layers."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    sights = (Sight(), Sight(window=9), Sight(chunk=16))
    layers = tuple(KVLayer(HEADS, SIZE, SIZE, sight) for sight in sights)
    shape = KVShape(layers, dtype, torch.device(device))
    tables = RowTables(shape, MOST_ROWS, attention)
    caches = [SlotCache(shape, MAX_TOKENS, MOST_ROWS, each) for each in (tables, None)]
    numbers, draw = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def inputs(rows: int, tokens: int, sight: Sight) -> AttentionInputs:
        heads = torch.randn((rows, (GROUP + 2) * HEADS, tokens, SIZE), generator=numbers).to(device, dtype)
        query, key, value = heads.split([GROUP * HEADS, HEADS, HEADS], 1)
        return AttentionInputs(query, key, value, SIZE**-0.5, sight)

    for prompt, length in {"a": 5, "b": 40, "c": 17, "d": 40}.items():
        writers = [cache.write_prompts([prompt], [length]) for cache in caches]
        for layer, sight in enumerate(sights):
            for writer, given in zip(writers, [inputs(1, length, sight)] * 2, strict=True):
                writer.attend(layer, given)
    columns, farthest = np.empty(0, dtype=np.int64), 0.0
    for _ in range(num_steps):
        for row in np.flatnonzero((draw.random(len(columns)) < 0.04) | (columns >= MAX_TOKENS))[::-1]:
            columns[row] = columns[-1]
            columns = columns[:-1]
            for cache in caches:
                cache.remove(int(row))
        new = min(int(draw.integers(0, 3)), MOST_ROWS - len(columns)) or int(not len(columns))
        prompts = [str(prompt) for prompt in draw.choice(["a", "b", "c", "d"], new)]
        for cache in caches:
            if new:
                cache.admit(prompts)
            cache.prepare(np.append(columns, np.zeros(new, dtype=np.int64)))
        columns = np.append(columns, np.zeros(new, dtype=np.int64))
        for layer, sight in enumerate(sights):
            given = inputs(len(columns), 1, sight)
            by_kernel, by_shelves = (cache.attend(layer, given) for cache in caches)
            gap = by_kernel.view_as(by_shelves).float() - by_shelves.float()
            farthest = max(farthest, float(gap.abs().max()))
        columns = columns + 1
    return farthest


if __name__ == "__main__":
    print(largest_gap(sys.argv[1], int(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)  # the interpreter's threads would be waited for
