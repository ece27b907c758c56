"""Copies of linear layers' weights, in the form that decoding reads fastest, for as long as the policy decodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CAST = ("weight", "bias")
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_LEAST_NUMBERS = 2**17
"""Below, oneDNN's call takes longer than its product saves: measured, with 8 to 64 rows."""
_LEAST_ROWS = 2
_USUAL_ROWS = 16
"""What oneDNN lays weights out for; it reads them with any number of rows."""


class WeightCopies:
    """Copies that take the place of layers' weights within a block.

    Args:
        layers: Linear layers of the policy, whose weights are copied.
    """

    def __init__(self, layers: Sequence[torch.nn.Linear]) -> None:
        self.layers = layers
        WeightCopies.refresh(self)

    def _copy(self, layer: torch.nn.Linear) -> dict[str, torch.Tensor]:
        """Return the copies of a layer's weights, by name."""
        raise NotImplementedError

    @torch.no_grad()
    def refresh(self) -> None:
        self._copies = [self._copy(layer) for layer in self.layers]
        self._list_places()

    def _list_places(self) -> None:
        pairs = [(_parameters(layer), copies) for layer, copies in zip(self.layers, self._copies, strict=True)]
        self._places = [(own, name, copy) for own, copies in pairs for name, copy in copies.items()]  # read every step

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the copies in the place of the weights for the code within."""
        before = [own[name] for own, name, _ in self._places]
        try:
            for own, name, copy in self._places:
                own[name] = copy
            yield
        finally:
            for (own, name, _), weight in zip(self._places, before, strict=True):
                own[name] = weight


class LoweredWeights(WeightCopies):
    """Copies of float32 weights of linear layers, frozen ones too, in the dtype that autocast computes in.

    Autocast would cast a weight wherever it is used, and decoding uses each of them for every token. Copies stay where
    they are, so that recordings can read them. On a GPU those of layers that take the same input lie next to one
    another, so that one product can read them.

    Args:
        model: The policy that decodes.
        dtype: What autocast computes in.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        super().__init__(_linear_layers(model))
        copies_of = dict[Any, dict[str, torch.Tensor]](zip(self.layers, self._copies, strict=True))
        for parent in model.modules():
            for names in _SAME_INPUT:
                group = [copies_of.get(getattr(parent, name, None), {}) for name in names]
                for kind in _CAST:
                    if all(kind in each and each[kind].is_cuda for each in group):
                        copies = [each[kind] for each in group]
                        parts = torch.cat(copies).split([*map(len, copies)])
                        for each, part in zip(group, parts, strict=True):
                            each[kind] = part
        self._list_places()

    def _copy(self, layer: torch.nn.Linear) -> dict[str, torch.Tensor]:
        return {name: own.detach().to(self.dtype) for name, own in _weights(layer).items()}

    @torch.no_grad()
    def refresh(self) -> None:
        for layer, copies in zip(self.layers, self._copies, strict=True):
            for name, own in _weights(layer).items():
                copies[name].copy_(own)


class PackedWeights(WeightCopies):
    """Copies of the larger float32 weights of a model on a CPU, in the layout that oneDNN reads fastest.

    Products of a few rows with them take about two thirds of the time of those with the weights as they are, and differ
    in their last digits. Sharded weights have none.

    Args:
        model: The policy that decodes.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__([layer for layer in _linear_layers(model) if _is_worth_packing(layer.weight)])

    def _copy(self, layer: torch.nn.Linear) -> dict[str, torch.Tensor]:
        return {"weight": _Packed.of(layer.weight.detach())}


class _Packed(torch.Tensor):
    """A weight that linear layers read in oneDNN's layout, and all else as it is."""

    packed: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> _Packed:
        """Return a weight, which is not copied, with its numbers in oneDNN's layout."""
        made = torch.Tensor._make_subclass(cls, weight)
        made.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _USUAL_ROWS)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is linear and args[0].numel() >= _LEAST_ROWS * args[0].shape[-1]:
            hidden, weight, bias = args
            return torch.ops.mkldnn._linear_pointwise(hidden, weight.packed, bias, "none", [], "")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def check_packing(model: PreTrainedModel) -> None:
    """Check that weights can be packed.

    Raises:
        ValueError: They are not float32, or on another device than a CPU, or torch comes without oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("packed_weights needs oneDNN, which this build of torch comes without; set it to false.")
    if model.device.type != "cpu" or model.dtype != torch.float32:
        kind = str(model.dtype).removeprefix("torch.")
        raise ValueError(
            f"packed_weights is for float32 policies on a CPU, and this one is {kind} on {model.device}; set it to "
            "false."
        )


def _is_worth_packing(weight: torch.Tensor) -> bool:
    return type(weight) is torch.nn.Parameter and weight.numel() >= _LEAST_NUMBERS


def _linear_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    linear_ones = (module for module in model.modules() if type(module) is torch.nn.Linear)  # others may be anything
    return [layer for layer in linear_ones if layer.weight.dtype == torch.float32]


def _weights(layer: torch.nn.Linear) -> dict[str, torch.Tensor]:
    named = {name: _parameters(layer).get(name) for name in _CAST}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _parameters(layer: torch.nn.Linear) -> dict[str, torch.Tensor | None]:
    return vars(layer)["_parameters"]
