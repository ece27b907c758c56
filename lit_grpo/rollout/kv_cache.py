"""Keys and values of prompts and slots, and the attention that reads them.

An unmodified Hugging Face decoder hands its rotated queries and keys to whatever attention function is
registered under the name in its config. ``slot_attention`` is registered here; the cache it works on
travels with the forward call as a keyword argument, so nothing is global.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_NAME = "lit_grpo_slots"


@dataclass(frozen=True)
class PromptKV:
    """The keys and values of one prompt, computed once for its whole group.

    ``keys_values`` has shape (2, layers, KV heads, prompt tokens, head size); ``logits_V`` are those of
    the first completion token.
    """

    keys_values: torch.Tensor
    logits_V: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Prompt tokens held."""
        return self.keys_values.shape[3]


class PrefillCache:
    """Collects the keys and values of a batch of prompts while the model runs over them."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.windows: list[int | None] = []

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention within the prompts; layers come in order."""
        self.keys.append(key)
        self.values.append(value)
        self.windows.append(window)
        mask_TT = None
        if window is not None and window < query.shape[2]:
            positions_T = torch.arange(query.shape[2], device=query.device)
            distance_TT = positions_T[:, None] - positions_T[None, :]
            mask_TT = (distance_TT >= 0) & (distance_TT < window)
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask_TT, is_causal=mask_TT is None, scale=scaling, enable_gqa=True
        )

    def prompt(self, row: int, num_tokens: int, logits_V: torch.Tensor) -> PromptKV:
        """Cut one prompt out of the batch, into memory of its own."""
        pair = [torch.stack([layer[row, :, :num_tokens] for layer in layers]) for layers in (self.keys, self.values)]
        return PromptKV(torch.stack(pair), logits_V)


class SlotCache:
    """One row of keys and values a slot: the prompt's copied in front, then the completion's.

    The rows in use are the first ones, without holes. Shape of the buffer: (2, layers, slots, KV heads,
    tokens, head size).
    """

    def __init__(self, num_slots: int, num_tokens: int, like: PromptKV) -> None:
        _, layers, heads, _, size = like.keys_values.shape
        self.buffer = like.keys_values.new_zeros((2, layers, num_slots, heads, num_tokens, size))
        self._rows_B = torch.empty(0, dtype=torch.int64)
        self._positions_B = self._rows_B
        self._masks: dict[int | None, torch.Tensor] = {}
        self._span = 0

    @property
    def num_tokens(self) -> int:
        """Tokens a slot has room for."""
        return self.buffer.shape[4]

    def admit(self, first_row: int, prompts: list[PromptKV]) -> None:
        """Begin a row with each of ``prompts``, from ``first_row`` on."""
        for row, prompt in enumerate(prompts, first_row):
            self.buffer[:, :, row, :, : prompt.num_tokens] = prompt.keys_values

    def take_over(self, other: SlotCache, num_rows: int) -> None:
        """Copy the first ``num_rows`` rows of a cache with less room."""
        self.buffer[:, :, :num_rows, :, : other.num_tokens] = other.buffer[:, :, :num_rows]

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` of a row over another, without a copy in between."""
        self.buffer[:, :, target, :, :num_tokens] = self.buffer[:, :, source, :, :num_tokens]

    def prepare(self, positions_B: torch.Tensor, span: int) -> None:
        """Set where the next token of each row in use goes; ``span`` is one more than the largest position."""
        self._positions_B = positions_B
        self._rows_B = torch.arange(len(positions_B), device=positions_B.device)
        self._span = span
        self._masks.clear()

    def _mask(self, window: int | None) -> torch.Tensor:
        """What each row adds to its attention scores, computed once a step: shape (rows, 1, 1, span)."""
        if window not in self._masks:
            positions_B1 = self._positions_B[:, None]
            columns_L = torch.arange(self._span, device=positions_B1.device)
            hidden_BL = columns_L > positions_B1
            if window is not None and window < self._span:
                hidden_BL |= positions_B1 - columns_L >= window
            self._masks[window] = self.buffer.new_zeros(hidden_BL.shape).masked_fill(hidden_BL, -torch.inf)[
                :, None, None
            ]
        return self._masks[window]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Write each row's new key and value, then attend over the row. One query token a row."""
        keys, values = self.buffer[0, layer], self.buffer[1, layer]
        keys[self._rows_B, :, self._positions_B] = key[:, :, 0]
        values[self._rows_B, :, self._positions_B] = value[:, :, 0]
        # The query heads that share a KV head take the place of query tokens, so keys are not repeated.
        rows, heads, _, size = query.shape
        kv_heads = key.shape[1]
        output = scaled_dot_product_attention(
            query.view(rows, kv_heads, heads // kv_heads, size),
            keys[:rows, :, : self._span],
            values[:rows, :, : self._span],
            attn_mask=self._mask(window),
            scale=scaling,
        )
        return output.view(rows, heads, 1, size)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_cache: PrefillCache | SlotCache,
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
        raise ValueError(f"SlotGenerator cannot decode a model with {feature}; use another generator.")
    layer = module.layer_idx
    assert isinstance(layer, int)
    # Autocast leaves normed queries and keys in float32; the attention that trains runs in the values' dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    output = slot_cache.attend(layer, query, key, value, scaling, sliding_window)
    return output.transpose(1, 2), None


def use_slot_attention(model: PreTrainedModel) -> str:
    """Switch ``model`` to ``slot_attention``; return the implementation to switch back to.

    Raises:
        ValueError: The model does not let its attention be replaced (state-space models, say).
    """
    from transformers import AttentionInterface

    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"SlotGenerator cannot decode {type(model).__name__}: it does not use transformers' attention "
            "interface; choose a decoder with rotary attention such as Qwen3, Llama, Mistral or Gemma."
        )
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    before = str(model.config._attn_implementation)
    model.set_attn_implementation(ATTENTION_NAME)
    return before
