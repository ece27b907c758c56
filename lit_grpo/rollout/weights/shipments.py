"""What of the weights travels: all of them, or only the elements that changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

_INDEX, _VALUE = "|index", "|value"

Named = tuple[str, torch.Tensor]


class Shipment:
    """Named tensors on their way to receivers, each yielded once; what has travelled is counted.

    Changes are told as the places of the elements that differ from those ``held``, and what they are now. They are
    compared as bits, so that what the receiver rebuilds is the same to the last of them (SparseRL-Sync's observation:
    an update of a small learning rate changes few elements in bfloat16).

    Args:
        weights: All weights, by name.
        held: On the host, what the receivers hold. It is brought up to date, where changes are to follow.
        changes: Whether changes are enough.

    Attributes:
        num_bytes: What has been yielded.
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
        """Of the elements that have been looked at, those that travelled."""
        return self._num_changed / max(self._num_elements, 1) if self.changes else 1.0

    def __iter__(self) -> Iterator[Named]:
        for name, tensor in self._weights:
            for part in self._changed(name, tensor) if self.changes else self._whole(name, tensor):
                self.num_bytes += part[1].nbytes
                yield part

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
    """Yield the whole tensors that a shipment stands for: its own, or those ``held`` with its changes made."""
    if not changes:
        yield from tensors
        return
    told = dict(tensors)
    for name, tensor in held.items():
        if name + _INDEX in told:
            tensor.view(-1)[told[name + _INDEX].cpu().long()] = told[name + _VALUE].cpu()
        yield name, tensor
