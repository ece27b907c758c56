"""A policy whose weights, gradients and optimizer state are shards, one on each rank, by torch's FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

T = TypeVar("T")
_COMPUTE, _WHOLE = "compute_in_forward", "whole_at_rest"


def shard(policy: PreTrainedModel, mesh: DeviceMesh, whole_at_rest: bool = True) -> None:
    """Keep only a shard of each weight on every rank of a mesh.

    The first rank sends its weights to the others, one layer after another, so the others need not load any. A layer
    is gathered when it is computed, one at a time. Embeddings, the last norm and the head stay whole from the forward
    pass of a micro-batch to its backward pass.

    Args:
        policy: The model; on all ranks except the first its weights may be on the device ``meta``.
        mesh: The ranks, in one dimension.
        whole_at_rest: Whether :func:`gather_for_sampling` makes the weights whole, for a generator in this process.

    Raises:
        ValueError: The policy has no list of layers.
    """
    layers = getattr(policy.get_decoder(), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ValueError(f"{type(policy).__name__} has no list of layers to shard; take trainer.strategy ddp.")
    for part in (*layers, policy):
        _take_from_first(part, mesh)
        fully_shard(part, mesh=mesh)
    # Each part names the part that is gathered next in the backward pass. torch would take the order of all forward
    # passes since the last backward pass, which differs between ranks: each makes as many passes as it needs.
    parts = _parts(policy)
    for part, fetched_next in zip(parts, [parts[-1], *parts[:-1]], strict=True):
        part.set_modules_to_backward_prefetch([fetched_next])
    setattr(policy, _WHOLE, whole_at_rest)
    setattr(policy, _COMPUTE, MethodType(lambda _, function: function(), policy))
    register_fsdp_forward_method(policy, _COMPUTE)
    compute(policy, lambda: None)  # makes the policy the root of its layers, before a layer is computed alone
    scatter(policy)


def _take_from_first(part: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Give a part the first rank's weights and buffers, except those that are shards already."""
    group = mesh.get_group()
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    taken: dict[int, torch.Tensor] = {}  # by the id of the tensor before, so that tied weights stay tied
    for module in part.modules():
        kinds = module._parameters, module._buffers
        for tensors in cast("tuple[dict[str, Any], ...]", kinds):
            for name, before in tensors.items():
                if before is None or isinstance(before, DTensor):
                    continue
                if id(before) not in taken:
                    content = torch.empty(before.shape, dtype=before.dtype) if before.is_meta else before.detach()
                    content = content.to(device).contiguous()
                    distributed.broadcast(content, distributed.get_global_rank(group, 0), group)
                    is_weight = isinstance(before, torch.nn.Parameter)
                    taken[id(before)] = torch.nn.Parameter(content, before.requires_grad) if is_weight else content
                tensors[name] = taken[id(before)]


def is_sharded(policy: torch.nn.Module) -> bool:
    """Return whether a policy has been sharded, even while its weights are whole."""
    return isinstance(policy, FSDPModule)


def class_of(policy: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class of a policy before sharding, which derives a class from it."""
    return type(policy).__bases__[-1] if is_sharded(policy) else type(policy)


def compute(policy: PreTrainedModel, function: Callable[[], T]) -> T:
    """Call a function that computes with a policy's modules; if the policy is sharded, as its forward method.

    All ranks must call it equally often and compute the same number of layers.
    """
    if not is_sharded(policy):
        return function()
    return cast("Callable[[Callable[[], T]], T]", getattr(policy, _COMPUTE))(function)


def gather(policy: PreTrainedModel) -> None:
    """Make the weights whole until :func:`scatter`; all ranks call it."""
    for module in _parts(policy):
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()


def scatter(policy: PreTrainedModel) -> None:
    for module in _parts(policy):
        module.set_reshard_after_forward(module is not policy, recurse=False)
        module.reshard()


@contextmanager
def as_shards(policy: PreTrainedModel) -> Iterator[None]:
    """Inside, each rank has only its shard of the weights, as a step's gradient and the optimizer need them.

    Afterwards the weights have their form between updates again. After an error they are left as they are, because
    other ranks may not be there to gather them.
    """
    if not is_sharded(policy):
        yield
        return
    scatter(policy)
    yield
    gather_for_sampling(policy)


def gather_for_sampling(policy: PreTrainedModel) -> None:
    """Bring the weights into their form between updates: whole for a generator in this process, else shards."""
    if is_sharded(policy):
        (gather if getattr(policy, _WHOLE, True) else scatter)(policy)


def is_scattered(policy: torch.nn.Module) -> bool:
    """Return whether this rank has only a shard of the weights, so that every layer's forward pass needs all ranks."""
    return any(hasattr(weight, "full_tensor") for weight in policy.parameters())


def tied_again(module: torch.nn.Module, state: dict[str, T]) -> dict[str, T]:
    """Give the names of a tied weight one tensor again, because gathering shards makes a tensor for each name."""
    first: dict[int, str] = {}
    same = {
        name: first.setdefault(id(weight), name) for name, weight in module.named_parameters(remove_duplicate=False)
    }
    return {name: state[same.get(name, name)] for name in state}


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, gathered if it is a shard; then all ranks call it."""
    full: Any = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def _parts(policy: torch.nn.Module) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]
