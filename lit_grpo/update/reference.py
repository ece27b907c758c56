"""The policy that the KL term holds on to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from lit_grpo.policy import hidden_states, token_logits
from lit_grpo.update.host_weights import HostWeights
from lit_grpo.update.linear_head import linear_head
from lit_grpo.update.linear_logprobs import linear_logprobs
from lit_grpo.update.logprobs import token_logprobs
from lit_grpo.update.reference_settings import ReferenceSettings
from lit_grpo.update.shared_prefix import SharedPrefix, shared_prefixes, shares_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.types import MicroBatch


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


class Reference:
    """Holds a copy of the first policy, outside the module's parameters; fixed, or following the policy.

    Args:
        model: The copy; it is switched to evaluation and needs no gradient.
        device: Where it computes.
        settings: Where it lives, and whether it moves.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, settings: ReferenceSettings) -> None:
        self.model = model.eval().requires_grad_(False)
        self.settings = settings
        self.device = device
        self._host = HostWeights(model, pinned=device.type == "cuda") if settings.offload else None
        if self._host is None:
            model.to(device)  # pyright: ignore[reportArgumentType]
        self._has_moved = False

    @contextmanager
    def lend(self) -> Iterator[PreTrainedModel]:
        """Give the model, on its device; where it is offloaded its memory there is free again afterwards."""
        with nullcontext() if self._host is None else self._host.lent_to(self.device):
            yield self.model

    @torch.no_grad()
    def follow(self, policy: PreTrainedModel, policy_version: int) -> None:
        """Move after an optimizer step, where it is time to: ``alpha x policy + (1 - alpha) x reference``.

        As TRL's ``SyncRefModelCallback``. The same on every rank, because the policy is.

        Args:
            policy: The policy as it is now.
            policy_version: The optimizer steps that it has had.
        """
        alpha = self.settings.mixup_alpha
        if alpha is None or policy_version % self.settings.sync_steps:
            return
        for mine, its in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.mul_(1 - alpha).add_(its.to(mine.device), alpha=alpha)
        self._has_moved = True

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps: the weights once they have moved, and nothing before."""
        return dict(self.model.state_dict()) if self._has_moved else {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        if state:
            self.model.load_state_dict(state)
            self._has_moved = True


class AdapterFreeReference:
    """The policy itself, with its adapters switched off: no second model, and it does not move.

    Args:
        policy: A model that has adapters.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        self.policy = policy

    @contextmanager
    def lend(self) -> Iterator[PreTrainedModel]:
        """Give the policy without its adapters."""
        self.policy.disable_adapters()
        try:
            yield self.policy
        finally:
            self.policy.enable_adapters()
