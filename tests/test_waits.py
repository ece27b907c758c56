"""What the update would make the host wait for on a GPU; the device ``meta`` has no contents to wait for."""

from __future__ import annotations

from typing import Any

import torch
from hand_made import make_micro_batch, make_rollout
from torch.utils._python_dispatch import TorchDispatchMode


class Copies(TorchDispatchMode):
    """Counts the copies from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten._to_copy.default and args[0].device != result.device
        return result


def test_a_micro_batch_reaches_the_device_in_one_copy() -> None:
    micro_batch = make_micro_batch([make_rollout([3, 5, 4], [4, 2]), make_rollout([3], [4, 2, 6])], [0.5, -1.0])
    with Copies() as copies:
        there = micro_batch.to("meta")
    assert copies.count == 1
    tensors = {name: value for name, value in vars(micro_batch).items() if isinstance(value, torch.Tensor)}
    assert len(tensors) == 9 and there.stretches == micro_batch.stretches and there.rows == micro_batch.rows
    assert there.labels_3K is not None and there.labels_3K.shape == (3, len(micro_batch.input_ids_BT[0]))
    for name, tensor in tensors.items():
        assert getattr(there, name).is_meta and getattr(there, name).shape == tensor.shape
