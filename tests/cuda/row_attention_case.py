"""Steps of a cache whose rows come, grow and go: through the attention of tables, and by the shelves.

Every second step has drafts, of which rows get some.
"""

from __future__ import annotations

import numpy as np
import torch

from lit_grpo.policy.architecture.attention import Sight
from lit_grpo.rollout.slots.attention import AttentionInputs, KVLayer, KVShape
from lit_grpo.rollout.slots.drafts import Draft
from lit_grpo.rollout.slots.kv.cache import SlotCache
from lit_grpo.rollout.slots.kv.kernel import attend_rows
from lit_grpo.rollout.slots.kv.tables import RowAttention, RowTables

HEADS, GROUP, SIZE, MOST_ROWS, MAX_TOKENS, MOST_DRAFTED = 2, 3, 16, 6, 70, 3


def largest_gap(device: str, num_steps: int, attention: RowAttention = attend_rows) -> float:
    """Return the largest difference over all steps and layers."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    sights = (Sight(), Sight(window=9), Sight(chunk=16))
    layers = tuple(KVLayer(HEADS, SIZE, SIZE, sight) for sight in sights)
    shape = KVShape(layers, dtype, torch.device(device))
    tables = RowTables(shape, MOST_ROWS * (1 + MOST_DRAFTED), attention)
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
    for step in range(num_steps):
        for row in np.flatnonzero((draw.random(len(columns)) < 0.04) | (columns >= MAX_TOKENS))[::-1]:
            columns[row] = columns[-1]
            columns = columns[:-1]
            for cache in caches:
                cache.remove(int(row))
        new = min(int(draw.integers(0, 3)), MOST_ROWS - len(columns)) or int(not len(columns))
        prompts = [str(prompt) for prompt in draw.choice(["a", "b", "c", "d"], new)]
        columns = np.append(columns, np.zeros(new, dtype=np.int64))
        most, draft = np.minimum(MAX_TOKENS - 1 - columns, MOST_DRAFTED), None
        if step % 2:
            draft = Draft.of([[0] * MOST_DRAFTED] * len(columns), draw.integers(0, most + 1), 1)
        for cache in caches:
            if new:
                cache.admit(prompts)
            if draft is None:
                cache.prepare(columns)
            else:
                cache.prepare(columns[draft.rows_N] + draft.ahead_N, rows_B=draft.rows_N)
        for layer, sight in enumerate(sights):
            given = inputs(len(columns) if draft is None else len(draft.rows_N), 1, sight)
            by_kernel, by_shelves = (cache.attend(layer, given) for cache in caches)
            gap = by_kernel.view_as(by_shelves).float() - by_shelves.float()
            farthest = max(farthest, float(gap.abs().max()))
        columns = columns + 1
        if draft is not None:
            columns += draw.integers(0, (draft.tokens_BK >= 0).sum(1) + 1)
        for cache in caches:
            cache.roll_back(columns)
    return farthest
