"""What a model's layers hand to their attention, and which tokens each token sees there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lit_grpo.policy.architecture.decoder import RUN_FAILURES, attention_name, first_line, hidden_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME, _SIGHT = "lit_grpo_probe", "lit_grpo_sight"
_NUM_TOKENS, _FARTHEST = 6, 2**18


@dataclass(frozen=True)
class Sight:
    """Which tokens before it a token sees: all, the last ``window`` (itself among them), or those of its ``chunk``.

    Chunks are cut from position 0 on. Not both are given.
    """

    window: int | None = None
    chunk: int | None = None

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Say which of these positions see which; the two shapes are broadcast."""
        distance = queries - keys
        if self.window is not None:
            return (distance >= 0) & (distance < self.window)
        if self.chunk is not None:
            return (distance >= 0) & (queries // self.chunk == keys // self.chunk)
        return distance >= 0

    def is_all(self, num_tokens: int) -> bool:
        """Whether among the first tokens each sees all before it."""
        return num_tokens <= min(self.window or num_tokens, self.chunk or num_tokens)


ALL = Sight()


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention in a forward; a layer may make several, or none.

    ``key_size`` and ``value_size`` are those of a head, ``cap`` squashes the scores, and ``has_sinks`` says whether
    there is a learnt score beside them.
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
    """Return the attention calls of a forward, in their order; what tokens see is read off the model's own masks.

    Args:
        model: In evaluation mode.
        context: The most tokens that it takes.

    Raises:
        ValueError: The model does not let its attention be replaced, or masks it in some other way.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise OwnAttention("it does not use transformers' attention interface")
    calls: list[AttentionCall] = []
    input_ids_1T = torch.arange(_NUM_TOKENS, device=model.device)[None]
    try:
        with torch.no_grad(), _probed(model, context):
            hidden_states(model, input_ids_1T, position_ids=input_ids_1T, attention_calls=calls)
    except OwnAttention:
        raise
    except RUN_FAILURES as error:  # shapes or arguments of some other kind of attention
        raise OwnAttention(f"its attention cannot be replaced ({first_line(error)})") from error
    return calls


class OwnAttention(ValueError):
    """What a model's attention does that ours does not."""


@contextmanager
def _probed(model: PreTrainedModel, context: int) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface

    def mask(*_: Any, mask_function: Callable[..., torch.Tensor], dtype: Any = None, **about: Any) -> torch.Tensor:
        sizes = (int(about["q_length"]), int(about["kv_length"]))
        marked = torch.zeros((about.get("batch_size", 1), 1, *sizes), dtype=dtype, device=model.device)
        setattr(marked, _SIGHT, _sight_of(mask_function, min(context, _FARTHEST), model.device))
        return marked

    before = attention_name(model)
    AttentionInterface.register(_NAME, _probe)
    AttentionMaskInterface.register(_NAME, mask)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


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
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Note a call, in the signature of Hugging Face attention functions, and attend to all tokens before."""
    if attention_calls is None:
        raise OwnAttention("it hands its attention no arguments beside its own")
    sight = Sight(sliding_window) if attention_mask is None else getattr(attention_mask, _SIGHT, None)
    if sight is None:
        raise OwnAttention("it masks its attention in a way of its own")
    scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
    attention_calls.append(AttentionCall(*sizes, value.dtype, scaling, sight, softcap, s_aux is not None))
    query, key = query.to(value.dtype), key.to(value.dtype)
    attended = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return attended.transpose(1, 2), None


def _sight_of(sees: Callable[..., torch.Tensor], context: int, device: torch.device) -> Sight | None:
    """Return what a mask function of transformers lets tokens see, or ``None`` where that is something else."""
    positions_T = torch.arange(context, device=device)
    zero = positions_T[0]
    from_start_T = sees(zero, zero, positions_T, zero).expand(context)
    size = int(from_start_T.long().cumprod(0).sum())  # tokens from the first on that see the first
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
