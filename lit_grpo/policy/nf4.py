"""Frozen weights in four bits (NF4), through bitsandbytes: what QLoRA's adapters stand on."""

from __future__ import annotations

import re
from importlib import util
from typing import Any

import torch

_QUANT_STATE = re.compile(r"\.weight\.((nested_)?(absmax|quant_map)|quant_state\..*)$")


def nf4_config(dtype: str) -> Any:
    """How transformers loads a model whose linear layers, but for the head, have NF4 weights (QLoRA, arXiv 2305.14314).

    Args:
        dtype: What they are computed with.

    Raises:
        ValueError: bitsandbytes is not installed.
    """
    if util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "lora.base is nf4, which needs bitsandbytes; install the extra lit_grpo[bitsandbytes], or leave it out."
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, dtype)
    )


def keep_as_it_is(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from packing the weights anew for CPU inference, as it does where a CPU has avx512_bf16.

    A packed weight stays packed: it has no gradient, rounds to bfloat16, and is no longer what :func:`dequantized` and
    a checkpoint take it for.
    """
    from bitsandbytes.nn.modules import Linear4bit  # pyright: ignore[reportMissingImports]

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """The weight as numbers, where it is kept in four bits; any other as it is."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

    return dequantize_4bit(weight.data, state)


def without_quant_states(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out what belongs to a weight in four bits beside the bits.

    Its layer gives these names and does not take them; loading the model makes them anew, always the same.
    """
    return {name: tensor for name, tensor in state_dict.items() if not _QUANT_STATE.search(name)}
