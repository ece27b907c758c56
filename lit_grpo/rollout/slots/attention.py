"""The attention that decodes: a Hugging Face model hands over its queries, keys and values, a cache answers.

An unmodified Hugging Face decoder hands its rotated queries and keys to whatever attention function is
registered under the name in its config. ``slot_attention`` is registered here; the cache it works on
travels with the forward call as a keyword argument, so nothing is global.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from lit_grpo.policy.architecture.attention import ALL, Sight
from lit_grpo.policy.architecture.decoder import attention_name, decoder_of
from lit_grpo.scheduling.layouts import FEW, TIGHT, Pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.policy.architecture.states import RowStates, StateShape

ATTENTION_NAME = "lit_grpo_slots"
_TIGHT_FROM_BYTES = 2**14  # a token
_SCORES = 2**24  # at a time, where torch's attention cannot be used
INSTEAD = "let vLLM decode it: --model.generator lit_grpo.rollout.vllm.VLLMGenerator"


@dataclass(frozen=True)
class KVLayer:
    """Keys and values of one token in one attention call: heads, and the numbers of each.

    ``sight`` says which tokens a token sees there.
    """

    num_heads: int
    key_size: int
    value_size: int
    sight: Sight = ALL


@dataclass(frozen=True)
class KVShape:
    """Keys and values of one token, by the attention calls of a forward, and the device that they are on."""

    layers: tuple[KVLayer, ...]
    dtype: torch.dtype
    device: torch.device
    states: StateShape | None = None
    """What layers remember of a row beside keys and values, if any do."""
    heads: Any = None
    """The policy's own layer of multi-token prediction, if it drafts: the last of ``layers`` is its attention call."""

    @cached_property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers; 1 where no layer has any, so that memory is counted in bytes."""
        numbers = sum(layer.num_heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return max(1, numbers * self.dtype.itemsize)

    @cached_property
    def head_counts(self) -> list[int]:
        return sorted({layer.num_heads for layer in self.layers})

    @cached_property
    def pieces(self) -> Pieces:
        """Layout of a completion: more pieces, with less that is not used, where that is much memory.

        Not so on a GPU, where operations are many launches and memory is read fast.
        """
        growth = TIGHT if self.bytes_per_token >= _TIGHT_FROM_BYTES and self.device.type == "cpu" else FEW
        return Pieces(growth, 0 if self.states is None else -(-self.states.num_bytes // self.bytes_per_token))


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Inputs of one attention call.

    ``query``, rotated, has shape (rows, heads, T, key size); ``key``, rotated, (rows, KV heads, T, key size), and
    ``value`` (rows, KV heads, T, value size). Scores are multiplied by ``scaling``, then squashed to ``cap tanh(score /
    cap)`` where there is a cap. ``sight`` says what a query sees. ``sinks``, one a head, are scores of a key without a
    value. ``first_seen``, shape (rows, T), is the first of the queries that sees each of their tokens, where some see
    those after them.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    sight: Sight = ALL
    cap: float | None = None
    sinks: torch.Tensor | None = None
    first_seen: torch.Tensor | None = None

    def sees(self, num_tokens: int, some: slice = slice(None)) -> torch.Tensor:
        """Return which of ``num_tokens`` tokens the queries, or some of them, see; queries are of the last tokens.

        Its shape is (queries, tokens), or with ``first_seen`` (rows, 1, queries, tokens).
        """
        positions_T = torch.arange(num_tokens, device=self.key.device)
        queries_N1 = positions_T[num_tokens - self.query.shape[2] :][some, None]
        seen = self.sight.sees(queries_N1, positions_T[None, :])
        if self.first_seen is None:
            return seen
        own_N = positions_T[: self.query.shape[2]]  # places among those of the queries
        ahead = (own_N[some, None] >= self.first_seen[:, None, None, :]) & (own_N[some, None] < own_N)
        return seen | torch.nn.functional.pad(ahead, (num_tokens - len(own_N), 0))


class Attention(Protocol):
    """Part of a cache in one attention call of one forward.

    ``shape`` says what the keys and values of a token look like, call by call.
    """

    @property
    def shape(self) -> KVShape:
        """Shape of keys and values."""
        ...

    @property
    def states(self) -> RowStates | None:
        """States of the rows' layers, if any have states."""
        ...

    def attend(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Keep the new keys and values, and attend with the queries over all that are kept.

        ``layer`` is the number of the call, and calls come in order. Returns shape (rows, heads, T, value size).
        """
        ...


@dataclass
class Forward:
    """One forward: the cache that answers its attention calls, and how many it has made.

    A layer may make several calls, or none. ``first_seen``, for layers with a sliding window and for those without, is
    as :class:`AttentionInputs` has it.
    """

    cache: Attention
    num_calls: int = 0
    first_seen: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_cache: Forward,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Let the cache answer the forward's next call, in the signature of Hugging Face attention functions."""
    cache, number = slot_cache.cache, slot_cache.num_calls
    slot_cache.num_calls += 1
    scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    # Autocast leaves normed queries and keys in float32; the attention that trains runs in the values' dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    sight = cache.shape.layers[number].sight
    first_seen = slot_cache.first_seen[sight.window is None]
    inputs = AttentionInputs(query, key, value, scaling, sight, softcap, s_aux, first_seen)
    return cache.attend(number, inputs).transpose(1, 2), None


def use_slot_attention(model: PreTrainedModel) -> str:
    """Switch ``model`` to ``slot_attention``; return the implementation to switch back to."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    before = attention_name(model)
    decoder_of(model).set_attn_implementation(ATTENTION_NAME)
    return before


def causal_attention(inputs: AttentionInputs, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend with the queries, which are those of the last tokens, over all tokens so far.

    Args:
        inputs: Queries, scaling and what they see; shape (rows, heads, T, key size).
        key: Of all tokens, those of the queries last: shape (rows, KV heads, tokens, key size).
        value: Values, of the shape of the keys.

    Returns:
        The mixed values, shape (rows, heads, T, value size).
    """
    num_new, num_tokens, sight = inputs.query.shape[2], key.shape[2], inputs.sight
    if inputs.cap is None and inputs.sinks is None:
        mask_NT = None
        if num_new < num_tokens or inputs.first_seen is not None or (sight != ALL and not sight.is_all(num_tokens)):
            mask_NT = inputs.sees(num_tokens)
        return scaled_dot_product_attention(
            inputs.query, key, value, attn_mask=mask_NT, is_causal=mask_NT is None, scale=inputs.scaling,
            enable_gqa=True,
        )  # fmt: skip
    rows, heads, _, size = inputs.query.shape
    grouped = inputs.query.view(rows, key.shape[1], -1, num_new, size)
    step, parts = max(1, _SCORES // (rows * heads * num_tokens)), []
    for begin in range(0, num_new, step):
        some = slice(begin, begin + step)
        scores = grouped[:, :, :, some] @ key[:, :, None].transpose(-1, -2) * inputs.scaling
        hidden_NT = ~inputs.sees(num_tokens, some)
        if inputs.first_seen is not None:
            hidden_NT = hidden_NT[:, None]
        weights = attention_weights(
            scores, inputs, torch.zeros_like(hidden_NT, dtype=torch.float32).masked_fill_(hidden_NT, -torch.inf)
        )
        parts.append((weights.to(value.dtype) @ value[:, :, None]).flatten(1, 2))
    return torch.cat(parts, 2)


def attention_weights(scores: torch.Tensor, inputs: AttentionInputs, mask: torch.Tensor) -> torch.Tensor:
    """Cap scaled scores, shape (rows, KV heads, queries per KV head, T, columns), add a mask, and take the softmax.

    A head's sink has a part in the sum, and none in what is returned.
    """
    scores = scores.float() if scores.dtype != torch.float64 else scores
    if inputs.cap is not None:
        scores = torch.tanh(scores / inputs.cap) * inputs.cap
    scores = scores + mask
    if inputs.sinks is None:
        return scores.softmax(-1)
    sinks = inputs.sinks.to(scores.dtype).view(1, scores.shape[1], -1, 1, 1)
    sinks = sinks.expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
