"""The policy's forward pass over a micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lit_grpo.policy.loading import hidden_states, token_logits
from lit_grpo.update.logprobs.linear_head import linear_head, linear_logprobs
from lit_grpo.update.logprobs.logprobs import token_logprobs
from lit_grpo.update.prefix.sharing import SharedPrefix, shared_prefixes, shares_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.update.batches.layout import MicroBatch


def micro_batch_logprobs(
    model: PreTrainedModel, micro_batch: MicroBatch, temperature: float, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob and entropy, shape N, of the completion tokens of a micro-batch under ``model``.

    Args:
        model: A causal language model.
        micro_batch: On the model's device.
        temperature: Divides the logits, as it did when the tokens were sampled.
        entropy_gradient: Whether the entropy carries a gradient.

    Raises:
        RuntimeError: The micro-batch is packed and gradient checkpointing would run the layers again where the model's
            attention has been switched back; call it, and ``backward``, inside ``shared_prefixes(model)``.
    """
    if micro_batch.groups and not shares_prefix(model):
        if torch.is_grad_enabled() and model.training and model.is_gradient_checkpointing:
            raise RuntimeError(
                "Gradient checkpointing runs the layers again in backward; put both passes into `with "
                "shared_prefixes(model):`."
            )
        with shared_prefixes(model):
            return micro_batch_logprobs(model, micro_batch, temperature, entropy_gradient)
    layout = SharedPrefix(micro_batch.groups, micro_batch.prompts)
    layout.compute_carried(model)
    kwargs = {"shared_prefix": layout} if micro_batch.groups else {}
    hidden_BTD = hidden_states(model, micro_batch.input_ids_BT, position_ids=micro_batch.position_ids_BT, **kwargs)
    hidden_ND = layout.with_carried_hidden(hidden_BTD.flatten(0, 1)).index_select(0, micro_batch.source_N)
    linear = linear_head(model)
    if linear is not None:
        return linear_logprobs(hidden_ND, micro_batch.target_ids_N, linear, temperature, entropy_gradient)
    return token_logprobs(
        hidden_ND,
        micro_batch.target_ids_N,
        head=lambda hidden: token_logits(model, hidden),
        vocab_size=model.config.get_text_config().vocab_size,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
    )
