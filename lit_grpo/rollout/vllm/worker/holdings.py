"""What vLLM's models hold of the tensors that they were sent, by the names that these came with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lit_grpo.policy.weights import checkpoint_name

_KEPT_AS_IT_CAME = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


def held_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of vLLM's model that are kept as they came, by their names in checkpoints; fused ones apart."""
    fused = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        if type(getattr(module, "quant_method", None)).__name__ not in _KEPT_AS_IT_CAME:
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            parent, _, layer = checkpoint_name(f"{path}.{kind}").removesuffix(f".{kind}").rpartition(".")
            parts, sizes = fused.get(layer, [layer]), getattr(module, "output_partition_sizes", [])
            rows = parameter[: getattr(module, "org_vocab_size", None)]  # what follows is padding
            tensors = rows.split(sizes) if len(parts) == len(sizes) and sum(sizes) == len(rows) else [rows]
            for part, tensor in zip(parts, tensors, strict=False):
                yield ".".join(filter(None, [parent, part, kind])), tensor


def held_adapter(model: Any, manager: Any, adapter: Any, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Find what vLLM has made of peft's tensors: those of some layers it holds together, as lists."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renaming = None if mapper is None else mapper.get_rename_mapper()
    together = {part: (whole, at) for whole, parts in manager.packed_modules.items() for at, part in enumerate(parts)}
    for name in names:
        module, is_a = parse_fine_tuned_lora_name(name, renaming)
        whole, at = together.get(module, (module, None))
        layer = adapter.get_lora(whole)
        if layer is None or whole not in manager.modules:  # of another worker's layers
            continue
        tensor = layer.lora_a if is_a else layer.lora_b
        if at is not None:
            tensor = tensor[at]
        if tensor is not None:
            yield name, tensor
