"""LoRA adapters on their way to a generator that holds the base weights apart from them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.policy.sharding import full_tensor
from lit_grpo.policy.weights import PolicyWeights, lora_layers
from lit_grpo.rollout.weights.files import weights_folder, write
from lit_grpo.rollout.weights.tensors import check_complete, complete

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.rollout.weights.tensors import Named


@dataclass(eq=False)
class AdapterWeights(PolicyWeights):
    """The policy's adapters by their names in peft's files, followed by its base weights if these are to travel.

    Each B matrix is sent multiplied by the scaling of its adapter, so the receiver holds exactly what was sent.

    Args:
        policy: The model, with adapters.
        with_base: Whether the base weights are sent too.
        dtype: The type that the generator computes in; by default the policy's, even if its adapters have another.
    """

    with_base: bool = field(kw_only=True)

    @property
    def names(self) -> list[str]:
        base = super().names if self.with_base else []
        return [name for name, _, _ in self._adapters()] + base

    def _tensors(self) -> Iterator[Named]:
        for name, parameter, scaling in self._adapters():
            yield name, (full_tensor(parameter).detach() * scaling).to(self.dtype or self.policy.dtype)
        if self.with_base:
            yield from self._base()

    def _adapters(self) -> Iterator[tuple[str, torch.Tensor, float]]:
        for name, layer in lora_layers(self.policy):
            (adapter,) = layer.active_adapters
            for matrix, scaling in (("lora_A", 1.0), ("lora_B", layer.scaling[adapter])):
                weight = getattr(layer, matrix)[adapter].weight
                yield f"base_model.model.{name}.{matrix}.weight", weight, scaling


def apart(weights: Iterable[Named], policy: PreTrainedModel) -> tuple[dict[str, torch.Tensor], Iterator[Named] | None]:
    """Split a stream of :class:`AdapterWeights` into the adapters and the base weights that follow, if any.

    Raises:
        WeightSyncError: Adapters are missing; or base weights are, which shows when their iterator ends.
    """
    names = AdapterWeights(policy, with_base=False).names
    stream = iter(weights)
    adapters: dict[str, torch.Tensor] = {}
    first = None
    for name, tensor in stream:
        if name not in names:
            first = name, tensor
            break
        adapters[name] = tensor
    check_complete(names, adapters)
    base = None if first is None else complete(chain([first], stream), PolicyWeights(policy).names)
    return adapters, base


@contextmanager
def adapter_folder(
    adapters: Mapping[str, torch.Tensor], policy: PreTrainedModel, parent: str | None = None
) -> Iterator[Path]:
    """Write adapters of :class:`AdapterWeights` to a folder as peft does, in ``parent`` or in shared memory."""
    settings: Any = policy
    (config,) = settings.peft_config.values()
    config = copy.copy(config)
    config.lora_alpha, config.use_rslora = config.r, False  # a scaling of 1, since the B matrices are scaled
    with weights_folder(parent) as folder:
        config.save_pretrained(str(folder))
        write(adapters.items(), folder / "adapter_model.safetensors")
        yield folder


def share_of_elements(adapters: Mapping[str, torch.Tensor], policy: PreTrainedModel) -> float:
    """Return the share of the policy's elements that are in these adapters."""
    total = sum(parameter.numel() for parameter in policy.parameters())
    return sum(tensor.numel() for tensor in adapters.values()) / total
