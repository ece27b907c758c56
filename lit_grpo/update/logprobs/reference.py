"""The reference policy of the KL term: its place in memory and its updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import torch

from lit_grpo.compatibility import SHARDS, Clash, Requirement, check_clashes, check_together
from lit_grpo.limits import Count, Limit, check_fields
from lit_grpo.policy.architecture.logits import logit_map
from lit_grpo.policy.loading import LoadedPolicy, load_policy
from lit_grpo.policy.sharding import is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SYNC_STEPS = 512


@dataclass(frozen=True)
class ReferenceSettings:
    """The reference policy of the KL term: the initial policy, unless ``mixup_alpha`` updates it.

    Args:
        offload: Keep the reference's weights in host memory. The device has them only while a batch's log-probs under
            the reference are computed, not during the backward pass. Of no use on a CPU.
        mixup_alpha: Update the reference to ``mixup_alpha x policy + (1 - mixup_alpha) x reference``, every
            ``sync_steps`` optimizer steps (TR-DPO, arXiv 2404.09656; TRL's ``sync_ref_model`` and
            ``ref_model_mixup_alpha``, 0.6 there). In (0, 1]; 1 takes the policy as it is.
        sync_steps: Optimizer steps between two updates of the reference.
    """

    offload: bool = False
    mixup_alpha: Annotated[float | None, Limit(above=0, most=1, remedy="leave it out for a fixed one")] = None
    sync_steps: Count = SYNC_STEPS

    def __post_init__(self) -> None:
        check_fields(self, "model.reference.")
        clash = Clash(
            f"model.reference.sync_steps {self.sync_steps} needs a reference that moves",
            "model.reference without mixup_alpha stays where it is",
            found=self.sync_steps != SYNC_STEPS and self.mixup_alpha is None,
            remedy="set model.reference.mixup_alpha, such as 0.6",
        )
        check_clashes([clash])

    def check(self, without_term: Callable[[str, bool], Clash], has_adapters: bool) -> None:
        """Refuse settings of a reference that there is not.

        Args:
            without_term: Tells, of the KL term that the reference is for, the clash of a setting without that term.
            has_adapters: Whether adapters are trained instead of the policy's own weights.

        Raises:
            ValueError: A reference is to be offloaded or moved that takes no part, or is part of the policy.
        """
        settings = {
            "model.reference.offload true": self.offload,
            f"model.reference.mixup_alpha {self.mixup_alpha}": self.mixup_alpha is not None,
        }
        bare = "model.lora takes the policy without its adapters, which needs no memory and cannot move"
        for name, is_set in settings.items():
            own = Clash(f"{name} needs a reference whose weights are its own", bare, found=is_set and has_adapters)
            check_clashes([without_term(name, is_set), own])


class HostWeights:
    """Keeps parameters and buffers of a model that is not trained in host memory.

    They are copied to a device and never back, so they can be written where they are, in place, but not there.

    Args:
        model: Its weights are moved.
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
    """Holds a copy of the first policy, outside the module's parameters; fixed, or following the policy.

    Args:
        model: The copy; it is switched to evaluation and needs no gradient.
        device: Where it computes.
        settings: Where it lives, and whether it moves.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, settings: ReferenceSettings) -> None:
        self.model = model.eval().requires_grad_(False)
        logit_map(model)  # found out now, and not in a batch
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
        dtype: Of its weights.
        device: Where the reference computes.
        settings: Where it lives, and whether it moves.
        began: What is trained: all weights, adapters that the run has put on the ``bare`` policy, or the ``adapter``
            that the policy came with.
    """
    if began == "bare":
        return AdapterFreeReference(policy)
    if began == "adapter":
        return InitialAdapterReference(policy)
    model = load_policy(source, dtype) if isinstance(source, str) else copy.deepcopy(policy)
    return Reference(model, device, settings)
