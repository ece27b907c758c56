"""The weights that a sync sends: all of them, or only the elements that changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lit_grpo.rollout.weights.tensors import Named

_INDEX, _VALUE = "|index", "|value"


class Shipment:
    """Named tensors on their way to receivers, each yielded once; ``num_bytes`` counts those that were yielded.

    A change is sent as the positions of the elements that differ from those ``held``, and their new values. Elements
    are compared as bits, so that the receiver rebuilds exactly the same tensor (the observation of SparseRL-Sync: an
    update with a small learning rate changes few elements in bfloat16).

    Args:
        weights: All weights, by name.
        held: Copy of the receivers' weights in host memory. It is updated, if changes are to follow.
        changes: Whether to send changes only.
    """

    def __init__(
        self, weights: Iterable[Named], held: dict[str, torch.Tensor] | None = None, changes: bool = False
    ) -> None:
        self.changes = changes
        self.num_bytes = 0
        self._weights, self._held = weights, held
        self._num_changed = self._num_elements = 0

    @property
    def changed_share(self) -> float:
        """The share of the elements so far that traveled."""
        return self._num_changed / max(self._num_elements, 1) if self.changes else 1.0

    def __iter__(self) -> Iterator[Named]:
        for name, tensor in self._weights:
            for part_name, part in self._changed(name, tensor) if self.changes else self._whole(name, tensor):
                self.num_bytes += part.nbytes
                yield part_name, part

    def patches(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each tensor's name, the flat positions of its elements that travel, and these; first, all of them."""
        index_k = None
        for name, part in self:
            if not self.changes:
                dtype = torch.int32 if part.numel() < 2**31 else torch.int64
                yield name, torch.arange(part.numel(), dtype=dtype), part.reshape(-1)
            elif name.endswith(_INDEX):
                index_k = part
            else:
                assert index_k is not None  # which came before
                yield name.removesuffix(_VALUE), index_k, part

    def _whole(self, name: str, tensor: torch.Tensor) -> Iterator[Named]:
        if self._held is not None:
            self._held[name] = tensor.detach().cpu().clone()
        yield name, tensor

    def _changed(self, name: str, tensor: torch.Tensor) -> Iterator[Named]:
        assert self._held is not None
        new_n, old_n = tensor.cpu().reshape(-1), self._held[name].view(-1)
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[new_n.element_size()]
        index_k = (new_n.view(integers) != old_n.view(integers)).nonzero().squeeze(1)
        self._num_elements += len(new_n)
        self._num_changed += len(index_k)
        if len(index_k):
            old_n[index_k] = new_n[index_k]
            yield name + _INDEX, index_k.to(torch.int32 if len(new_n) < 2**31 else torch.int64)
            yield name + _VALUE, new_n[index_k]


def rebuild(tensors: Iterable[Named], held: dict[str, torch.Tensor], changes: bool) -> Iterator[Named]:
    """Yield the whole tensors of a shipment: those that came, or those ``held`` after the changes that came."""
    if not changes:
        yield from tensors
        return
    parts = dict(tensors)
    for name, tensor in held.items():
        if name + _INDEX in parts:
            tensor.view(-1)[parts[name + _INDEX].cpu().long()] = parts[name + _VALUE].cpu()
        yield name, tensor
