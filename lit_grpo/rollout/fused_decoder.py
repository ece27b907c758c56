"""One decode step of a Llama-like decoder in as few operations as it takes.

Hugging Face's forward of one token spends most of a small model's time between the matrix products: norms spelled out,
angles computed anew, one module call after another. This is the same computation on the same weights, nothing copied.
It is taken where the decoder is built as expected and comes out the same in a trial; any other runs its own forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.rollout.attention import Attention, AttentionInputs
from lit_grpo.rollout.layer_operations import layer_operations, norm_operation
from lit_grpo.rollout.prefill import AttentionProbe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position alone
_TABLE_STEP = 1024


class FusedDecoder:
    """Runs a decoder over the last token of each row.

    Args:
        model: The policy.
        seen: What its layers handed to their attention in a forward.

    Raises:
        AttributeError: The model is not built like Llama.
        ValueError: It is, but with something in it that this does not know.
    """

    def __init__(self, model: PreTrainedModel, seen: AttentionProbe) -> None:
        decoder: Any = model.get_decoder()
        config = model.config.get_text_config()
        rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope_type not in _ROPE_TYPES:
            raise ValueError(f"rope type {rope_type}")
        self._embedding = decoder.embed_tokens
        self._rotary = decoder.rotary_emb
        self._norm = norm_operation(decoder.norm)
        self._head_size = seen.shape.head_size
        self._layers = [
            layer_operations(layer, scaling, window)
            for layer, scaling, window in zip(decoder.layers, seen.scalings, seen.windows, strict=True)
        ]
        self._cos = self._sin = torch.empty((0, self._head_size), device=model.device)

    def __call__(
        self, tokens_B: torch.Tensor, positions_B: torch.Tensor, longest: int, cache: Attention
    ) -> torch.Tensor:
        """Return the hidden states of ``tokens_B`` at ``positions_B``, shape (rows, hidden size).

        No position is larger than ``longest``.
        """
        hidden = self.embed(tokens_B)
        self.tabulate(longest + 1, hidden)
        cos, sin = self.angles(positions_B)
        for layer in range(self.num_layers):
            heads, value = self.before(layer, hidden, cos, sin)
            hidden = self.after(layer, cache.attend(layer, self.inputs(layer, heads, value)), hidden)
        return self.norm(hidden)

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return len(self._layers)

    def embed(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """Return what goes into the first layer, shape (rows, hidden size)."""
        return self._embedding(tokens_B)

    def angles(self, positions_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine of each row's position, shape (rows, 1, head size); they have been tabulated."""
        return self._cos[positions_B][:, None], self._sin[positions_B][:, None]

    def before(
        self, layer: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the query and key heads, one after another, and the value heads: shape (rows, heads, head size)."""
        own, size, rows = self._layers[layer], self._head_size, len(hidden)
        normed = own.attention_norm(hidden)
        # Query and key heads are normed and rotated together.
        heads = own.head_norm(torch.cat([own.query(normed), own.key(normed)], -1).view(rows, -1, size))
        heads = torch.addcmul(heads * cos, heads.roll(size // 2, -1), sin)
        return heads, own.value(normed).view(rows, -1, size)

    def inputs(self, layer: int, heads: torch.Tensor, value: torch.Tensor) -> AttentionInputs:
        """Return what ``before`` has computed as a layer hands it to its attention."""
        own, num_queries = self._layers[layer], heads.shape[1] - value.shape[1]
        query, key = heads[:, :num_queries, None], heads[:, num_queries:, None]
        return AttentionInputs(query, key, value[:, :, None], own.scaling, own.window)

    def after(self, layer: int, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return what goes into the next layer, after attention has returned ``attended``, of any shape."""
        own = self._layers[layer]
        hidden = own.output(attended.reshape(len(hidden), -1)).add_(hidden)
        normed = own.mlp_norm(hidden)
        return own.down(own.activation(own.gate(normed)).mul_(own.up(normed))).add_(hidden)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states, after the last layer."""
        return self._norm(hidden)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of all positions tabulated so far, shape (positions, head size)."""
        return self._cos, self._sin

    def tabulate(self, num_positions: int, like: torch.Tensor) -> None:
        """Have cosine and sine of all positions at hand, in the dtype of ``like``; the sine's first half is negative.

        Raises:
            ValueError: The model rotates only a part of each head.
        """
        if num_positions <= len(self._cos) and self._cos.dtype == like.dtype:
            return
        positions_1T = torch.arange(-(-num_positions // _TABLE_STEP) * _TABLE_STEP, device=like.device)[None]
        cos, sin = (table[0] for table in self._rotary(like, positions_1T))
        if cos.shape[-1] != self._head_size:
            raise ValueError("only a part of each head is rotated")
        half = self._head_size // 2
        self._cos, self._sin = cos, torch.cat([-sin[:, :half], sin[:, half:]], -1)
