"""The attention of decode steps in bfloat16, beside that of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lit_grpo.rollout.slots.attention import AttentionInputs, KVLayer, KVShape
from lit_grpo.rollout.slots.kv.cache import SlotCache

ROWS, HEADS, KV_HEADS, SIZE, PROMPT, TOKENS = 8, 8, 4, 64, 100, 96
SCALING = 0.1
CPU = torch.device("cpu")


def attend(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decode random tokens behind one prompt; return the last step's output, and its queries, keys and values."""
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, heads: int, tokens: int, scale: float = 1.0) -> torch.Tensor:
        normal = torch.randn(rows, heads, tokens, SIZE, generator=generator, dtype=torch.float32)
        return (normal * scale).to(dtype)

    cache = SlotCache(KVShape((KVLayer(KV_HEADS, SIZE, SIZE),), dtype, CPU), TOKENS, ROWS)
    query, key, value = (random(1, heads, PROMPT) for heads in (HEADS, KV_HEADS, KV_HEADS))
    prompt = AttentionInputs(query, key, value, SCALING)
    cache.write_prompts(["prompt"], [PROMPT]).attend(0, prompt)
    cache.admit(["prompt"] * ROWS)
    keys, values = [prompt.key.expand(ROWS, -1, -1, -1)], [prompt.value.expand(ROWS, -1, -1, -1)]
    output = torch.empty(0)
    for count in range(TOKENS):
        query, key, value = random(ROWS, HEADS, 1, 3.0), random(ROWS, KV_HEADS, 1), random(ROWS, KV_HEADS, 1)
        cache.prepare(np.full(ROWS, count))
        output = cache.attend(0, AttentionInputs(query, key, value, SCALING))
        keys.append(key)
        values.append(value)
    return output, query, torch.cat(keys, 2), torch.cat(values, 2)


def peer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The attention of torch."""
    with torch.autocast("cpu", enabled=False):
        return scaled_dot_product_attention(query, key, value, scale=SCALING, enable_gqa=True)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_attention_is_about_as_exact_as_that_of_torch(autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, *inputs = attend(torch.bfloat16)
    exact = peer(*(tensor.double() for tensor in inputs))
    ours, theirs = (float((each.double() - exact).norm() / exact.norm()) for each in (output, peer(*inputs)))
    assert output.dtype == torch.bfloat16
    assert ours < 1.5 * theirs < 0.004


def test_its_mask_is_in_float32_whatever_the_default_dtype() -> None:
    before = torch.get_default_dtype()
    expected, *_ = attend(torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)  # as trainer.precision bf16-true does
    try:
        output, *_ = attend(torch.bfloat16)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(output, expected)


def test_a_new_layout_goes_to_the_device_in_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, original = [], torch.as_tensor

    def count(array: np.ndarray, **options: Any) -> torch.Tensor:
        copies.append(array.shape)
        return original(array, **options)

    monkeypatch.setattr(torch, "as_tensor", count)
    cache = SlotCache(KVShape((KVLayer(KV_HEADS, SIZE, SIZE),), torch.float32, CPU), TOKENS, ROWS)
    for prompt, length in ("one", 20), ("other", PROMPT):
        cache.write_prompts([prompt], [length])
    cache.admit(["one", "other", "one", "other"])
    for tokens, num_copies in ([0, 0, 0, 0], 2), ([1, 1, 1, 1], 0), ([64, 64, 64, 64], 2):  # the second pieces begin
        copies.clear()
        cache.prepare(np.array(tokens))
        assert len(copies) == num_copies
    cache.remove(1)
    copies.clear()
    cache.prepare(np.array([65, 65, 65]))
    assert len(copies) == 2
