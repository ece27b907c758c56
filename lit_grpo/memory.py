"""Device and host memory: the peak of a phase, free memory, out-of-memory errors, and returning freed memory."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_GIB = 2**30
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

    Args:
        device: The device whose memory is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        """Begin a phase."""
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
    """Whether the device's or the host's memory ran out; torch has no class of its own for the host's."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def update_bytes(policy: PreTrainedModel) -> int:
    """Estimate what an update will take that is not there yet: gradients, two moments of Adam, and as much again.

    The last part stands for activations, whose size the micro-batches decide.
    """
    trained = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    return 4 * trained
