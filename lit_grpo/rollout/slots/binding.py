"""Checks of a model that the slots are to decode, before anything expensive starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_grpo.policy.architecture.attention import AttentionCall, OwnAttention, attention_calls
from lit_grpo.policy.architecture.decoder import (
    RUN_FAILURES,
    attention_name,
    compute_dtype,
    context_length,
    decoder_of,
    hidden_states,
    ignores_positions,
    raise_device_failure,
)
from lit_grpo.policy.architecture.states import StateShape, state_shape
from lit_grpo.process.terminal import first_line
from lit_grpo.ranks import Ranks
from lit_grpo.rollout.slots.attention import INSTEAD, KVLayer, KVShape, use_slot_attention
from lit_grpo.rollout.slots.forward import FusedDecoder, decode_by_model, prefill
from lit_grpo.rollout.slots.kv.cache import SlotCache
from lit_grpo.rollout.slots.kv.tables import RowAttention, RowTables

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.rollout.slots.kernels import LayerKernels

_NUM_PREFILLED, _NUM_TOKENS = 3, 6
_TOLERANCES = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
}  # of the norm of the hidden states; bfloat16 0.1: random weights of 36 layers come out 0.04 off
_BUILD_FAILURES = (AttributeError, ValueError, TypeError, RuntimeError)
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_KERNEL_SIZES = (16, 32, 64, 128, 256)


def check_slot_support(model: PreTrainedModel) -> tuple[KVShape, FusedDecoder | None]:
    """Compare decoding through the slots with the model's own forward on a few tokens.

    Where these come out too far off, others are tried: after training, tokens that it has not seen may amplify rounding
    without bound (SmolLM2's first six, trained in bf16-mixed, came out 1.7 times their norm off those of float32).

    Returns:
        What the keys of one of its tokens look like, and the short way to decode where there is one for the model.

    Raises:
        ValueError: The model cannot be decoded, or comes out unlike its own forward.
    """
    config = model.config.get_text_config(decoder=True)
    training, before = model.training, attention_name(model)
    first_T, size = torch.arange(_NUM_TOKENS, device=model.device), config.vocab_size
    tolerance, off, fused = _TOLERANCES.get(compute_dtype(model.device, model.dtype), 0.1), math.inf, None
    try:
        calls = attention_calls(model.eval(), slot_context(model))
        shape = shape_of_calls(calls, model.device, state_shape(model))
        with torch.inference_mode():
            for input_ids_T in (first_T % size, (first_T + 1) * size // 8, (first_T + 1) * size // 9):
                input_ids_BT = input_ids_T[None]
                decoder_of(model).set_attn_implementation(before)
                expected = hidden_states(model, input_ids_BT)[0, -1].float()
                use_slot_attention(model)
                actual = _decode(model, input_ids_BT, shape, None).float()
                off = min(off, found := float((actual - expected).norm() / expected.norm()))
                if found < tolerance:
                    fused = _fused_decoder(model, calls, shape, input_ids_BT, expected, off)
                    break
    except OwnAttention as error:
        raise _refusal(model, str(error)) from error
    except RUN_FAILURES as error:
        raise_device_failure(error)
        raise _refusal(model, f"its attention cannot be replaced ({first_line(error)})") from error
    finally:
        decoder_of(model).set_attn_implementation(before)
        model.train(training)
    if not off < tolerance:
        cause = ", so its layers remember more than keys and values"
        if ignores_positions(model):
            cause = ", which ignores position_ids"
        raise _refusal(model, f"its hidden states come out {off:.1%} off those of its own forward{cause}")
    return shape, fused


def row_attention(shape: KVShape) -> RowAttention | None:
    """Return the kernel that attends for keys and values of this shape, on a GPU where there is one for them."""
    if _no_kernels(shape) is not None:
        return None
    from lit_grpo.rollout.slots.kv.kernel import attend_rows

    return attend_rows


def layer_kernels(shape: KVShape) -> LayerKernels | None:
    """Return the kernels of a layer's other pieces, where :func:`row_attention` has some."""
    if _no_kernels(shape) is not None:
        return None
    from lit_grpo.rollout.slots.kernels import LayerKernels

    return LayerKernels()


def _no_kernels(shape: KVShape) -> str | None:
    """Return why there are no Triton kernels for keys and values of this shape."""
    sizes = {size for layer in shape.layers for size in (layer.key_size, layer.value_size)}
    if shape.device.type != "cuda" or find_spec("triton") is None:
        return "Triton is not installed for it"
    if (capability := torch.cuda.get_device_capability(shape.device)) < (8, 0):
        return "Triton needs a GPU of compute capability 8.0, and this one has {}.{}".format(*capability)
    if len(sizes) > 1 or not sizes.issubset(_KERNEL_SIZES) or shape.dtype not in _KERNEL_DTYPES:
        return f"no kernel attends with heads of {shape.layers[0].key_size} numbers in {shape.dtype}"
    return None


def shape_of_calls(calls: Sequence[AttentionCall], device: torch.device, states: StateShape | None = None) -> KVShape:
    """Return what the slots keep of a model whose forward makes these calls, and has these states."""
    if not calls and states is None:
        raise OwnAttention("it has no attention")
    layers = [KVLayer(call.num_kv_heads, call.key_size, call.value_size, call.sight) for call in calls]
    return KVShape(tuple(layers), calls[0].dtype if calls else torch.float32, device, states)


def _refusal(model: PreTrainedModel, why: str) -> ValueError:
    return ValueError(f"SlotGenerator cannot decode {type(model).__name__}: {why}; {INSTEAD}.")


def slot_context(model: PreTrainedModel) -> int:
    """The most tokens, prompt and completion together, that the slots can decode.

    Long RoPE (arXiv 2402.13753) turns all positions of a forward differently once one of them is beyond the original
    context, so keys that are kept from before would be wrong: decoding ends there.
    """
    config = model.config.get_text_config(decoder=True)
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    context = context_length(model)
    for kind in (rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))):  # one, or one a type of layer
        if kind.get("rope_type") == "longrope":
            original = kind.get("original_max_position_embeddings") or config.original_max_position_embeddings
            context = min(context, int(original))
    return context


def _fused_decoder(
    model: PreTrainedModel,
    calls: Sequence[AttentionCall],
    shape: KVShape,
    input_ids_BT: torch.Tensor,
    expected: torch.Tensor,
    long_way_off: float,
) -> FusedDecoder | None:
    """Return the short way to decode, if the model is built for it and it comes out the same.

    In bfloat16 two right ways differ by more the deeper the model is. So the short way may be as far off the model's
    own forward as twice what the long way is off. It is tried with the attention and the kernels that it will have; if
    it is too far off with these kernels, without them. On a GPU the run says why there are no CUDA graphs.
    """
    try:
        fused = FusedDecoder(model, calls, layer_kernels(shape))
        attention = row_attention(shape)
        tables = None if attention is None else RowTables(shape, 1, attention)
        tolerance = max(2 * long_way_off, 1e-4 if shape.dtype == torch.float32 else 2e-2)
        while True:
            actual = _decode(model, input_ids_BT, shape, fused, tables).float()
            if (off := float((actual - expected).norm() / expected.norm())) < tolerance:
                break
            if fused.kernels is None:
                return _no_graphs(model, f"the hidden states come out {off:.1%} off")
            fused.drop_kernels(f"the hidden states come out {off:.1%} off")
    except Exception as error:
        raise_device_failure(error)
        if model.device.type != "cuda" and not isinstance(error, _BUILD_FAILURES):  # else compilers raise many kinds
            raise
        return _no_graphs(model, first_line(error))
    if tables is None:
        _no_graphs(model, str(_no_kernels(shape)))
    return fused


def _no_graphs(model: PreTrainedModel, why: str) -> None:
    if model.device.type == "cuda":
        Ranks().warn(f"{type(model).__name__} is decoded without CUDA graphs, which takes longer: {why}.")


def _decode(
    model: PreTrainedModel,
    input_ids_BT: torch.Tensor,
    shape: KVShape,
    fused: FusedDecoder | None,
    tables: RowTables | None = None,
) -> torch.Tensor:
    """Return the last token's hidden state: the first few are prefilled in two pieces, the others decoded."""
    cache = SlotCache(shape, _NUM_TOKENS, 1, tables)
    writer = cache.write_prompts(["prompt"], [_NUM_PREFILLED])
    hidden_BD = prefill(model, input_ids_BT[:, :_NUM_PREFILLED].tolist(), 2, writer)
    if writer.states is not None:
        cache.prompts["prompt"].states = writer.states.copy(0)
    cache.admit(["prompt"])
    for position in range(_NUM_PREFILLED, _NUM_TOKENS):
        cache.prepare(np.array([position - _NUM_PREFILLED]))
        tokens_B, positions_B = input_ids_BT[:, position], torch.tensor([position], device=model.device)
        if fused is None:
            hidden_BD = decode_by_model(model, tokens_B, positions_B, cache)
        else:
            hidden_BD = fused(tokens_B, positions_B, position, cache)
    return hidden_BD[0]
