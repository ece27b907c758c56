"""How many tokens go through the policy at once, found out where the user leaves it open."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from lit_grpo.policy.architecture.decoder import decoder_of
from lit_grpo.update.logprobs.checkpointing import KeptBytes
from lit_grpo.update.prefix.layout import PackedGroup
from lit_grpo.update.prefix.sharing import SharedPrefix, shared_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MOST_TOKENS = 32_768  # more at once makes no matrix product faster
SHARE = 0.7  # of the free memory; the rest is for what is not kept for the backward pass
_PROBE = 64  # tokens


class MicroBatchSize:
    """A number of tokens that starts from an estimate and is halved whenever memory runs out.

    Args:
        tokens: The first estimate.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def halve(self, least: int) -> str:
        """Go down, but not below what one prompt or completion takes; return what to tell the user.

        Raises:
            torch.OutOfMemoryError: It was there already.
        """
        if self.tokens <= least:
            raise torch.OutOfMemoryError(
                f"Memory ran out with micro-batches of {self.tokens} tokens, and this step cannot do with less than "
                f"{least}; set gradient_checkpointing, or lower sampling.max_tokens or data.max_prompt_tokens."
            )
        before, self.tokens = self.tokens, max(self.tokens // 2, least)
        return (
            f"Memory ran out with micro-batches of {before} tokens. They have at most {self.tokens} from now on and "
            f"the step starts again; max_tokens_per_micro_batch={self.tokens} would start with that."
        )


def estimate_tokens(model: PreTrainedModel, free_bytes: int, shares_prefix: bool, selective: bool = False) -> int:
    """Estimate how many tokens' activations fit into ``free_bytes`` beside gradients and the optimizer's state.

    What autograd keeps for a few tokens is counted in a forward pass. With gradient checkpointing that is what layers
    begin from, and one layer's activations are computed again at a time. Gradients and two moments, as of Adam, are
    taken off beforehand, wherever the model has no gradients yet.
    """
    per_token = bytes_per_token(model, shares_prefix, selective)
    return max(1, min(MOST_TOKENS, int((free_bytes - pending_bytes(model)) * SHARE / per_token)))


def pending_bytes(model: PreTrainedModel) -> int:
    """What gradients and two moments, as of Adam, will take of a model that has no gradients yet."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(3 * parameter.nbytes for parameter in parameters if parameter.grad is None)


def bytes_per_token(model: PreTrainedModel, shares_prefix: bool, selective: bool = False) -> float:
    """What a token of a micro-batch takes until its backward pass."""
    per_token = kept_bytes(model, shares_prefix)
    if model.is_gradient_checkpointing and model.training:
        selected = KeptBytes()
        with selected if selective else nullcontext():
            all_layers = kept_bytes(model.eval(), shares_prefix)
        per_token += all_layers / model.config.get_text_config().num_hidden_layers + selected.num_bytes / _PROBE
        model.train()
    return per_token


def kept_bytes(model: PreTrainedModel, shares_prefix: bool) -> float:
    """Bytes that autograd keeps of each token of a forward pass over a few, parameters left out."""
    input_ids_BT = torch.zeros((1, _PROBE), dtype=torch.int64, device=model.device)
    positions_BT = torch.arange(_PROBE, device=model.device)[None]
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    switched = shared_prefixes(model) if shares_prefix else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), switched:
        layout = {"shared_prefix": SharedPrefix([PackedGroup(0, _PROBE, ())])} if shares_prefix else {}
        output = decoder_of(model)(input_ids=input_ids_BT, position_ids=positions_BT, use_cache=False, **layout)
    del output
    return sum(kept.values()) / _PROBE
