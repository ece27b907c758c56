"""The policy's weights by name, as whatever decodes with them needs them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from lit_grpo.policy.nf4 import dequantized
from lit_grpo.policy.sharding import whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Named = tuple[str, torch.Tensor]
_WORD = 8  # bytes
_COLUMNS, _ROWS = 1024, 256  # words


class PolicyWeights:
    """All that a policy has learnt and was loaded with, one tensor at a time, whole: what says what its state is.

    With ``merged`` these are the parameters and the persistent buffers (a router's correction, a layer's scalar) of the
    bare model, by the names and in the shapes of the files that transformers saves (experts that it holds as one tensor
    are apart there); each tensor that two modules share comes once, for whoever loads the files ties them again.
    Exports, syncs and their proofs all go by it.

    Shards are gathered, weights in four bits made numbers and LoRA adapters merged as each tensor is asked for, so
    there is never a second full copy on the training device: where the files have other shapes, there is one of a
    layer. ``digests`` fills with the digest of each tensor that has been handed out.

    Args:
        policy: The model, perhaps with adapters of peft.
        merged: Give this state; otherwise every parameter as it is.
        dtype: What the generator computes in; floating point parameters are rounded to it before they travel.
    """

    def __init__(self, policy: PreTrainedModel, merged: bool = True, dtype: torch.dtype | None = None) -> None:
        self.policy = policy
        self.merged = merged
        self.dtype = dtype
        self.digests: dict[str, str] = {}

    def __iter__(self) -> Iterator[Named]:
        self.digests.clear()
        for name, tensor in self._tensors():
            self.digests[name] = digest(tensor)
            yield name, tensor

    @property
    def names(self) -> list[str]:
        """What the weights are called."""
        return list(self.outline)

    @property
    def outline(self) -> dict[str, torch.Tensor]:
        """Tensors without content, on the device ``meta``, of these names, shapes and types."""
        if self.merged:
            return dict(self._as_saved(self._state(_like)))
        return {name: self._rounded(_like(parameter)) for name, parameter in self._parameters()}

    def name_of(self, weight: torch.Tensor) -> str:
        """Return what one of the policy's own tensors, which the files have as it is, is called."""
        name = next(checkpoint_name(name) for name, one in self._parameters() if one is weight)
        return next(iter(dict(self._as_saved([(name, _like(weight))]))))

    def _tensors(self) -> Iterator[Named]:
        if not self.merged:
            yield from ((name, self._rounded(whole(parameter).detach())) for name, parameter in self._parameters())
            return
        changes = {id(parameter): layers for parameter, layers in _changed_by_adapters(self.policy)}

        def merged(parameter: torch.Tensor) -> torch.Tensor:
            tensor = dequantized(parameter)
            for layer in changes.get(id(parameter), ()):
                tensor = _merge(layer, tensor)
            return whole(tensor).detach()

        yield from self._as_saved(self._state(merged))

    def _base(self) -> Iterator[Named]:
        """The weights that any adapters stand beside."""
        yield from self._as_saved(self._state(lambda parameter: whole(dequantized(parameter)).detach()))

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.policy.named_parameters()

    def _state(self, made: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Named]:
        """The bare model's parameters and buffers by its own names, each ``made`` of the one that is there."""
        ignored = getattr(self.policy, "_keys_to_ignore_on_save", None) or ()
        for name, parameter in self._parameters():
            if not is_adapter(name) and (kept := checkpoint_name(name)) not in ignored:
                yield kept, self._rounded(made(parameter))
        for name, buffer in persistent_buffers(self.policy):
            if not is_adapter(name) and (kept := checkpoint_name(name)) not in ignored:
                yield kept, made(buffer)

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.dtype is None or not tensor.is_floating_point() else tensor.to(self.dtype)

    def _as_saved(self, state: Iterable[Named]) -> Iterator[Named]:
        """Undo what loading has made of the files' tensors, one layer after another where it made anything of them."""
        if not _is_converted(self.policy):
            yield from state
            return
        from transformers.core_model_loading import revert_weight_conversion

        for _, of_one in groupby(state, key=lambda pair: _layer_of(pair[0])):
            yield from revert_weight_conversion(self.policy, dict(of_one)).items()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    state = getattr(tensor, "quant_state", None)
    shape, dtype = (tensor.shape, tensor.dtype) if state is None else (state.shape, state.dtype)
    return torch.empty(shape, dtype=dtype, device="meta")


def _layer_of(name: str) -> str:
    """The names of a layer's tensors up to its number; nothing for those beside the layers."""
    return "".join(re.findall(r"^.*?\.\d+\.", name)[:1])


def _is_converted(policy: PreTrainedModel) -> bool:
    """Whether transformers holds a policy's tensors by other names or in other shapes than its files."""
    conversions = getattr(policy, "_weight_conversions", None)
    if conversions is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions = get_model_conversion_mapping(policy, add_legacy=False)
    return bool(conversions)


def persistent_buffers(module: torch.nn.Module) -> Iterator[Named]:
    """The buffers that a model's files have, by name."""
    for prefix, owner in module.named_modules():
        passing = owner._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in passing:
                yield f"{prefix}.{name}".removeprefix("."), buffer


_WRAPPERS = ("base_layer", "original_module")


def checkpoint_name(name: str) -> str:
    """Return what a parameter of a model that may be wrapped by peft is called in the bare model."""
    parts = name.removeprefix("base_model.model.").split(".")
    if "modules_to_save" in parts:  # which stand for the module, each by the name of its adapter
        place = parts.index("modules_to_save")
        parts = [*parts[:place], *parts[place + 2 :]]
    return ".".join(part for part in parts if part not in _WRAPPERS)


def is_adapter(name: str) -> bool:
    """Whether this is the name of what peft adds to a model, or keeps beside a module that it trains a copy of."""
    return ".lora_" in name or ".original_module." in name


def lora_layers(policy: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The layers that have a LoRA adapter, by their names in the bare model.

    A parameter of a module that is none's weight (all experts of a layer, say) has a wrapper around that module, and
    several have one around the other.
    """
    for name, module in policy.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight"):
            yield checkpoint_name(name), module


def adapted_parameter(layer: Any) -> torch.nn.Parameter:
    """Return the parameter that a LoRA layer's adapter is added to."""
    return getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))


def _changed_by_adapters(policy: PreTrainedModel) -> Iterator[tuple[torch.Tensor, list[Any]]]:
    layers: dict[int, tuple[torch.Tensor, list[Any]]] = {}
    for _, layer in lora_layers(policy):
        parameter = adapted_parameter(layer)
        layers.setdefault(id(parameter), (parameter, []))[1].append(layer)
    yield from layers.values()


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


@torch.no_grad()
def _merge(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return a layer's weight with what its active adapters add to it."""
    for adapter in active_adapters(layer):
        weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
    return weight


def active_adapters(layer: Any) -> list[str]:
    """The adapters that a LoRA layer computes with and has."""
    return [name for name in layer.active_adapters if name in layer.lora_A or name in layer.lora_embedding_A]


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
