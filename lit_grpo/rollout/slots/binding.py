"""Whether the slots can decode a model, asked before anything expensive starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from lit_grpo.policy.loading import context_length, hidden_states
from lit_grpo.rollout.slots.attention import INSTEAD, use_slot_attention
from lit_grpo.rollout.slots.forward import AttentionProbe, decode_step, prefill
from lit_grpo.rollout.slots.fused import FusedDecoder
from lit_grpo.rollout.slots.kv.cache import SlotCache
from lit_grpo.rollout.slots.kv.shelves import KVShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_NUM_PREFILLED, _NUM_TOKENS = 3, 6
_TOLERANCE = 0.05  # of the norm of the hidden states; bfloat16 stays below 0.02


def check_slot_support(model: PreTrainedModel) -> tuple[KVShape, FusedDecoder | None]:
    """Compare decoding through the slots with the model's own forward on a few tokens.

    Returns:
        What the keys of one of its tokens look like, and the short way to decode where there is one for the model.

    Raises:
        ValueError: The model cannot be decoded, or comes out otherwise than by its own forward.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if foreign := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"SlotGenerator cannot decode {type(model).__name__} with {_names(foreign)} layers; {INSTEAD}."
        )
    training, before = model.training, str(model.config._attn_implementation)
    input_ids_BT = torch.arange(_NUM_TOKENS, device=model.device)[None] % config.vocab_size
    try:
        with torch.inference_mode():
            expected = hidden_states(model.eval(), input_ids_BT)[0, -1].float()
            use_slot_attention(model)
            seen = _probe(model, input_ids_BT)
            actual = _decode(model, input_ids_BT, seen.shape, None).float()
            fused = _fused_decoder(model, seen, input_ids_BT, actual)
    finally:
        model.set_attn_implementation(before)
        model.train(training)
    error = float((actual - expected).norm() / expected.norm())
    if not error < _TOLERANCE:
        raise ValueError(
            f"SlotGenerator cannot decode {type(model).__name__}: its hidden states come out {error:.0%} off those of "
            f"its own forward, so its layers remember more than keys and values; {INSTEAD}."
        )
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or not hasattr(config, "layer_types")
    if window and slides and window < context_length(model) and not any(seen.windows):
        raise ValueError(
            f"SlotGenerator cannot decode {type(model).__name__}: it does not tell its attention of the sliding "
            f"window of {window} tokens in its config; {INSTEAD}."
        )
    return seen.shape, fused


def slot_context(model: PreTrainedModel) -> int:
    """The most tokens, prompt and completion together, that the slots can decode.

    Long RoPE (arXiv 2402.13753) turns all positions of a forward differently once one of them is beyond the original
    context, so keys that are kept from before would be wrong: decoding ends there.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return context_length(model)
    original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    return min(context_length(model), int(original))


def _probe(model: PreTrainedModel, input_ids_BT: torch.Tensor) -> AttentionProbe:
    """See what the layers hand to their attention."""
    probe = AttentionProbe()
    try:
        prefill(model, input_ids_BT.tolist(), _NUM_TOKENS, probe)
    except (RuntimeError, TypeError, IndexError) as error:  # shapes or arguments of some other kind of attention
        raise ValueError(f"SlotGenerator cannot decode {type(model).__name__} ({error}); {INSTEAD}.") from error
    return probe


def _fused_decoder(
    model: PreTrainedModel, seen: AttentionProbe, input_ids_BT: torch.Tensor, expected: torch.Tensor
) -> FusedDecoder | None:
    """Return the short way to decode, if the model is built for it and it comes out the same."""
    try:
        fused = FusedDecoder(model, seen)
        actual = _decode(model, input_ids_BT, seen.shape, fused).float()
    except (AttributeError, ValueError, TypeError, RuntimeError):
        return None
    tolerance = 1e-4 if seen.shape.dtype == torch.float32 else 2e-2
    return fused if float((actual - expected).norm() / expected.norm()) < tolerance else None


def _decode(
    model: PreTrainedModel, input_ids_BT: torch.Tensor, shape: KVShape, fused: FusedDecoder | None
) -> torch.Tensor:
    """Return the last token's hidden state: the first few are prefilled in two pieces, the others decoded."""
    cache = SlotCache(shape, _NUM_TOKENS, 1)
    prefill(model, input_ids_BT[:, :_NUM_PREFILLED].tolist(), 2, cache.write_prompts(["prompt"], [_NUM_PREFILLED]))
    cache.admit(["prompt"])
    hidden_BD = torch.empty(0)
    for position in range(_NUM_PREFILLED, _NUM_TOKENS):
        cache.prepare(np.array([position - _NUM_PREFILLED]))
        positions_B = torch.tensor([position], device=model.device)
        hidden_BD = decode_step(model, fused, input_ids_BT[:, position], positions_B, position, cache)
    return hidden_BD[0]


def _names(kinds: set[str]) -> str:
    return " and ".join(sorted(kind.replace("_", " ") for kind in kinds))
