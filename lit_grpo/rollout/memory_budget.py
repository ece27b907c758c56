"""The memory that is free on a device, and what of it keys and values may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch

from lit_grpo.scheduling.budget import MemoryBudget

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def free_bytes(device: torch.device) -> int:
    """Return the memory that can still be taken: the device's, or the host's where the device is the CPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return psutil.virtual_memory().available


def update_bytes(policy: PreTrainedModel) -> int:
    """Estimate what an update will take that is not there yet: gradients, two moments of Adam, and as much again.

    The last part stands for activations, whose size the micro-batches decide.
    """
    trained = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    return 4 * trained


def kv_budget_tokens(budget: MemoryBudget, policy: PreTrainedModel, bytes_per_token: int) -> int:
    """Return the KV tokens that ``budget`` comes to on the policy's device."""
    return budget.bytes(free_bytes(policy.device), update_bytes(policy)) // bytes_per_token
