"""The frozen weights under adapters: a checkpoint leaves them out and keeps a fingerprint of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import safe_open

from lit_grpo.policy.hub import weight_files
from lit_grpo.policy.loading import LoadedPolicy, adapter_folder
from lit_grpo.policy.named import resolve_policy
from lit_grpo.policy.weights import digest, persistent_buffers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


def without_frozen(module: torch.nn.Module, state_dict: Mapping[str, T]) -> dict[str, T]:
    frozen = {name for name, weight in module.named_parameters(remove_duplicate=False) if not weight.requires_grad}
    return {name: value for name, value in state_dict.items() if name not in frozen}


def fingerprint(policy: PreTrainedModel, source: str | LoadedPolicy) -> str:
    """Return a hash of the names, shapes, dtypes and content of a policy's weights, the same on every machine.

    The policy is as it was loaded from ``source``: whole, with the adapter that it came with. Machines may quantize to
    four bits differently. So weights in four bits count by name and shape, and by the content of the files that they
    were loaded from, if the policy was given by name.
    """
    hashed, has_packed = blake2b(digest_size=16), False
    for name, weight in (*policy.named_parameters(), *persistent_buffers(policy)):
        state: Any = getattr(weight, "quant_state", None)
        has_packed = has_packed or state is not None
        hashed.update(f"{name} {digest(weight) if state is None else tuple(state.shape)}\n".encode())
    if has_packed and isinstance(source, str):
        adapter = adapter_folder(source)
        files = resolve_policy(source) if adapter is None else adapter.base
        hashed.update("\n".join(sorted(_in_files(files))).encode())
    return hashed.hexdigest()


def _in_files(name: str) -> Iterator[str]:
    for path in weight_files(name):
        with safe_open(path, "pt") as file:
            yield from (f"{key} {digest(file.get_tensor(key))}" for key in file.keys())  # noqa: SIM118 (no mapping)


def recorded_name(source: str | LoadedPolicy, is_adapter: bool) -> str:
    """Return a policy's name in a checkpoint; of a given model with an adapter, which names its base alone, nothing."""
    if isinstance(source, str):
        return source
    return "" if is_adapter else source[0].name_or_path or ""


def check_base(checkpoint: Mapping[str, Any], own: str | None, name: str, dtype: str) -> None:
    """Refuse a checkpoint whose adapters were trained on other frozen weights than this policy's.

    ``own`` is the fingerprint of this policy, None without adapters; ``name`` and ``dtype`` are told in the message.
    """
    if own is None or checkpoint.get("base", own) == own:
        return
    told = checkpoint["hyper_parameters"]
    raise ValueError(
        f"The checkpoint has adapters alone, trained on policy {told['policy']!r} in {told['dtype']} as it was then, "
        f"and the frozen weights of {name!r} in {dtype} are others; let model.policy (of export: --policy), "
        "model.dtype and model.lora.base be what the run had."
    )
