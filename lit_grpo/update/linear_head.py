"""The head of most language models: one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LinearHead:
    """Maps hidden states to logits: ``weight h + bias``, squashed to ``cap tanh(x / cap)`` where there is a cap.

    With ``keeps_gradient`` the backward pass adds the weight's gradient to its ``.grad`` block by block, so that no
    second array of V x D exists; hooks on the weight run as ever. ``is_tied``: the weight is the input embedding as
    well, whose backward pass ends the weight's gradient.
    """

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    cap: float | None = None
    keeps_gradient: bool = False
    is_tied: bool = False


def linear_head(model: PreTrainedModel) -> LinearHead | None:
    """Return the model's output embedding, where that is a plain linear layer (one with adapters is not)."""
    layer = model.get_output_embeddings()
    if type(layer) is not torch.nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    weight = layer.weight
    is_leaf = type(weight) is torch.nn.Parameter and weight.requires_grad and torch.is_grad_enabled()
    is_tied = getattr(model.get_input_embeddings(), "weight", None) is weight
    return LinearHead(weight, layer.bias, cap, keeps_gradient=is_leaf, is_tied=is_tied)
