"""What a generator is told of the policy that it decodes for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lit_grpo.policy.loading import context_length, eos_token_ids
from lit_grpo.policy.weights import PolicyWeights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class PolicySpec:
    """A policy for those who decode with it: its architecture, its tokenizer, and its weights by name.

    Args:
        module: The model itself, which an embedded generator decodes on; all others read it through this object.
        tokenizer: Its tokenizer.
    """

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def name(self) -> str:
        """The class of the model, for messages."""
        return type(self.module).__name__

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the bare model, from which an engine builds it."""
        return self.module.config

    @property
    def dtype(self) -> torch.dtype:
        """What its weights are in."""
        return self.module.dtype

    @property
    def device(self) -> torch.device:
        """Where they are trained."""
        return self.module.device

    @property
    def context_length(self) -> int:
        """The most tokens that it takes, prompt and completion together."""
        return context_length(self.module)

    @property
    def eos_ids(self) -> Sequence[int]:
        """All tokens that end a completion."""
        return eos_token_ids(self.module, self.tokenizer)

    def weights(self, merged: bool = True, dtype: torch.dtype | None = None) -> PolicyWeights:
        """Return the weights as they are now, by name (see :class:`PolicyWeights`)."""
        return PolicyWeights(self.module, merged, dtype)
