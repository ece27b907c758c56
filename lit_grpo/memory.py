"""Device and host memory: peaks, free memory, out-of-memory errors, returning freed memory, and copies between both."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_GIB = 2**30
_ALIGNED = 16  # bytes; where the tensors of a copy begin
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc has it


def return_freed_memory() -> None:
    """Give the free pages of the C library's heap back to the system, holes among them.

    Micro-batches of many sizes would leave a heap of holes that adds up over a step. Blocks that come from the system
    one by one leave none, but page faults then take a tenth to a fifth of the update's time.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def free_bytes(device: torch.device) -> int:
    """Return the memory that can still be taken: the device's, or the host's where the device is the CPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available


class PeakMemory:
    """Measures peak memory between resets: the allocator's on a GPU, the process's resident set on a CPU.

    Where the system cannot reset the resident set's peak (anywhere but Linux), it is that of the whole run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif _CLEAR_REFS.exists():
            _CLEAR_REFS.write_text("5")  # resets VmHWM, see proc(5)

    def current_gib(self) -> float:
        """Return what is in use now, in GiB; on a CPU without Linux's figures, the peak so far."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device) / _GIB
        return _status_gib("VmRSS")

    def state_gib(self) -> dict[str, float]:
        """Return what is in use, what torch's allocator holds besides, and what there is, by the names of metrics."""
        state = {"memory/current_gib": self.current_gib()}
        if self.device.type != "cuda":
            return state | {"memory/capacity_gib": psutil.virtual_memory().total / _GIB}
        _, total = torch.cuda.mem_get_info(self.device)
        held = torch.cuda.memory_reserved(self.device)
        return state | {"memory/reserved_gib": held / _GIB, "memory/capacity_gib": total / _GIB}

    def peak_gib(self) -> float:
        """Return the peak since the last reset, in GiB."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / _GIB
        return _status_gib("VmHWM")


def _status_gib(name: str) -> float:
    """Read a figure of this process from proc(5); elsewhere it is the peak of the whole run."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
        return int(line.split()[1]) * 1024 / _GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device's or the host's memory ran out; torch has no class of its own for the host's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def held_bytes(policy: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
    """Return the bytes of a policy's weights, of the gradients of its trained weights, and of the optimizers' states.

    Of tensors that are sharded over ranks this rank's shards count. A gradient counts whether it is there now or not.
    """
    weights = [*policy.parameters(), *policy.buffers()]
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": sum(map(_local_bytes, weights)),
        "gradients": sum(map(_local_bytes, trained)),
        "optimizer": sum(_local_bytes(value) for value in states if isinstance(value, torch.Tensor)),
    }


def _local_bytes(tensor: torch.Tensor) -> int:
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return shard.nbytes


def update_bytes(policy: PreTrainedModel) -> int:
    """Estimate what an update will take that is not there yet: gradients, two moments of Adam, and as much again.

    The last part stands for activations, whose size the micro-batches decide.
    """
    trained = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    return 4 * trained


def step_without_temporaries(optimizer: torch.optim.Optimizer) -> None:
    """Have torch's Adam or AdamW take its step in one kernel on a GPU; its settings decide where they choose a kernel.

    By default torch updates all weights at once there, for which it takes as much memory as the trained weights.
    """
    groups = optimizer.param_groups
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
        weight.device.type == "cuda" for group in groups for weight in group["params"]
    ):
        for group in groups:
            if group["fused"] is None and group["foreach"] is None and not group["differentiable"]:
                group["fused"] = True


def in_one_copy(arrays: Mapping[str, torch.Tensor | np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy arrays or tensors of the host to ``device`` as one piece, from pinned memory, so that nothing waits for it.

    Each copy costs a launch. Where the host is the device they keep their memory.
    """
    # Lightning loads and checks a policy with its device as torch's default, which is not meant here.
    tensors = {name: torch.as_tensor(array, device="cpu") for name, array in arrays.items()}
    if device.type == "cpu":
        return tensors
    places, num_bytes = {}, 0
    for name, tensor in tensors.items():
        places[name] = slice(num_bytes, num_bytes + tensor.nbytes)
        num_bytes += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    packed_U = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    host_U = packed_U.numpy()  # numpy copies a few bytes in less time
    for name, tensor in tensors.items():
        host_U[places[name]] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    there_U = packed_U.to(device, non_blocking=True)
    return {name: there_U[places[name]].view(tensor.dtype).view(tensor.shape) for name, tensor in tensors.items()}


def begin_read(tensor: torch.Tensor) -> torch.Tensor:
    """Begin to copy a tensor of a GPU to the host; what is returned holds it after an event that is recorded now."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor, non_blocking=True)


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
