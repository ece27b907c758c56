"""LoRA adapters that vLLM decodes with beside the base weights: what it is told at its start, and what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from lit_grpo.policy.weights import digest, lora_layers
from lit_grpo.rollout.weights.tensors import WeightSyncError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM has kernels
_INSTEAD = "take adapters: merged"


def check_adapters(adapters: str) -> None:
    """Check the argument of that name.

    Raises:
        ValueError: It is neither of its values.
    """
    if adapters not in ("merged", "alone"):
        raise ValueError(f"adapters must be merged or alone, not {adapters!r}.")


def adapter_arguments(policy: PreTrainedModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments for decoding with the policy's adapters.

    Args:
        policy: What is to be decoded with.
        given: The user's own arguments.

    Raises:
        ValueError: The policy has no adapters, vLLM cannot decode with them, or ``given`` does not go with them.
    """
    ranks = [max(layer.r.values()) for _, layer in lora_layers(policy)]
    if not ranks:
        raise ValueError(f"adapters is alone, but the policy has none; set model.lora, or {_INSTEAD}.")
    if (refused := _refused(policy)) is not None:
        raise ValueError(
            f"adapters is alone, but model.lora trains {refused!r}, and vLLM takes adapters of linear layers below the "
            f"head only; leave it out of lora.target_modules, or {_INSTEAD}."
        )
    own = lora_arguments(_max_rank(max(ranks), given.get("max_lora_rank")))
    for name in own.keys() - {"max_lora_rank"}:
        if name in given:
            raise ValueError(f"vLLM's argument {name} is set by adapters: alone; take it out, or {_INSTEAD}.")
    return own


def lora_arguments(max_rank: int) -> dict[str, Any]:
    """Return the arguments of an engine or server that takes one adapter after another."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": max_rank,
        "worker_extension_cls": f"{__name__}.AdapterProof",
    }


def _refused(policy: PreTrainedModel) -> str | None:
    """What vLLM cannot decode with."""
    ends = {id(policy.get_input_embeddings()), id(policy.get_output_embeddings())}
    for name, layer in lora_layers(policy):
        if not isinstance(layer.get_base_layer(), torch.nn.Linear) or id(layer) in ends:
            return name
    return next((name for name, _ in policy.named_parameters() if ".modules_to_save." in name), None)


def _max_rank(rank: int, given: int | None) -> int:
    if rank > _RANKS[-1]:
        raise ValueError(
            f"adapters is alone, but model.lora.r is {rank} and vLLM takes at most {_RANKS[-1]}; lower it, or "
            f"{_INSTEAD}."
        )
    if given is not None and int(given) < rank:
        raise ValueError(
            f"max_lora_rank among vLLM's arguments is {given}, but model.lora.r is {rank}; leave it out, and it will "
            "follow."
        )
    return int(given or min(known for known in _RANKS if known >= rank))


class AdapterProof:
    """What a worker can tell of the adapter that it decodes with; vLLM mixes this into its workers."""

    get_model: Any

    def max_adapter_rank(self) -> int:
        """The largest rank that it takes."""
        return self.get_model().lora_manager.lora_config.max_lora_rank

    def adapter_digests(self, folder: str) -> dict[str, str]:
        """Return the digests of the tensors that this worker's layers decode with, by their names in ``folder``.

        Raises:
            WeightSyncError: It holds another adapter too, or none.
        """
        model = self.get_model()
        manager = model.lora_manager
        held = manager.list_adapters()
        in_use = [number for number in manager.lora_index_to_id if number is not None]
        if len(held) != 1 or in_use != list(held):
            raise WeightSyncError(f"vLLM holds the adapters {list(held)} and uses {in_use}, where it was sent one.")
        (adapter,) = held.values()
        with safe_open(Path(folder) / "adapter_model.safetensors", framework="pt") as file:
            tensors = _held_tensors(model, manager, adapter, list(file.keys()))
            return {name: digest(tensor) for name, tensor in tensors}


def _held_tensors(model: Any, manager: Any, adapter: Any, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
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


def joined(digests: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Join what the workers of one engine hold.

    Raises:
        WeightSyncError: Two of them hold different adapters.
    """
    all_of_them: dict[str, str] = {}
    for of_one in digests:
        if any(all_of_them.setdefault(name, value) != value for name, value in of_one.items()):
            raise WeightSyncError("The workers of the vLLM engine hold different adapters.")
    return all_of_them
