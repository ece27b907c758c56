"""The part of a model that turns tokens into hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from lit_grpo.memory import is_out_of_memory

RUN_FAILURES = (
    AssertionError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    UnboundLocalError,
    ValueError,
)
"""Errors of a model's forward that needs other inputs than token ids, or another attention."""
_DEVICE_FAILURES = ("CUDA error", "CUDA driver error", "cuDNN error", "HIP error", "Triton Error [CUDA]")


def raise_device_failure(error: BaseException) -> None:
    """Raise an error of a trial again if the device failed or memory ran out: it says nothing about the model.

    torch.compile wraps such errors; then the inner one is raised.
    """
    inner: BaseException = getattr(error, "inner_exception", error)
    failed = isinstance(inner, torch.AcceleratorError) or str(inner).startswith(_DEVICE_FAILURES)
    if failed or is_out_of_memory(inner):
        raise inner


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the decoder without the head.

    ``get_decoder`` of some models returns the model itself (Llama 4) or a head of that name (ModernBERT). Then the
    decoder is the only model among the parts of the model.

    Raises:
        ValueError: The model has no such part.
    """
    found: Any = model.get_decoder()
    if found is not model and isinstance(found, torch.nn.Module) and not isinstance(found, torch.nn.Linear):
        return cast(PreTrainedModel, found)
    inside: Iterator[Any] = (child for child in model.children() if isinstance(child, PreTrainedModel))
    found = next(inside, None)
    if found is None or next(inside, None) is not None:
        raise ValueError(f"{type(model).__name__} has no decoder beside its head, so it is not supported.")
    return found


def attention_name(model: PreTrainedModel) -> str:
    """Return the name of the decoder's attention; other parts, such as a picture tower, may use another."""
    return str(decoder_of(model).config._attn_implementation)


@contextmanager
def in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode for the code within."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def hidden_states(model: PreTrainedModel, input_ids_BT: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Run the decoder without its head; return the last hidden states, shape (B, T, hidden size)."""
    return decoder_of(model)(input_ids=input_ids_BT, use_cache=False, **kwargs).last_hidden_state


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return what linear layers of ``dtype`` compute in, and keys come in: autocast's dtype where that is on."""
    lowers = torch.is_autocast_enabled(device.type) and dtype != torch.float64
    return torch.get_autocast_dtype(device.type) if lowers else dtype


_LENGTHS = ("max_position_embeddings", "seq_length", "max_seq_len")


def context_length(model: PreTrainedModel) -> int:
    """Return the most tokens of a prompt and its completion together.

    Raises:
        ValueError: The config names no such number, for example that of a state-space or recurrent model.
    """
    config = model.config.get_text_config(decoder=True)
    for name in _LENGTHS:
        if (length := getattr(config, name, None)) and length > 0:  # XLNet says -1 for none
            return int(length)
    raise ValueError(
        f"The config of {type(model).__name__} names no longest sequence; add max_position_embeddings to the policy's "
        "config.json: the most tokens of a prompt and its completion."
    )
