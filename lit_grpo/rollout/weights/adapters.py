"""LoRA adapters on their way to a generator that decodes with them beside the base weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.policy.sharding import whole
from lit_grpo.policy.weights import PolicyWeights, lora_layers
from lit_grpo.rollout.weights.files import weights_folder, write
from lit_grpo.rollout.weights.tensors import check_complete, complete

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AdapterWeights(PolicyWeights):
    """The policy's adapters by their names in peft's files, and after them its base weights where they are to travel.

    What peft multiplies an adapter's output by is in its B matrix already, so that the receiver has nothing to compute
    and holds the very tensors that were sent.

    Args:
        policy: The model, with adapters.
        with_base: Whether the weights that the adapters stand beside travel too.
        dtype: What the generator computes in; by default the policy's type, also where its adapters have another.
    """

    def __init__(self, policy: PreTrainedModel, with_base: bool, dtype: torch.dtype | None = None) -> None:
        super().__init__(policy, dtype=dtype)
        self.with_base = with_base

    @property
    def names(self) -> list[str]:
        """What the weights are called."""
        base = super().names if self.with_base else []
        return [name for name, _, _ in self._adapters()] + base

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter, scaling in self._adapters():
            yield name, (whole(parameter).detach() * scaling).to(self.dtype or self.policy.dtype)
        if self.with_base:
            yield from self._base()

    def _adapters(self) -> Iterator[tuple[str, torch.Tensor, float]]:
        for name, layer in lora_layers(self.policy):
            (adapter,) = layer.active_adapters
            for matrix, scaling in (("lora_A", 1.0), ("lora_B", layer.scaling[adapter])):
                weight = getattr(layer, matrix)[adapter].weight
                yield f"base_model.model.{name}.{matrix}.weight", weight, scaling


def apart(
    weights: Iterable[tuple[str, torch.Tensor]], policy: PreTrainedModel
) -> tuple[dict[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]] | None]:
    """Take the adapters from a stream of :class:`AdapterWeights`; return them and the base weights that follow, if any.

    Raises:
        WeightSyncError: Adapters are missing, or, when they have been gone through, base weights.
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
    """Keep adapters of :class:`AdapterWeights` in a folder as peft saves it, in ``parent`` or in shared memory."""
    settings: Any = policy
    (config,) = settings.peft_config.values()
    config = copy.copy(config)
    config.lora_alpha, config.use_rslora = config.r, False  # B is scaled
    with weights_folder(parent) as folder:
        config.save_pretrained(str(folder))
        write(adapters.items(), folder / "adapter_model.safetensors")
        yield folder


def share_of_elements(adapters: Mapping[str, torch.Tensor], policy: PreTrainedModel) -> float:
    """How many of all elements of the policy these are."""
    total = sum(parameter.numel() for parameter in policy.parameters())
    return sum(tensor.numel() for tensor in adapters.values()) / total
