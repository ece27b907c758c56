"""What a layer of a Llama-like decoder computes, as plain operations on its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm

Operation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayerOperations:
    """The operations of one layer. ``scaling`` and ``window`` are what it hands to its attention."""

    attention_norm: Operation
    query: Operation
    key: Operation
    value: Operation
    head_norm: Operation
    output: Operation
    mlp_norm: Operation
    gate: Operation
    up: Operation
    activation: Operation
    down: Operation
    scaling: float
    window: int | None


def layer_operations(layer: Any, scaling: float, window: int | None) -> LayerOperations:
    """Take a layer apart.

    Args:
        layer: Of the decoder.
        scaling: What it multiplies its attention scores by.
        window: How many tokens back it sees.

    Raises:
        AttributeError: It is not built like Llama's.
        ValueError: It is, but with something in it that this does not know.
    """
    attention, mlp = layer.self_attn, layer.mlp
    known = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if unknown := {name for name, _ in layer.named_children()} - known:
        raise ValueError(f"layers with {sorted(unknown)}")
    return LayerOperations(
        attention_norm=norm_operation(layer.input_layernorm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        head_norm=_head_norm(attention) if hasattr(attention, "q_norm") else _same,
        output=_linear(attention.o_proj),
        mlp_norm=norm_operation(layer.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        activation=mlp.act_fn,
        down=_linear(mlp.down_proj),
        scaling=scaling,
        window=window,
    )


def _linear(module: Any) -> Operation:
    """A plain linear layer without the module's call; anything else (an adapter, say) is called."""
    if type(module) is not torch.nn.Linear:
        return module
    return lambda hidden: linear(hidden, module.weight, module.bias)


def _head_norm(attention: Any) -> Operation:
    """The norms of query and key heads, which have a weight each."""
    eps = _epsilon(attention.q_norm)
    query_weight, key_weight = attention.q_norm.weight, attention.k_norm.weight
    num_queries = attention.q_proj.out_features // attention.head_dim
    num_keys = attention.k_proj.out_features // attention.head_dim
    if eps != _epsilon(attention.k_norm) or query_weight.shape != (attention.head_dim,):
        raise ValueError("norms of query and key heads that differ, or go over all heads")

    def head_norm(heads: torch.Tensor) -> torch.Tensor:
        weights = torch.cat([query_weight.expand(num_queries, -1), key_weight.expand(num_keys, -1)])
        return rms_norm(heads, query_weight.shape, None, eps).mul_(weights)

    return head_norm


def norm_operation(module: Any) -> Operation:
    """Return an RMS norm as one operation; ``ValueError`` for any other norm."""
    eps = _epsilon(module)
    return lambda hidden: rms_norm(hidden, module.weight.shape, module.weight, eps)


def _epsilon(module: Any) -> float:
    """The epsilon of an RMS norm, which is tried on a few numbers first."""
    weight, eps = module.weight, getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight.dim() != 1 or not isinstance(eps, float):
        raise ValueError(f"norms of type {type(module).__name__}")
    size = weight.shape
    numbers = torch.linspace(-3, 3, 3 * size[0], dtype=weight.dtype, device=weight.device).reshape(3, -1)
    with torch.no_grad():
        if not torch.allclose(module(numbers), rms_norm(numbers, size, weight, eps), rtol=1e-2, atol=1e-5):
            raise ValueError(f"norms of type {type(module).__name__}")
    return eps


def _same(hidden: torch.Tensor) -> torch.Tensor:
    return hidden
