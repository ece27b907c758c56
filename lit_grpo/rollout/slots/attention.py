"""The attention that decodes: a Hugging Face model hands over its queries, keys and values, a cache answers.

An unmodified Hugging Face decoder hands its rotated queries and keys to whatever attention function is
registered under the name in its config. ``slot_attention`` is registered here; the cache it works on
travels with the forward call as a keyword argument, so nothing is global.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from lit_grpo.policy.architecture.attention import ALL, Sight
from lit_grpo.policy.architecture.decoder import attention_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.rollout.slots.kv.shelves import KVShape


ATTENTION_NAME = "lit_grpo_slots"
INSTEAD = "let vLLM decode it: --model.generator lit_grpo.rollout.vllm.VLLMGenerator"


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What one attention call hands over.

    ``query``, rotated, has shape (rows, heads, T, key size); ``key``, rotated, (rows, KV heads, T, key size), and
    ``value`` (rows, KV heads, T, value size). Scores are multiplied by ``scaling``, then squashed to ``cap tanh(score /
    cap)`` where there is a cap. ``sight`` says what a query sees. ``sinks``, one a head, are scores of a key without a
    value.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    sight: Sight = ALL
    cap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the scores are neither capped nor have sinks."""
        return self.cap is None and self.sinks is None


class Attention(Protocol):
    """What a cache does for one attention call of one forward.

    ``shape`` says what the keys and values of a token look like, call by call.
    """

    @property
    def shape(self) -> KVShape:
        """What keys and values look like."""
        ...

    def attend(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Keep the new keys and values, and attend with the queries over all that are kept.

        ``layer`` is the number of the call, and calls come in order. Returns shape (rows, heads, T, value size).
        """
        ...


class Forward:
    """Counts the attention calls of one forward; a layer may make several, or none.

    Args:
        cache: Answers them.
    """

    def __init__(self, cache: Attention) -> None:
        self._cache = cache
        self._num_calls = 0

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Let the cache answer the next call; return shape (rows, heads, T, value size)."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        scaling = float(query.shape[-1] ** -0.5) if scaling is None else scaling
        sight = self._cache.shape.layers[number].sight
        # Autocast leaves normed queries and keys in float32; the attention that trains runs in the values' dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
        return self._cache.attend(number, AttentionInputs(query, key, value, scaling, sight, cap, sinks))


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
    """Attend through ``slot_cache``, in the signature of Hugging Face attention functions."""
    return slot_cache.attend(query, key, value, scaling, softcap, s_aux).transpose(1, 2), None


def use_slot_attention(model: PreTrainedModel) -> str:
    """Switch ``model`` to ``slot_attention``; return the implementation to switch back to."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    before = attention_name(model)
    model.set_attn_implementation(ATTENTION_NAME)
    return before
