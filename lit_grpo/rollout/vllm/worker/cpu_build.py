"""Additions that a reload needs to ``reload_weights`` of vLLM 0.32; most of them only on CPUs.

On a CPU vLLM computes with packed copies of weights, and two of its reloads leave a packed copy stale:

- A head that is tied to the embeddings gets no weight of its own in a reload, so it goes on with the old packed one.
- Experts are packed by the first load alone. After a reload their kernel would read plain weights as packed ones.

On any device, a layer by layer reload asks for the name of each function that loads a tensor, and MiniMax M2's is a
``functools.partial``, which has none.

On a CPU vLLM verifies drafts with temperatures, ``top_k`` and ``top_p`` from memory that nobody has written: its kernel
that repeats a row's value for each drafted token writes into a copy.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def prepare_reload(model: Any) -> None:
    """Prepare a model of vLLM for a reload; a second call changes nothing more."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial) and not hasattr(loader, "__name__"):
            setattr(loader, "__name__", "partial")  # noqa: B010
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if hasattr(experts, "process_weights_after_loading") and not hasattr(method, "processed_as_it_was"):
            method.processed_as_it_was = method.process_weights_after_loading
            method.process_weights_after_loading = partial(_process_and_pack, method)


def pack_tied_head(model: Any) -> None:
    """Pack the new weight of a head that is tied to the embeddings, after a reload on a CPU."""
    if next(model.parameters()).device.type == "cpu":
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def _process_and_pack(method: Any, layer: Any) -> None:
    """Process a layer's weights as vLLM does, and pack its experts if that has not packed them."""
    kernel = method.moe_kernel
    pack, packed = kernel.fused_experts.process_weights_after_loading, list[Any]()
    kernel.fused_experts.process_weights_after_loading = lambda layer: (packed.append(layer), pack(layer))
    try:
        method.processed_as_it_was(layer)
    finally:
        del kernel.fused_experts.process_weights_after_loading
    if method.moe_kernel is kernel and not packed and next(layer.parameters()).device.type == "cpu":
        pack(layer)


def mend_verification() -> None:
    """Let vLLM repeat the values of rows for drafted tokens with torch, before the first draft is verified."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = _expanded  # pyrefly: ignore[bad-assignment]


def _expanded(
    values_B: torch.Tensor, ends_B: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each row's value for its drafted tokens, which end at ``ends_B``; one value is replaced by another."""
    counts_B = ends_B.diff(prepend=ends_B.new_zeros(1))
    return values_B.masked_fill(values_B == replace_from, replace_to).repeat_interleave(
        counts_B, output_size=num_tokens
    )
