"""Attention of packed groups on a GPU: one FlexAttention call a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lit_grpo.update.prefix.layout import PackedGroup


def prefix_block_mask(
    groups: Sequence[PackedGroup], window: int | None, num_tokens: int, device: torch.device
) -> BlockMask:
    """Say which tokens of a packed row see which: a prompt itself, a response its prompt and itself.

    Args:
        groups: Where prompts and responses stand.
        window: How many tokens back a token sees, itself among them; ``None`` for all.
        num_tokens: Of the row; carried prompts follow it.
        device: Of the row. On a GPU the mask is made by a compiled kernel, block by block, never token by token.
    """
    group_T, segment_T, position_T = (values.to(device) for values in _labels(groups))

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        same_group = group_T[query] == group_T[key]
        same_segment = (segment_T[key] == 0) | (segment_T[key] == segment_T[query])
        distance = position_T[query] - position_T[key]
        near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return same_group & same_segment & near

    return create_block_mask(
        sees, None, None, num_tokens, len(group_T), device=device.type, _compile=device.type == "cuda"
    )


def flex_prefix_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scaling: float
) -> torch.Tensor:
    """Attend under ``mask``; fewer KV heads than query heads are shared, not repeated.

    FlexAttention (arXiv 2412.05496) skips blocks in which nothing is seen. Compiled on a GPU; on a CPU it runs forward
    only, as plain operations with all scores at once, which serves as a check alone.

    Args:
        query: Shape (1, heads, T, head size).
        key: Shape (1, KV heads, T, head size).
        value: Of the key's shape.
        mask: Of :func:`prefix_block_mask`.
        scaling: Scores are multiplied by it.
    """
    attend = _compiled() if query.device.type == "cuda" else flex_attention
    output = attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    assert isinstance(output, torch.Tensor)
    return output


@cache
def _compiled() -> Callable[..., object]:
    # Wrapped, a compiled call is an operation that selective checkpointing sees, and can keep.
    return torch.compile(flex_attention, dynamic=True, options={"wrap_inductor_compiled_regions": True})


def _labels(groups: Sequence[PackedGroup]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Number of its group, number of its response within that (0 for the prompt) and position, for every key."""
    num_keys = sum(group.prompt_tokens + sum(group.response_tokens) for group in groups)
    labels = torch.empty((3, num_keys), dtype=torch.int64)
    for number, group in enumerate(groups):
        start = group.prompt_start
        for segment, length in enumerate((group.prompt_tokens, *group.response_tokens)):
            rows = slice(start, start + length)
            labels[0, rows], labels[1, rows] = number, segment
            labels[2, rows] = torch.arange(length) + (group.prompt_tokens if segment else 0)
            start = rows.stop if segment else group.response_start
    return labels[0], labels[1], labels[2]
