"""Attention of packed groups on a GPU: one FlexAttention call a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import pad


def prefix_block_mask(labels_4K: torch.Tensor, window: int | None, num_tokens: int, ahead: bool = False) -> BlockMask:
    """Say which tokens of a packed row see which: a prompt itself, a response its prompt and itself, branch by branch.

    On a GPU the mask is made by a compiled kernel, block by block, never token by token. It has room for two blocks of
    queries and of keys at least. For a single one torch compiles all over again, and for fewer than 128 queries it
    takes a kernel for decoding, which it cannot build where these, times the heads that share a KV head, are more.

    Args:
        labels_4K: What :func:`lit_grpo.update.prefix.layout.key_labels` tells of the row, on its device.
        window: How many tokens back a token sees, itself among them; ``None`` for all.
        num_tokens: Number of tokens of the row; carried prompts follow it.
        ahead: Whether tokens of mutual spans see those after them.
    """
    num_keys = max(labels_4K.shape[1], _TWO_BLOCKS)
    if missing := num_keys - labels_4K.shape[1]:
        labels_4K = pad(labels_4K, (0, missing), value=-1)
    stretch_T, last_T, position_T, first_T = labels_4K
    first_T = first_T if ahead else position_T
    device = labels_4K.device.type

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        after = (stretch_T[key] <= stretch_T[query]) & (stretch_T[query] <= last_T[key])
        near = position_T[query] >= first_T[key]
        if window is not None:
            near = near & (position_T[query] - position_T[key] < window)
        return after & near

    create = _compiled_mask() if device == "cuda" else create_block_mask
    return create(sees, None, None, max(num_tokens, _TWO_BLOCKS), num_keys, device=device)


def flex_prefix_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    scaling: float,
    cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend under ``mask``; fewer KV heads than query heads are shared, not repeated.

    FlexAttention (arXiv 2412.05496) skips blocks in which nothing is seen. Compiled on a GPU; on a CPU it runs forward
    only, as plain operations with all scores at once, which serves as a check alone.

    Args:
        query: Shape (1, heads, T, head size).
        key: Shape (1, KV heads, T, head size).
        value: Values, of the shape of ``key``.
        mask: Which tokens each token sees, made by :func:`prefix_block_mask`.
        scaling: Scores are multiplied by it.
        cap: The limit of scores, by tanh; ``None`` is no limit.
        sinks_H: The score of a key without a value that each head has beside the others.
    """
    attend = _compiled() if query.device.type == "cuda" else flex_attention
    num_tokens, (num_queries, num_keys) = query.shape[2], mask.seq_lengths
    more: dict[str, Any] = {} if cap is None else {"score_mod": _cap_of(cap)}
    more |= {} if sinks_H is None else {"return_aux": AuxRequest(lse=True)}
    output: Any = attend(
        _filled_up(query, num_queries), _filled_up(key, num_keys), _filled_up(value, num_keys), block_mask=mask,
        scale=scaling, enable_gqa=query.shape[1] != key.shape[1], **more,
    )  # fmt: skip
    if sinks_H is not None:  # of the sum of exponentials a query's keys have this share, and the sink the rest
        output, aux = output
        shares = torch.sigmoid(aux.lse - sinks_H.to(aux.lse.dtype)[:, None])
        output = output * shares[..., None].to(output.dtype)
    return output[:, :, :num_tokens]


@cache
def _cap_of(cap: float) -> Callable[..., torch.Tensor]:
    """The same function for the same cap, so that it is compiled once."""

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def _filled_up(heads: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return heads, shape (1, heads, T, head size), with zeros up to so many tokens."""
    missing = num_tokens - heads.shape[2]
    return pad(heads, (0, 0, 0, missing)) if missing else heads


_TWO_BLOCKS = 129  # tokens; torch's blocks have 128


@cache
def _compiled_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask, dynamic=True)


@cache
def _compiled() -> Callable[..., object]:
    # Wrapped, a compiled call is an operation that selective checkpointing sees, and can keep. A cap that is compiled
    # as an input, as dynamic shapes are, is refused by Inductor.
    compiled = torch.compile(flex_attention, dynamic=True, options={"wrap_inductor_compiled_regions": True})
    return torch._dynamo.config.patch(specialize_float=True)(compiled)
