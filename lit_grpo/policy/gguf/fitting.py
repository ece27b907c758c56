"""The tensors of a GGUF file compared with those of the model that its header describes, both ways."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from lit_grpo.policy.gguf.header import ROPE_FACTORS, Header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_PASSED_OVER = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Sizes of which transformers' reader takes the default of the model's kind, and their names in a configuration."""
_DEFAULT_BASE = 10_000.0
"""The base of rotary embeddings where a file names none, as in llama.cpp."""


def complete_config(header: Header, config: PreTrainedConfig) -> PreTrainedConfig:
    """Add what transformers' reader passes over, and return the configuration.

    Added are the sizes of heads and experts, the base of rotary embeddings where the file names none, and Llama 3.1's
    scaled frequencies.
    """
    for name, attribute in _PASSED_OVER.items():
        is_one = attribute != "head_dim" or not hasattr(config, "global_head_dim")  # for all layers
        if is_one and hasattr(config, attribute) and header.fact(name) is not None:
            setattr(config, attribute, header.fact(name))
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope and header.fact("rope.freq_base") is None:
        rope["rope_theta"] = _DEFAULT_BASE
    if header.rope_factors:
        factors = list(header.rope_factors)
        kept = {"rope_theta": rope["rope_theta"], "rope_type": "longrope", "attention_factor": 1.0, "factor": 1.0}
        kept |= {"original_max_position_embeddings": config.max_position_embeddings}
        config.rope_parameters = {**kept, "short_factor": factors, "long_factor": factors}
    return config


def check_rotation(header: Header, config: Any) -> None:
    """Refuse a file that rotates another number of a head's numbers than its model, or has other factors for them."""
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope or hasattr(config, "global_head_dim"):
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated, told = int(size * rope.get("partial_rotary_factor", 1.0)), header.fact("rope.dimension_count")
    if told not in (None, rotated):
        raise ValueError(f"rope.dimension_count is {told}, and the model rotates {rotated} numbers of each head")
    factors = header.rope_factors
    if factors and (len(factors) != rotated // 2 or not all(0 < factor < math.inf for factor in factors)):
        raise ValueError(
            f"{ROPE_FACTORS} has {len(factors)} numbers, such as {factors[-1]}, and the model needs {rotated // 2} "
            "finite numbers above 0"
        )


def check_tensors(header: Header, model: Any) -> None:
    """Compare names and shapes of the tensors of a file and of the model that is made from its header, both ways.

    Raises:
        ValueError: The file lacks a tensor of the model, has one that the model lacks, or one of another shape.
    """
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    found, unknown = defaultdict[str, list[str]](list), list[str]()
    places = _places(header, model)
    for name in header.tensors:
        place = places[name]
        if place in shapes:
            found[place].append(name)
        elif name != ROPE_FACTORS and not _matches(place, model._keys_to_ignore_on_load_unexpected):
            unknown.append(name)
    layers = f"{type(model).__name__} of {header.fact('block_count')} layers (block_count)"
    if unknown:
        raise ValueError(
            f"its header describes a {layers}, which has no place for {len(unknown)} of its tensors, such as "
            f"{unknown[0]!r:.80}"
        )
    lacking = [
        name
        for name in shapes
        if not (found[name] or name in model.all_tied_weights_keys)
        and not _matches(name, model._keys_to_ignore_on_load_missing)
    ]
    if lacking:
        raise ValueError(
            f"its header describes a {layers}, and its tensors lack {len(lacking)} of the model's weights, such as "
            f"{lacking[0]}"
        )
    for place, names in found.items():
        for name in names:
            _check_shape(name, header.tensors[name].shape, _stored_shape(model, place, shapes[place], len(names)))


def _places(header: Header, model: PreTrainedModel) -> dict[str, str]:
    """Return the name of the model's weight for each tensor; transformers has two readers, each with a table."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    if is_gguf_arch_supported(header.architecture):
        changes = get_gguf_conversion_mapping(header.architecture, model.config)
        renamings = [change for change in changes if isinstance(change, WeightRenaming)]
        converters = [change for change in changes if isinstance(change, WeightConverter)]
        return {name: rename_source_key(name, renamings, converters)[0] for name in header.tensors}
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    known = get_gguf_hf_weights_map(model, processor)
    return {name: known.get(name) or known.get(name.removesuffix(".weight"), "") for name in header.tensors}


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _stored_shape(model: PreTrainedModel, place: str, shape: tuple[int, ...], num_parts: int) -> tuple[int, ...]:
    """Return the shape in which a file holds a weight, or each of its parts: gates and inputs of experts lie apart."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(model.get_submodule(place.rpartition(".")[0]), Conv1D):  # which keeps its weight transposed
        return shape[::-1]
    return shape if num_parts == 1 else (shape[0], shape[1] // num_parts, *shape[2:])


def _check_shape(name: str, shape: tuple[int, ...], needed: tuple[int, ...]) -> None:
    """Refuse another shape; a side of 1 may be left out."""
    if [side for side in shape if side > 1] != [side for side in needed if side > 1] or math.prod(shape) != math.prod(
        needed
    ):
        raise ValueError(f"the tensor {name!r:.80} has the shape {shape}, and the model of its header needs {needed}")
