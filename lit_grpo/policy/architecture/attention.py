"""The attention calls of a model's layers, and which tokens each token sees in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lit_grpo.policy.architecture.decoder import (
    RUN_FAILURES,
    attention_name,
    decoder_of,
    hidden_states,
    raise_device_failure,
)
from lit_grpo.process.terminal import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME, _SIGHT = "lit_grpo_probe", "lit_grpo_sight"
_NUM_TOKENS, _FARTHEST = 6, 2**18


@dataclass(frozen=True)
class Sight:
    """The earlier tokens that a token sees: all, the last ``window`` tokens with itself, or those of its ``chunk``.

    Chunks begin at position 0. At most one of the two is given. The tokens that token 5 sees:

    .. code-block:: text

        Sight()            0 1 2 3 4 5
        Sight(window=3)          3 4 5
        Sight(chunk=4)             4 5
    """

    window: int | None = None
    chunk: int | None = None

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return whether each query position sees each key position; the two shapes are broadcast."""
        distance = queries - keys
        if self.window is not None:
            return (distance >= 0) & (distance < self.window)
        if self.chunk is not None:
            return (distance >= 0) & (queries // self.chunk == keys // self.chunk)
        return distance >= 0

    def is_all(self, num_tokens: int) -> bool:
        return num_tokens <= min(self.window or num_tokens, self.chunk or num_tokens)


ALL = Sight()


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention in a forward; a layer may make several, or none.

    Args:
        dtype: The dtype of keys and values.
        scaling: The factor of the scores.
        cap: The limit of the scores, by tanh; None is no limit.
        has_sinks: Whether each head has a learned score that no token belongs to.
    """

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    scaling: float
    sight: Sight
    cap: float | None
    has_sinks: bool


def attention_calls(model: PreTrainedModel, context: int) -> list[AttentionCall]:
    """Return the attention calls of a forward, in their order; which tokens see which is read from the model's masks.

    The model is in evaluation mode; ``context`` is the most tokens of a sequence.

    Raises:
        ValueError: The model's attention cannot be replaced, or its masks are of another kind than :class:`Sight`.
    """
    calls: list[AttentionCall] = []
    input_ids_1T = torch.arange(_NUM_TOKENS, device=model.device)[None]
    try:
        with torch.no_grad(), _probed(model, context):
            hidden_states(model, input_ids_1T, position_ids=input_ids_1T, attention_calls=calls)
    except OwnAttention:
        raise
    except RUN_FAILURES as error:  # the shapes or arguments of another kind of attention
        raise_device_failure(error)
        raise OwnAttention(f"its attention cannot be replaced ({first_line(error)})") from error
    return calls


class OwnAttention(ValueError):
    """The model's attention does something that ours cannot do."""


@contextmanager
def _probed(model: PreTrainedModel, context: int) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface

    device = model.device  # without the model, which the registry of masks would keep alive

    def mask(*_: Any, mask_function: Callable[..., torch.Tensor], dtype: Any = None, **about: Any) -> torch.Tensor:
        sizes = (int(about["q_length"]), int(about["kv_length"]))
        marked = torch.zeros((about.get("batch_size", 1), 1, *sizes), dtype=dtype, device=device)
        setattr(marked, _SIGHT, _sight_of(mask_function, min(context, _FARTHEST), device))
        return marked

    before = attention_name(model)
    AttentionInterface.register(_NAME, _probe)
    AttentionMaskInterface.register(_NAME, mask)
    if not decoder_of(model)._can_set_attn_implementation():
        raise OwnAttention("it does not use transformers' attention interface")
    decoder_of(model).set_attn_implementation(_NAME)
    try:
        yield
    finally:
        decoder_of(model).set_attn_implementation(before)


def _probe(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_calls: list[AttentionCall] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Record a call and attend to all earlier tokens; the signature is that of transformers' attention functions."""
    if attention_calls is None:
        raise OwnAttention("it hands its attention no arguments beside its own")
    for name, other in others.items():
        if isinstance(other, torch.Tensor) and other.shape[-2:] == (query.shape[2], key.shape[2]):
            raise OwnAttention(f"it hands its attention {name} beside queries, keys and values")
    sight = Sight(sliding_window) if attention_mask is None else getattr(attention_mask, _SIGHT, None)
    if sight is None:
        raise OwnAttention("it masks its attention in a way of its own")
    scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    call = AttentionCall(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_size=key.shape[3],
        value_size=value.shape[3],
        dtype=value.dtype,
        scaling=scaling,
        sight=sight,
        cap=softcap,
        has_sinks=s_aux is not None,
    )
    attention_calls.append(call)
    query, key = query.to(value.dtype), key.to(value.dtype)
    attended = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return attended.transpose(1, 2), None


def _sight_of(sees: Callable[..., torch.Tensor], context: int, device: torch.device) -> Sight | None:
    """Return the :class:`Sight` of a mask function of transformers, or ``None`` for a mask of another kind."""
    positions_T = torch.arange(context, device=device)
    zero = positions_T[0]
    from_start_T = sees(zero, zero, positions_T, zero).expand(context)
    size = int(from_start_T.long().cumprod(0).sum())  # the first so many tokens see token 0
    candidates = [ALL] if size == context else [Sight(window=size), Sight(chunk=size)]
    for candidate in candidates:
        asked = {min(max(place, 0), context - 1) for place in (1, size - 1, size, size + 1, 2 * size, context - 1)}
        if size and all(
            torch.equal(
                sees(zero, zero, positions_T[q], positions_T).expand(context),
                candidate.sees(positions_T[q], positions_T),
            )
            for q in asked
        ):
            return candidate
    return None
