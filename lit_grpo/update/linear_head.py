"""The head of most language models: one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LinearHead:
    """Maps hidden states to logits: ``weight h + bias``, squashed to ``cap tanh(x / cap)`` where there is a cap."""

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    cap: float | None = None


def linear_head(model: PreTrainedModel) -> LinearHead | None:
    """Return the model's output embedding, where that is a plain linear layer (one with adapters is not)."""
    layer = model.get_output_embeddings()
    if type(layer) is not torch.nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return LinearHead(layer.weight, layer.bias, cap)
