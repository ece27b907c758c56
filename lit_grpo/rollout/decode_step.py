"""The policy's part of a decode step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from lit_grpo.policy import hidden_states
from lit_grpo.rollout.attention import Attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DecoderStep(Protocol):
    """A decoder that takes one token a row."""

    def __call__(
        self, tokens_B: torch.Tensor, positions_B: torch.Tensor, longest: int, cache: Attention
    ) -> torch.Tensor:
        """Return the last hidden states, shape (rows, hidden size); no position is larger than ``longest``."""
        ...


def decode_step(
    policy: PreTrainedModel,
    fused: DecoderStep | None,
    tokens_B: torch.Tensor,
    positions_B: torch.Tensor,
    longest: int,
    cache: Attention,
) -> torch.Tensor:
    """Run the policy over one token a row, the short way where there is one; autocast takes the policy's own.

    Args:
        policy: Switched to slot attention.
        fused: The short way, or ``None``.
        tokens_B: The last token of each row.
        positions_B: Where it stands in its sequence.
        longest: The largest of these positions.
        cache: The keys and values of all tokens before.

    Returns:
        The last hidden states, shape (rows, hidden size).
    """
    if fused is None or torch.is_autocast_enabled(tokens_B.device.type):
        return hidden_states(policy, tokens_B[:, None], position_ids=positions_B[:, None], slot_cache=cache)[:, 0]
    return fused(tokens_B, positions_B, longest, cache)
