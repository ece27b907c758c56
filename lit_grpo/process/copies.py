"""Copies between the host and a device, one for many tensors: each one costs a launch, and may make the host wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

_ALIGNED = 16  # bytes; where the tensors of a copy begin


def in_one_copy(arrays: Mapping[str, torch.Tensor | np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy arrays or tensors of the host to ``device`` as one piece, from pinned memory, so that nothing waits for it.

    Where the host is the device they keep their memory.
    """
    tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
    if device.type == "cpu":
        return tensors
    places, num_bytes = {}, 0
    for name, tensor in tensors.items():
        places[name] = slice(num_bytes, num_bytes + tensor.nbytes)
        num_bytes += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    packed_U = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, tensor in tensors.items():
        packed_U[places[name]] = tensor.contiguous().view(-1).view(torch.uint8)
    there_U = packed_U.to(device, non_blocking=True)
    return {name: there_U[places[name]].view(tensor.dtype).view(tensor.shape) for name, tensor in tensors.items()}


def in_one_read(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors of any shapes and dtypes to the host as one piece, for which the host waits once.

    Those that are on the host already are returned as they are; the others are on one device.
    """
    there = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    if not there:
        return list(tensors)
    there.sort(key=lambda tensor: -tensor.element_size())  # so that each begins at a multiple of its own size
    packed_U = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in there]).cpu()
    parts = packed_U.split([tensor.nbytes for tensor in there])
    read = {id(own): part.view(own.dtype).view(own.shape) for own, part in zip(there, parts, strict=True)}
    return [read.get(id(tensor), tensor) for tensor in tensors]
