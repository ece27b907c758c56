"""The frozen weights below adapters: checkpoints leave them out, and tell them by a fingerprint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import safe_open

from lit_grpo.policy.hub import hub_or_cache
from lit_grpo.policy.loading import Given, adapter_folder, resolve_policy
from lit_grpo.policy.weights import digest, persistent_buffers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


def without_frozen(module: torch.nn.Module, state_dict: Mapping[str, T]) -> dict[str, T]:
    """Leave out the parameters that are not trained; buffers stay."""
    frozen = {name for name, weight in module.named_parameters(remove_duplicate=False) if not weight.requires_grad}
    return {name: value for name, value in state_dict.items() if name not in frozen}


def fingerprint(policy: PreTrainedModel, source: str | Given) -> str:
    """Return what tells a policy from any other: the names, shapes, types and content of its weights, on any machine.

    Weights in four bits count by their names and shapes, for what a machine makes of them may be its own, and by the
    files that they were loaded from; a model that is given with such weights has none.

    Args:
        policy: As it was loaded, whole; with the adapter that it came with, as that was then.
        source: What it was loaded from.
    """
    of, packs = blake2b(digest_size=16), False
    for name, weight in (*policy.named_parameters(), *persistent_buffers(policy)):
        state: Any = getattr(weight, "quant_state", None)
        packs = packs or state is not None
        of.update(f"{name} {digest(weight) if state is None else tuple(state.shape)}\n".encode())
    if packs and isinstance(source, str):
        adapter = adapter_folder(source)
        files = resolve_policy(source) if adapter is None else adapter.base
        of.update("\n".join(sorted(_in_files(files))).encode())
    return of.hexdigest()


def _in_files(name: str) -> Iterator[str]:
    """The tensors of a policy's files, each with its digest."""
    for path in _files(name):
        with safe_open(path, "pt") as file:
            yield from (f"{key} {digest(file.get_tensor(key))}" for key in file.keys())  # noqa: SIM118 (no mapping)


def _files(name: str) -> list[str]:
    """Those that transformers loads a policy from."""
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    with hub_or_cache(name):
        single = cached_file(name, "model.safetensors", _raise_exceptions_for_missing_entries=False)
        if single is not None:
            return [single]
        index: Any = cached_file(name, "model.safetensors.index.json")
        files: Any = get_checkpoint_shard_files(name, index)[0]
        return files


def told_name(source: str | Given, is_adapter: bool) -> str:
    """What a checkpoint calls a policy: its name, or where a loaded model is from, which is empty where it was made.

    Args:
        source: What it was loaded from.
        is_adapter: Whether it came with an adapter, of which a loaded model does not tell where that is from.
    """
    if isinstance(source, str):
        return source
    return "" if is_adapter else source[0].name_or_path or ""  # which is its base's


def check_base(checkpoint: Mapping[str, Any], own: str | None, name: str, dtype: str) -> None:
    """Refuse adapters that were trained on other weights than those that they are to be put on.

    Args:
        checkpoint: With the fingerprint of its ``base``, where it has adapters alone.
        own: The fingerprint here; none where there are no adapters.
        name: Of the policy here.
        dtype: Of its weights.

    Raises:
        ValueError: They were.
    """
    if own is None or checkpoint.get("base", own) == own:
        return
    told = checkpoint["hyper_parameters"]
    raise ValueError(
        f"The checkpoint has adapters alone, trained on policy {told['policy']!r} in {told['dtype']} as it was then, "
        f"and the frozen weights of {name!r} in {dtype} are others; let model.policy (of export: --policy), "
        "model.dtype and model.lora.base be what the run had."
    )
