"""The reference policy of the KL term: its place in memory and its updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from lit_grpo.compatibility import SHARDS, Clash, Requirement, check_clashes, check_together
from lit_grpo.policy.architecture.decoder import logit_map
from lit_grpo.policy.architecture.vision import give_vision, sees, vision_of
from lit_grpo.policy.loading import LoadedPolicy, load_policy
from lit_grpo.policy.sharding import is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ReferenceSettings:
    """The reference policy of the KL term: the initial policy, unless a plug-in updates it."""

    offload: bool = False
    """Keep the reference's weights in host memory. The device has them only while a batch's log-probs under the
    reference are computed, not during the backward pass. Of no use on a CPU.
    """

    def check(self, without_term: Callable[[str, bool], Clash], has_adapters: bool) -> None:
        """Refuse settings of a reference that there is not.

        Args:
            without_term: Tells, of the KL term that the reference is for, the clash of a setting without that term.
            has_adapters: Whether adapters are trained instead of the policy's own weights.

        Raises:
            ValueError: A reference is to be offloaded that takes no part, or is part of the policy.
        """
        name = "model.reference.offload true"
        bare = "model.lora takes the policy without its adapters, which needs no memory"
        own = Clash(f"{name} needs a reference whose weights are its own", bare, found=self.offload and has_adapters)
        check_clashes([without_term(name, self.offload), own])


class HostWeights:
    """Keeps parameters and buffers of a model that is not trained in host memory.

    They are copied to a device and never back, so they can be written where they are, in place, but not there.

    Args:
        model: Model whose weights are moved.
        pinned: Whether they are page-locked, which makes copies to a GPU faster. Needs CUDA.
    """

    def __init__(self, model: torch.nn.Module, pinned: bool) -> None:
        self._tensors = [*model.parameters(), *model.buffers()]
        for tensor in self._tensors:
            tensor.data = tensor.data.cpu().pin_memory() if pinned else tensor.data.cpu()
        self._host = [tensor.data for tensor in self._tensors]

    @contextmanager
    def lent_to(self, device: torch.device) -> Iterator[None]:
        """Have a copy of the weights on ``device`` in the model; the memory that it takes there is free afterwards."""
        try:
            for tensor, host in zip(self._tensors, self._host, strict=True):
                tensor.data = host.to(device, non_blocking=True, copy=True)
            yield
        finally:
            for tensor, host in zip(self._tensors, self._host, strict=True):
                tensor.data = host


class Reference:
    """Holds a copy of the first policy, outside the module's parameters, in evaluation and without gradients."""

    def __init__(self, model: PreTrainedModel, device: torch.device, settings: ReferenceSettings) -> None:
        self.model = model.eval().requires_grad_(False)
        logit_map(model)  # found out now, and not in a batch
        self.device = device
        self._host = HostWeights(model, pinned=device.type == "cuda") if settings.offload else None
        if self._host is None:
            model.to(device)  # pyrefly: ignore[bad-argument-type]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return its parameters by name, wherever they are kept; they may be changed in place."""
        return dict(self.model.named_parameters())

    @contextmanager
    def lend(self) -> Iterator[PreTrainedModel]:
        """Give the model, on its device; where it is offloaded its memory there is free again afterwards."""
        with nullcontext() if self._host is None else self._host.lent_to(self.device):
            yield self.model


class AdapterFreeReference:
    """The policy itself, with its adapters switched off: no second model, and it does not move."""

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


class InitialAdapterReference:
    """The policy itself, with the adapter that it came with as that was: no second model, and it does not move.

    Args:
        policy: A model with that adapter, of which nothing has been trained yet.

    Raises:
        ValueError: Its weights are shards.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        if is_sharded(policy):
            name = "model.objective.kl.beta above 0 with an adapter as model.policy"
            remedy = "set model.objective.kl.beta to 0"
            check_together([Requirement(name, frozenset({"unsharded_weights"}), remedy=remedy), SHARDS])
        self.policy = policy
        self._first = {
            name: weight.detach().clone() for name, weight in policy.named_parameters() if weight.requires_grad
        }

    def weights(self) -> dict[str, torch.Tensor]:
        return self._first

    @contextmanager
    def lend(self) -> Iterator[PreTrainedModel]:
        """Give the policy with its first adapter."""
        weights = {name: weight for name, weight in self.policy.named_parameters() if name in self._first}
        now = {name: weight.data for name, weight in weights.items()}
        try:
            for name, weight in weights.items():
                self._first[name] = self._first[name].to(weight.device)
                weight.data = self._first[name]
            yield self.policy
        finally:
            for name, weight in weights.items():
                weight.data = now[name]


def make_reference(
    policy: PreTrainedModel,
    source: str | LoadedPolicy,
    dtype: str,
    device: torch.device,
    settings: ReferenceSettings,
    began: Literal["full", "bare", "adapter"],
) -> Reference | AdapterFreeReference | InitialAdapterReference:
    """Make the reference of a policy that has not been trained yet.

    Args:
        policy: The model, perhaps sharded.
        source: What it was loaded from.
        dtype: Name of the dtype of the weights that are loaded, such as ``bfloat16``.
        device: Where the reference computes.
        settings: Whether the reference's weights are kept in host memory (``offload``).
        began: What is trained: all weights, adapters that the run has put on the ``bare`` policy, or the ``adapter``
            that the policy came with.
    """
    if began == "bare":
        return AdapterFreeReference(policy)
    if began == "adapter":
        return InitialAdapterReference(policy)
    model = load_policy(source, dtype, vision=sees(policy)) if isinstance(source, str) else copy.deepcopy(policy)
    if sees(policy):
        give_vision(model, vision_of(policy))
    return Reference(model, device, settings)
