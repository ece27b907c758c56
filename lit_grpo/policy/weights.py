"""The policy's weights by name, as generators and exports need them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from lit_grpo.policy.architecture.decoder import decoder_of
from lit_grpo.policy.nf4 import dequantized
from lit_grpo.policy.sharding import full_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Named = tuple[str, torch.Tensor]


class TrainedWeights(list[torch.nn.Parameter]):
    """The trained weights of a policy, in its order, as an optimizer receives them.

    Attributes:
        tables: Those that have a row per token or position: of embeddings and of the head.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__(weight for weight in policy.parameters() if weight.requires_grad)
        modules = [module for module in policy.modules() if isinstance(module, torch.nn.Embedding)]
        owned = {id(module.weight) for module in [*modules, policy.get_output_embeddings()] if module is not None}
        self.tables = [weight for weight in self if id(weight) in owned]


_WORD = 8  # bytes
_COLUMNS, _ROWS = 1024, 256  # words


@dataclass(eq=False)
class PolicyWeights:
    """The complete weights of a policy, one whole tensor at a time. Exports, syncs and their proofs all use it.

    Iterating gives pairs of name and tensor: the parameters and persistent buffers of the bare model, with the names
    and shapes of the files that transformers saves. Adapters are merged, weights in four bits turned into numbers,
    shards gathered, and a tensor that two modules share comes once:

    .. code-block:: text

        in the model, with peft's adapters                     given here
        model.layers.0.self_attn.q_proj.base_layer.weight  ->  model.layers.0.self_attn.q_proj.weight  (base + B A)
        model.layers.0.self_attn.q_proj.lora_A.default         (merged above)
        model.layers.0.mlp.experts.gate_up_proj  (8, ...)  ->  model.layers.0.mlp.experts.0.gate_proj.weight, ...
        lm_head.weight, tied to the embeddings                 (given once, as model.embed_tokens.weight)

    All this happens when a tensor is asked for, so the training device never holds a second full copy; if the files
    have other shapes than the model, it holds a copy of one layer.

    Attributes:
        digests: The digest of each tensor that has been given, by name.

    Args:
        policy: The model, perhaps with adapters of peft.
        merged: Give the weights as above; otherwise give every parameter as it is in the model.
        dtype: The dtype of the generator; floating point parameters that are merged are rounded to it. By default they
            are not.
    """

    policy: PreTrainedModel
    merged: bool = True
    dtype: torch.dtype | None = None
    digests: dict[str, str] = field(default_factory=dict, init=False)

    def __iter__(self) -> Iterator[Named]:
        self.digests.clear()
        for name, tensor in self._tensors():
            self.digests[name] = digest(tensor)
            yield name, tensor

    @property
    def names(self) -> list[str]:
        return list(self.outline)

    @property
    def outline(self) -> dict[str, torch.Tensor]:
        if self.merged:
            return dict(self._as_saved(self._state(_like)))
        return {name: _like(parameter) for name, parameter in self.policy.named_parameters()}

    def name_of(self, weight: torch.Tensor) -> str:
        """Return the name of one of the policy's own tensors, which the files hold unchanged."""
        name = next(checkpoint_name(name) for name, one in self.policy.named_parameters() if one is weight)
        return next(iter(dict(self._as_saved([(name, _like(weight))]))))

    def _tensors(self) -> Iterator[Named]:
        if not self.merged:
            for name, parameter in self.policy.named_parameters():
                yield name, full_tensor(parameter).detach()
            return
        changes = defaultdict[int, list[Any]](list)  # by the parameter's id
        for _, layer in lora_layers(self.policy):
            changes[id(adapted_parameter(layer))].append(layer)

        @torch.no_grad()
        def merged(parameter: torch.Tensor) -> torch.Tensor:
            tensor = dequantized(parameter)
            for layer in changes.get(id(parameter), ()):
                for adapter in active_adapters(layer):
                    tensor = tensor + layer.get_delta_weight(adapter).to(tensor.dtype)
            return full_tensor(tensor).detach()

        yield from self._as_saved(self._state(merged))

    def _base(self) -> Iterator[Named]:
        yield from self._as_saved(self._state(lambda parameter: full_tensor(dequantized(parameter)).detach()))

    def _state(self, made: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Named]:
        """Yield the bare model's parameters and buffers by its own names, after ``made`` has been applied to each."""
        ignored = getattr(self.policy, "_keys_to_ignore_on_save", None) or ()
        for name, parameter in self.policy.named_parameters():
            if not is_adapter(name) and (kept := checkpoint_name(name)) not in ignored:
                tensor = made(parameter)
                yield kept, tensor.to(self.dtype) if self.dtype and tensor.is_floating_point() else tensor
        for name, buffer in persistent_buffers(self.policy):
            if not is_adapter(name) and (kept := checkpoint_name(name)) not in ignored:
                yield kept, made(buffer)

    def _as_saved(self, state: Iterable[Named]) -> Iterator[Named]:
        """Turn the model's tensors back into those of the files, one layer after another."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import revert_weight_conversion

        conversions = getattr(self.policy, "_weight_conversions", None)
        if conversions is None:
            conversions = get_model_conversion_mapping(self.policy, add_legacy=False)
        if not conversions:
            yield from state
            return
        for _, of_layer in groupby(state, key=lambda pair: re.findall(r"^.*?\.\d+\.", pair[0])[:1]):
            yield from revert_weight_conversion(self.policy, dict(of_layer)).items()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    state = getattr(tensor, "quant_state", None)
    shape, dtype = (tensor.shape, tensor.dtype) if state is None else (state.shape, state.dtype)
    return torch.empty(shape, dtype=dtype, device="meta")


def persistent_buffers(module: torch.nn.Module) -> Iterator[Named]:
    """Yield the buffers that a model's files hold, by name."""
    for prefix, owner in module.named_modules():
        passing = owner._non_persistent_buffers_set
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in passing:
                yield f"{prefix}.{name}".removeprefix("."), buffer


_WRAPPERS = ("base_layer", "original_module")


def checkpoint_name(name: str) -> str:
    """Return the name of a parameter in the bare model, without the names of peft's wrappers."""
    parts = name.removeprefix("base_model.model.").split(".")
    if "modules_to_save" in parts:  # followed by the name of the adapter, whose copy takes the module's place
        place = parts.index("modules_to_save")
        parts = [*parts[:place], *parts[place + 2 :]]
    return ".".join(part for part in parts if part not in _WRAPPERS)


def is_adapter(name: str) -> bool:
    """Return whether peft has added the parameter of this name, or keeps it because it trains a copy of the module."""
    return ".lora_" in name or ".original_module." in name


def lora_layers(policy: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield the layers that have a LoRA adapter, by their names in the bare model.

    For a parameter that is no layer's weight, such as all experts of a layer, peft wraps the module that holds it; for
    several such parameters the wrappers are nested.
    """
    for name, module in policy.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight"):
            yield checkpoint_name(name), module


def adapted_parameter(layer: Any) -> torch.nn.Parameter:
    return getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))


@dataclass(frozen=True)
class Adapters:
    """The facts about a policy's LoRA adapters that an engine needs to apply them itself.

    Args:
        rank: Largest rank of the adapters.
        elsewhere: The name of one trained tensor that is no adapter of a linear layer of the decoder; None without one.
    """

    rank: int
    elsewhere: str | None


def find_adapters(policy: PreTrainedModel) -> Adapters | None:
    """Return the facts about a model's adapters."""
    layers = list(lora_layers(policy))
    if not layers:
        return None
    ends = {id(policy.get_input_embeddings()), id(policy.get_output_embeddings())}
    elsewhere = [
        name for name, layer in layers if not isinstance(layer.get_base_layer(), torch.nn.Linear) or id(layer) in ends
    ]
    elsewhere += [name for name, _ in policy.named_parameters() if ".modules_to_save." in name]
    decoder = {id(module) for module in decoder_of(policy).modules()}
    elsewhere += [name for name, layer in layers if id(layer) not in decoder]
    return Adapters(max(max(layer.r.values()) for _, layer in layers), next(iter(elsewhere), None))


def active_adapters(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A or name in layer.lora_embedding_A]


def digest(tensor: torch.Tensor) -> str:
    """Return 16 hexadecimal digits for a tensor's shape, dtype and content, in one pass over its memory.

    The content is read as a table of 64-bit integers with 1,024 columns, and the sums of its rows and columns are
    hashed. The digits change if rows or tensors are exchanged, one is transposed, or one element differs. The digits
    of the last tensor are remembered until torch counts a change of it.
    """
    global _last
    last, version, digits = _last
    if last() is tensor and not tensor.is_inference() and version == tensor._version:
        return digits
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
    hashed.update(flat[size:].clone().cpu().numpy().tobytes())  # a clone: numpy would keep a shard's storage alive
    digits = hashed.hexdigest()
    if not tensor.is_inference():  # torch does not count changes of inference tensors
        _last = ref(tensor), tensor._version, digits
    return digits


_last: tuple[Callable[[], torch.Tensor | None], int, str] = (lambda: None), 0, ""
