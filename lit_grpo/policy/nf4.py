"""Frozen weights in four bits (NF4), by bitsandbytes, for QLoRA."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.process.packages import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_QUANT_STATE = re.compile(r"\.weight\.((nested_)?(absmax|quant_map)|quant_state\..*)$")


def nf4_config(dtype: str) -> Any:
    """Return the config of a model whose linear layers, except the head, have NF4 weights (arXiv 2305.14314)."""
    extra = "install the extra lit_grpo[bitsandbytes], or leave it out."
    require("bitsandbytes", f"lora.base is nf4, which needs bitsandbytes; {extra}")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, dtype)
    )


def keep_as_it_is(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from packing the weights for CPU inference, as it does on a CPU with avx512_bf16.

    A packed weight stays packed: it passes no gradient on, rounds to bfloat16, and neither :func:`dequantized` nor a
    checkpoint can read it.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def check_quantized(model: PreTrainedModel, policy: str) -> None:
    """Prepare a model whose files are quantized: weights in four bits of bitsandbytes stay so, and are saved as floats.

    Raises:
        ValueError: Its weights are quantized in another way, which adapters cannot be merged into.
    """
    loaded: Any = model
    if not getattr(getattr(loaded, "hf_quantizer", None), "pre_quantized", False):
        return
    for name, weight in model.named_parameters():
        if weight.dtype not in _NUMBERS and not hasattr(weight, "quant_state"):
            method = loaded.config.quantization_config.quant_method
            kind = f"{getattr(method, 'value', method)}: {name} is {weight.dtype}"
            raise ValueError(
                f"Policy {policy!r} is quantized ({kind}), which a run neither trains nor merges adapters into; take "
                "the model without quantization, with model.lora.base nf4 if memory is short."
            )
    loaded._weight_conversions = None  # those of the quantized files cannot be reverted; others are known by family
    if has_four_bits(model):
        keep_as_it_is(model)


def has_four_bits(model: torch.nn.Module) -> bool:
    return any(hasattr(weight, "quant_state") for weight in model.parameters())


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in four bits as numbers, and any other weight unchanged."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state)


def without_quant_states(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out the quantization constants of weights in four bits.

    A layer writes them to its state and does not load them; loading the model computes them again, always the same.
    """
    return {name: tensor for name, tensor in state_dict.items() if not _QUANT_STATE.search(name)}
