"""The attention that decodes: a Hugging Face model hands over its queries, keys and values, a cache answers.

An unmodified Hugging Face decoder hands its rotated queries and keys to whatever attention function is
registered under the name in its config. ``slot_attention`` is registered here; the cache it works on
travels with the forward call as a keyword argument, so nothing is global.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ATTENTION_NAME = "lit_grpo_slots"
INSTEAD = "let vLLM decode it: --model.generator lit_grpo.rollout.vllm.VLLMGenerator"


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What one layer hands over.

    ``query``, rotated, has shape (rows, heads, T, head size); ``key``, rotated, and ``value`` have shape (rows, KV
    heads, T, head size). Scores are multiplied by ``scaling``. ``window`` says how many tokens back a query sees, its
    own among them; ``None`` for all.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None


class Attention(Protocol):
    """What a cache does for one layer of one forward."""

    def attend(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Keep the new keys and values, and attend with the queries over all that are kept.

        Layers come in order. Returns shape (rows, heads, T, head size).
        """
        ...


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_cache: Attention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend through ``slot_cache``, in the signature of Hugging Face attention functions.

    Raises:
        ValueError: The model caps its attention scores, has attention sinks, or keys unlike its values.
    """
    if softcap is not None or s_aux is not None or key.shape != value.shape:
        feature = "attention sinks" if s_aux is not None else "capped attention scores"
        feature = feature if key.shape == value.shape else "keys and values of different sizes"
        raise ValueError(f"SlotGenerator cannot decode a model with {feature}; {INSTEAD}.")
    layer = module.layer_idx
    assert isinstance(layer, int)
    scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    # Autocast leaves normed queries and keys in float32; the attention that trains runs in the values' dtype.
    inputs = AttentionInputs(query.to(value.dtype), key.to(value.dtype), value, scaling, sliding_window)
    return slot_cache.attend(layer, inputs).transpose(1, 2), None


def use_slot_attention(model: PreTrainedModel) -> str:
    """Switch ``model`` to ``slot_attention``; return the implementation to switch back to.

    Raises:
        ValueError: The model does not let its attention be replaced (state-space models, say).
    """
    from transformers import AttentionInterface

    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"SlotGenerator cannot decode {type(model).__name__}: it does not use transformers' attention "
            f"interface; {INSTEAD}."
        )
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    before = str(model.config._attn_implementation)
    model.set_attn_implementation(ATTENTION_NAME)
    return before
