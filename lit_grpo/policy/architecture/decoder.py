"""The part of a model that makes hidden states of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

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
"""What the forward of a model raises that wants other inputs than token ids, or other attention than it is given."""


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the decoder without the head.

    ``get_decoder`` of some models returns the model itself (Llama 4's) or a head of that name (ModernBERT's); theirs is
    the one model inside it.

    Raises:
        ValueError: There is no such part.
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
    """Return the attention that the decoder is switched to; parts beside it, which see pictures, may have another."""
    return str(decoder_of(model).config._attn_implementation)


def hidden_states(model: PreTrainedModel, input_ids_BT: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Run the decoder without its head; return the last hidden states, shape (B, T, hidden size)."""
    return decoder_of(model)(input_ids=input_ids_BT, use_cache=False, **kwargs).last_hidden_state


_LENGTHS = ("max_position_embeddings", "seq_length", "max_seq_len")


def context_length(model: PreTrainedModel) -> int:
    """The most tokens, prompt and completion together, that the model takes.

    Raises:
        ValueError: Its config names no such number, as those of state-space and recurrent models do not.
    """
    config = model.config.get_text_config(decoder=True)
    for name in _LENGTHS:
        if (length := getattr(config, name, None)) and length > 0:  # XLNet says -1 for none
            return int(length)
    raise ValueError(
        f"The config of {type(model).__name__} names no longest sequence; add max_position_embeddings to the policy's "
        "config.json: the most tokens of a prompt and its completion."
    )


def first_line(error: Exception) -> str:
    """What an error says, in a line without a full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
