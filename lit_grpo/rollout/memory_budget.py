"""The memory that is free on a device, and what of it keys and values may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_grpo.memory import free_bytes
from lit_grpo.scheduling.budget import MemoryBudget

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def update_bytes(policy: PreTrainedModel) -> int:
    """Estimate what an update will take that is not there yet: gradients, two moments of Adam, and as much again.

    The last part stands for activations, whose size the micro-batches decide.
    """
    trained = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    return 4 * trained


def kv_budget_tokens(budget: MemoryBudget, policy: PreTrainedModel, bytes_per_token: int) -> int:
    """Return the KV tokens that ``budget`` comes to on the policy's device."""
    return budget.bytes(free_bytes(policy.device), update_bytes(policy)) // bytes_per_token
