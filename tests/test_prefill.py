"""Prefilling against Hugging Face's own forward with its own cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import random_policy

from lit_grpo.policy.architecture.attention import attention_calls
from lit_grpo.rollout.slots.attention import KVShape, use_slot_attention
from lit_grpo.rollout.slots.binding import shape_of_calls
from lit_grpo.rollout.slots.forward import prefill
from lit_grpo.rollout.slots.kv.cache import SlotCache

PROMPTS = [tuple(range(2, 30)), (5,) * 20, tuple(range(20, 3, -1))]  # rooms of 32
COMPLETION = [3 + i * 7 % 25 for i in range(90)]  # on two shelves


@pytest.fixture
def policy() -> Iterator[Any]:
    policy: Any = random_policy().eval()
    before = use_slot_attention(policy)
    with torch.inference_mode():
        yield policy
    policy.set_attn_implementation(before)


def reference(policy: Any, token_ids: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Keys and values by layer, shape (KV heads, T, head size), and the last hidden state."""
    policy.set_attn_implementation("eager")
    output = policy.get_decoder()(input_ids=torch.tensor([token_ids]), use_cache=True)
    use_slot_attention(policy)
    layers = output.past_key_values.layers
    return [layer.keys[0] for layer in layers], [layer.values[0] for layer in layers], output.last_hidden_state[0, -1]


def shape_of(policy: Any) -> KVShape:
    return shape_of_calls(attention_calls(policy, 256), policy.device)


@pytest.mark.parametrize("max_tokens", [1, 15, 1000])
def test_prompts_are_written_to_their_shelf_piece_by_piece(policy: Any, max_tokens: int) -> None:
    cache = SlotCache(shape_of(policy), 40, 2)
    writer = cache.write_prompts(range(3), [len(prompt) for prompt in PROMPTS])
    hidden_BD = prefill(policy, PROMPTS, max_tokens, writer)
    (shelf,) = cache._prompt_shelves.values()
    for entry, prompt in enumerate(PROMPTS):
        keys, values, hidden_D = reference(policy, list(prompt))
        torch.testing.assert_close(hidden_BD[entry], hidden_D, rtol=0, atol=1e-5)
        for layer in range(len(keys)):
            torch.testing.assert_close(shelf.keys[layer][entry, :, : len(prompt)], keys[layer], rtol=0, atol=1e-5)
            torch.testing.assert_close(shelf.values[layer][entry, :, : len(prompt)], values[layer], rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_tokens", [7, 1000])
def test_a_completion_computed_anew_is_that_of_a_forward_over_prompt_and_completion(
    policy: Any, max_tokens: int
) -> None:
    cache = SlotCache(shape_of(policy), 120, 3)
    prefill(policy, PROMPTS[:1], 1000, cache.write_prompts(["prompt"], [28]))
    cache.admit(["prompt"])
    others = [COMPLETION, COMPLETION[::-1]]
    hidden_BD = prefill(policy, others, max_tokens, cache.write_completions("prompt", 2, 90))
    first, second = cache._pieces
    for row, completion in enumerate(others):
        keys, values, hidden_D = reference(policy, [*PROMPTS[0], *completion])
        torch.testing.assert_close(hidden_BD[row], hidden_D, rtol=0, atol=1e-5)
        for layer in range(len(keys)):
            for mine, its in ((first.keys, second.keys), keys), ((first.values, second.values), values):
                ours = torch.cat([mine[0][layer][1 + row], mine[1][layer][row, :, :26]], 1)
                torch.testing.assert_close(ours, its[layer][:, 28:], rtol=0, atol=1e-5)


def test_a_completion_that_is_put_back_is_the_one_that_was_copied(policy: Any) -> None:
    cache = SlotCache(shape_of(policy), 120, 3)
    prefill(policy, PROMPTS[:1], 1000, cache.write_prompts(["prompt"], [28]))
    prefill(policy, [COMPLETION, COMPLETION[::-1]], 1000, cache.write_completions("prompt", 2, 90))
    copies = [cache.copy_completion(row, 90) for row in (0, 1)]
    cache.remove(0)
    cache.write_completions("prompt", 1, 90, copies[:1], 90)  # after the one that has moved
    for row, copy in ((1, copies[0]), (0, copies[1])):
        heads, size = cache.shape.layers[0].num_heads, cache.shape.layers[0].key_size
        assert [tuple(each.shape) for each in copy.tensors] == [(heads, 90, size)] * 2 * len(cache.shape.layers)
        assert all(map(torch.equal, cache.copy_completion(row, 90).tensors, copy.tensors))
