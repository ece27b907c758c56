"""A model's weights in host memory, lent to a device for as long as it needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class HostWeights:
    """Keeps parameters and buffers of a model that is not trained in host memory.

    They are copied to a device and never back, so they can be written where they are, in place, but not there.

    Args:
        model: Its weights are moved.
        pinned: Whether they are page-locked, which makes copies to a GPU faster. Needs CUDA.
    """

    def __init__(self, model: torch.nn.Module, pinned: bool) -> None:
        self._tensors = [*model.parameters(), *model.buffers()]
        for tensor in self._tensors:
            tensor.data = tensor.data.cpu().pin_memory() if pinned else tensor.data.cpu()
        self._host = [tensor.data for tensor in self._tensors]

    @contextmanager
    def lent_to(self, device: torch.device) -> Iterator[None]:
        """Have a copy of the weights on ``device`` in the model; the memory that it takes there is free afterwards."""
        try:
            for tensor, host in zip(self._tensors, self._host, strict=True):
                tensor.data = host.to(device, non_blocking=True, copy=True)
            yield
        finally:
            for tensor, host in zip(self._tensors, self._host, strict=True):
                tensor.data = host
