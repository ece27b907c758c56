"""Differences between families of models in a GGUF file, as rows of data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Family:
    """A family of models that is written as GGUF.

    Args:
        architecture: The name of the architecture in GGUF.
        pairs: Whether llama.cpp rotates neighboring numbers of queries and keys, and transformers those that are half
            a head apart. The rows of both are then put into the other order.
        plain: Fields of the configuration that must be false or missing: llama.cpp, or the reader of transformers,
            does not know what they add.
    """

    architecture: str
    pairs: bool = False
    plain: tuple[str, ...] = ()


FAMILIES = {
    "llama": Family("llama", pairs=True, plain=("attention_bias", "mlp_bias")),
    "mistral": Family("llama", pairs=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", plain=("attention_bias",)),
}
"""The families by transformers' ``model_type``. transformers can read all of them from GGUF again."""


def find_family(config: PreTrainedConfig) -> Family:
    """Return the family of a model.

    Raises:
        ValueError: It cannot be written as GGUF; the message names the family and what stands against it.
    """
    name = str(config.model_type)
    if name not in FAMILIES:
        raise ValueError(
            f"The policy is of the family {name}, which is not written as GGUF ({', '.join(FAMILIES)} are); leave GGUF "
            "out with --gguf none."
        )
    found, settings = FAMILIES[name], config.to_dict()
    layers = {kind for kind in settings.get("layer_types") or () if kind != "full_attention"}
    odd = {field: settings[field] for field in (*found.plain, "sliding_window") if settings.get(field)}
    odd |= {"layer_types": ", ".join(sorted(layers))} if layers else {}
    odd |= {"hidden_act": settings["hidden_act"]} if settings["hidden_act"] != "silu" else {}
    odd |= {} if _has_form(rope(config), found) else {"rope_type": rope(config)["rope_type"]}
    if odd:
        field, value = next(iter(odd.items()))
        raise ValueError(
            f"The policy's configuration has {field} {value}, which a GGUF file of the architecture "
            f"{found.architecture} cannot say; leave GGUF out with --gguf none."
        )
    return found


def rope(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of the rotary position embedding."""
    return dict(config.to_dict().get("rope_parameters") or {})


def _has_form(told: Mapping[str, Any], family: Family) -> bool:
    """Return whether GGUF can say what a rotary embedding computes."""
    kind = told.get("rope_type", "default")
    same = told.get("short_factor") == told.get("long_factor") and told.get("attention_factor") == 1.0
    return kind == "default" or (family.architecture == "llama" and (kind == "llama3" or (kind == "longrope" and same)))


def rope_factors(config: PreTrainedConfig) -> np.ndarray | None:
    """Return the numbers that a rotary embedding divides its frequencies by, (head_dim / 2,); None for ones."""
    told = rope(config)
    if told.get("rope_type", "default") == "default":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS[told["rope_type"]](config, torch.device("cpu"))
    plain = told["rope_theta"] ** -(np.arange(len(scaled)) / len(scaled))
    return (plain / scaled.double().numpy()).astype(np.float32)


def in_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of queries or keys, or a bias of them, into the order of llama.cpp's rotation.

    Args:
        weight: Shape (num_heads * head_dim, ...); the halves of a head rotate together.
        num_heads: The number of heads.

    Returns:
        The same shape; row ``2 i`` of a head is its row ``i``, and row ``2 i + 1`` its row ``head_dim / 2 + i``.
    """
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
