"""The policy while it decodes: in evaluation mode, with the slots' attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_grpo.rollout.attention import use_slot_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DecodingMode:
    """Switches a policy to decoding and gives it back as it was.

    Args:
        policy: A model that the slots can decode.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        self._policy = policy
        self._attention: str | None = None

    def begin(self) -> None:
        """Switch to slot attention and evaluation mode, if that has not been done."""
        if self._attention is None:
            self._training = self._policy.training
            self._policy.eval()
            self._attention = use_slot_attention(self._policy)

    def end(self) -> None:
        """Give the policy back, if it has been switched."""
        if self._attention is not None:
            self._policy.set_attn_implementation(self._attention)
            self._policy.train(self._training)
            self._attention = None
