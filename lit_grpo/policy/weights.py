"""The policy's weights by name, as whatever decodes with them needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from lit_grpo.policy.nf4 import dequantized
from lit_grpo.policy.sharding import whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WORD = 8  # bytes
_COLUMNS, _ROWS = 1024, 256  # words


class PolicyWeights:
    """The policy's weights, one at a time, whole.

    Shards are gathered, weights in four bits made numbers and LoRA adapters merged as each tensor is asked for, so
    there is never a second full copy on the training device. ``digests`` fills with the digest of each tensor that has
    been handed out.

    Args:
        policy: The model, or a peft model around it.
        merged: Give the weights of the bare model, by the names in its checkpoints, with adapters merged into them;
            otherwise every parameter as it is.
        dtype: What the generator computes in; floating point weights are rounded to it before they travel.
    """

    def __init__(self, policy: PreTrainedModel, merged: bool = True, dtype: torch.dtype | None = None) -> None:
        self.policy = policy
        self.merged = merged
        self.dtype = dtype
        self.digests: dict[str, str] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.digests.clear()
        for name, parameter in self._tensors():
            tensor = whole(parameter).detach()
            if self.dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self.dtype)
            self.digests[name] = digest(tensor)
            yield name, tensor

    @property
    def names(self) -> list[str]:
        """What the weights are called."""
        names = (name for name, _ in self.policy.named_parameters())
        return [checkpoint_name(name) for name in names if not _is_adapter(name)] if self.merged else list(names)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self.merged:
            yield from self.policy.named_parameters()
            return
        merges = {f"{name}.weight": _merge(layer) for name, layer in lora_layers(self.policy)}
        for name, weight in self._base():
            yield name, merges[name](weight) if name in merges else weight

    def _base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that any adapters stand beside."""
        for name, parameter in self.policy.named_parameters():
            if not _is_adapter(name):
                yield checkpoint_name(name), dequantized(parameter)


def checkpoint_name(name: str) -> str:
    """Return what a parameter of a model that may be wrapped by peft is called in the bare model."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _is_adapter(name: str) -> bool:
    return ".lora_" in name or ".modules_to_save." in name


def lora_layers(policy: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The layers that have a LoRA adapter, by their names in the bare model."""
    for name, module in policy.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight"):
            yield checkpoint_name(name), module


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters, for those who compute with them beside the base weights.

    ``rank`` is the largest of them, and ``elsewhere`` names something trained that is no adapter of a linear layer
    below the head, if there is such a thing.
    """

    rank: int
    elsewhere: str | None


def find_adapters(policy: PreTrainedModel) -> Adapters | None:
    """Return what is to be known of a model's adapters; ``None`` where it has none."""
    layers = list(lora_layers(policy))
    if not layers:
        return None
    ends = {id(policy.get_input_embeddings()), id(policy.get_output_embeddings())}
    elsewhere = [name for name, layer in layers if not _is_linear(layer) or id(layer) in ends]
    elsewhere += [name for name, _ in policy.named_parameters() if ".modules_to_save." in name]
    return Adapters(max(max(layer.r.values()) for _, layer in layers), next(iter(elsewhere), None))


def _is_linear(layer: Any) -> bool:
    return isinstance(layer.get_base_layer(), torch.nn.Linear)


def _merge(layer: Any) -> Any:
    def merge(weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            deltas = [layer.get_delta_weight(adapter) for adapter in layer.active_adapters]
            return weight + sum(deltas).to(weight.dtype)  # pyright: ignore[reportAttributeAccessIssue]

    return merge


def digest(tensor: torch.Tensor) -> str:
    """Return 16 hexadecimal digits that tell a tensor's shape, type and content, in one pass over its memory.

    The content counts as the sums of all rows and of all columns of a table, 1,024 integers of 64 bits wide: where rows
    or tensors are exchanged, one is transposed, or a single element differs, so do the digits. The tensor that was
    asked for last is not read again as long as torch has counted no change of it.
    """
    global _last
    last, version, digits = _last
    if last() is not tensor or tensor.is_inference() or version != tensor._version:
        digits = _digest(tensor)
        if not tensor.is_inference():  # torch counts no changes of these
            _last = ref(tensor), tensor._version, digits
    return digits


_last: tuple[Callable[[], torch.Tensor | None], int, str] = (lambda: None), 0, ""


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    size = len(flat) // (_WORD * _COLUMNS) * _WORD * _COLUMNS
    words = flat[:size]
    if words.storage_offset() % _WORD:
        words = words.clone()
    sums = [torch.zeros(_COLUMNS, dtype=torch.int64, device=flat.device)]
    for table in words.view(torch.int64).view(-1, _COLUMNS).split(_ROWS):  # as much as a cache holds
        sums[0] += table.sum(0)
        sums.append(table.sum(1))
    hashed = blake2b(repr((tuple(tensor.shape), tensor.dtype)).encode(), digest_size=8)
    hashed.update(torch.cat(sums).cpu().numpy().tobytes())
    hashed.update(flat[size:].clone().cpu().numpy().tobytes())  # numpy would keep a shard's storage from being freed
    return hashed.hexdigest()
