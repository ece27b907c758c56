"""What a generator is told of the policy that it decodes for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.memory import update_bytes
from lit_grpo.policy.architecture.decoder import context_length
from lit_grpo.policy.loading import eos_token_ids
from lit_grpo.policy.saving import save_settings
from lit_grpo.policy.sharding import class_of
from lit_grpo.policy.weights import Adapters, PolicyWeights, find_adapters

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
        return class_of(self.module).__name__

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
    def signature(self) -> str:
        """What two policies have in common that one engine can serve after the other."""
        return f"{self.config.to_json_string()} {self.dtype} {self.device}"

    @property
    def context_length(self) -> int:
        """The most tokens that it takes, prompt and completion together."""
        return context_length(self.module)

    @property
    def eos_ids(self) -> Sequence[int]:
        """All tokens that end a completion."""
        return eos_token_ids(self.module, self.tokenizer)

    @property
    def embeddings(self) -> torch.nn.Module:
        """Its input embeddings, read where they lie."""
        return self.module.get_input_embeddings()

    @property
    def embeddings_name(self) -> str:
        """What the weight of the embeddings is called among :meth:`weights`."""
        weight: Any = self.embeddings.weight
        return self.weights().name_of(weight)

    @property
    def adapters(self) -> Adapters | None:
        """What an engine has to know of its LoRA adapters; ``None`` where it has none."""
        return find_adapters(self.module)

    @property
    def update_bytes(self) -> int:
        """What an update of it will take that is not there yet."""
        return update_bytes(self.module)

    def weights(self, merged: bool = True, dtype: torch.dtype | None = None) -> PolicyWeights:
        """Return the weights as they are now, by name (see :class:`PolicyWeights`)."""
        return PolicyWeights(self.module, merged, dtype)

    def save_skeleton(self, folder: Path) -> None:
        """Save everything but its weights, which are whole when they travel, for an engine to start from."""
        wrapper: Any = self.module
        bare = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else wrapper
        save_settings(bare, folder)
        self.tokenizer.save_pretrained(folder)
