"""Number of tokens that go through the policy at once, found out where the user leaves it open."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.policy.architecture.decoder import decoder_of
from lit_grpo.policy.architecture.states import may_have_states
from lit_grpo.policy.architecture.vision import image_features, sees, small_image, vision_of
from lit_grpo.types import Pictures, Prompt
from lit_grpo.update.logprobs.checkpointing import KeptBytes
from lit_grpo.update.prefix.layout import Stretch
from lit_grpo.update.prefix.sharing import SharedPrefix, shared_prefixes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


MOST_TOKENS = 32_768  # more at once makes no matrix product faster
SHARE = 0.7  # of the free memory; the rest is for what is not kept for the backward pass
_PROBES = 16, 64  # tokens
_PROBES_OF_STATES = 256, 512  # recurrent layers compute whole chunks of tokens, of at most 256


class MicroBatchSize:
    """A number of tokens that starts from an estimate and is halved whenever memory runs out.

    Args:
        tokens: Estimated number of tokens that fit into a micro-batch.
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


@dataclass(frozen=True)
class ActivationBytes:
    """Memory of a micro-batch until its backward pass.

    Args:
        of_token: Bytes that each token takes.
        fixed: Bytes that are taken whatever the number of tokens is: under autocast the copies of the weights in the
            lower precision, which autograd keeps.
    """

    of_token: float
    fixed: float

    def of(self, num_tokens: int) -> float:
        return self.fixed + self.of_token * num_tokens

    @classmethod
    def measured(cls, model: PreTrainedModel, count: Callable[[int], int]) -> ActivationBytes:
        """Count the bytes of two numbers of tokens, and tell what grows with them from what does not."""
        probes = _PROBES_OF_STATES if may_have_states(model) else _PROBES
        (few, of_few), (many, of_many) = ((num_tokens, count(num_tokens)) for num_tokens in probes)
        of_token = (of_many - of_few) / (many - few)
        return cls(of_token, max(0.0, of_few - few * of_token))

    def __add__(self, other: ActivationBytes) -> ActivationBytes:
        return ActivationBytes(self.of_token + other.of_token, self.fixed + other.fixed)

    def __truediv__(self, number: int) -> ActivationBytes:
        return ActivationBytes(self.of_token / number, self.fixed / number)


def estimate_tokens(
    model: PreTrainedModel, free_bytes: int, shares_prefix: bool, selective: bool = False, image_share: float = 0.0
) -> int:
    """Estimate how many tokens' activations fit into ``free_bytes`` beside gradients and the optimizer's state.

    What autograd keeps for a few tokens is counted in forward passes, in the precision of the caller's autocast. With
    gradient checkpointing that is what layers begin from, and one layer's activations are computed again at a time.
    Gradients and two moments, as of Adam, are taken off beforehand, wherever the model has no gradients yet. Of the
    tokens a share stands for images, for which a trained vision tower keeps bytes of its own.
    """
    activations = activation_bytes(model, shares_prefix, selective, image_share)
    left = free_bytes - pending_bytes(model) - activations.fixed
    return max(1, min(MOST_TOKENS, int(left * SHARE / activations.of_token)))


def pending_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that gradients and two moments, as of Adam, will take of a model that has no gradients yet."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(3 * parameter.nbytes for parameter in parameters if parameter.grad is None)


def activation_bytes(
    model: PreTrainedModel, shares_prefix: bool, selective: bool = False, image_share: float = 0.0
) -> ActivationBytes:
    """Memory of a micro-batch until its backward pass, a share of whose tokens stands for images."""
    kept = kept_bytes(model, shares_prefix)
    if image_share:
        kept += ActivationBytes(image_share * kept_of_image(model), 0.0)
    if not (model.is_gradient_checkpointing and model.training):
        return kept
    model.eval()  # without checkpointing
    of_layer = kept_bytes(model, shares_prefix) / model.config.get_text_config().num_hidden_layers
    if image_share:
        of_layer += ActivationBytes(image_share * kept_of_image(model) / tower_depth(model.config), 0.0)
    if selective:
        kept += ActivationBytes.measured(model, lambda num_tokens: _selected_bytes(model, shares_prefix, num_tokens))
    model.train()
    return kept + of_layer


def kept_bytes(model: PreTrainedModel, shares_prefix: bool) -> ActivationBytes:
    """Bytes that autograd keeps of a forward pass, parameters left out."""
    return ActivationBytes.measured(model, lambda num_tokens: _kept_bytes(model, shares_prefix, num_tokens))


def image_share(model: PreTrainedModel, prompt: Prompt, num_tokens: int) -> float:
    """Return the share of a prompt and its completion of ``num_tokens`` that stands for images."""
    if prompt.pictures is None or not sees(model):
        return 0.0
    return prompt.token_ids.count(vision_of(model).feature_token) / (len(prompt.token_ids) + num_tokens)


def tower_depth(config: Any) -> int:
    sizes = config.vision_config
    return getattr(sizes, "depth", None) or sizes.num_hidden_layers


def kept_of_image(model: PreTrainedModel) -> float:
    """Return the bytes that autograd keeps of a vision tower for a token of an image; 0 if it is frozen."""
    vision, image = vision_of(model), small_image()
    one, two = (Pictures((image,) * number, b"") for number in (1, 2))
    before, after = (saved_bytes(model, partial(image_features, model, [seen])) for seen in (one, two))
    return (after - before) / vision.tokens_of(image).count(vision.feature_token)


def _kept_bytes(model: PreTrainedModel, shares_prefix: bool, num_tokens: int) -> int:
    return saved_bytes(model, lambda: _forward(model, shares_prefix, num_tokens))


def saved_bytes(model: PreTrainedModel, run: Callable[[], object]) -> int:
    """Return the bytes that autograd keeps of what a function computes, parameters left out."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()  # what is kept lives as long as the output
    del output
    return sum(kept.values())


def _selected_bytes(model: PreTrainedModel, shares_prefix: bool, num_tokens: int) -> int:
    with KeptBytes() as selected:
        _forward(model, shares_prefix, num_tokens)
    return selected.num_bytes


def _forward(model: PreTrainedModel, shares_prefix: bool, num_tokens: int) -> object:
    """Run so many tokens through the decoder; return the result, which keeps what its backward pass needs."""
    input_ids_BT = torch.zeros((1, num_tokens), dtype=torch.int64, device=model.device)
    positions_BT = torch.arange(num_tokens, device=model.device)[None]
    layout = {"shared_prefix": SharedPrefix([Stretch(0, 0, num_tokens, last=0)])} if shares_prefix else {}
    with shared_prefixes(model) if shares_prefix else nullcontext():
        return decoder_of(model)(input_ids=input_ids_BT, position_ids=positions_BT, use_cache=False, **layout)
