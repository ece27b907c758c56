"""Copies of linear layers' weights in the dtype that autocast computes in, for as long as the policy decodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CAST = ("weight", "bias")


class LoweredWeights:
    """Copies of the float32 weights of a model's linear layers, frozen ones too.

    Autocast would cast a weight wherever it is used, and decoding uses each of them for every token. Copies stay where
    they are, so that recordings can read them.

    Args:
        model: The policy.
        dtype: What autocast computes in.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        linear = (module for module in model.modules() if type(module) is torch.nn.Linear)  # others may not be lowered
        layers = [layer for layer in linear if layer.weight.dtype == torch.float32]
        self._copies = [
            (layer, {name: own.detach().to(dtype) for name, own in _weights(layer).items()}) for layer in layers
        ]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the weights as they are now."""
        for layer, copies in self._copies:
            for name, own in _weights(layer).items():
                copies[name].copy_(own)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the copies in the place of the weights for the code within."""
        before = [_weights(layer) for layer, _ in self._copies]
        try:
            for layer, copies in self._copies:
                _parameters(layer).update(copies)
            yield
        finally:
            for (layer, _), own in zip(self._copies, before, strict=True):
                _parameters(layer).update(own)


def _weights(layer: torch.nn.Linear) -> dict[str, torch.Tensor]:
    named = {name: _parameters(layer).get(name) for name in _CAST}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _parameters(layer: torch.nn.Linear) -> dict[str, torch.Tensor | None]:
    return vars(layer)["_parameters"]
