"""What the kernels between the products of a layer compute, in plain torch on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class PlainKernels:
    """Stands in for ``LayerKernels``; ``launched``, if given, is called with each computation and its arguments."""

    def __init__(self, launched: Callable[..., Any] | None = None) -> None:
        self._launched = launched or (lambda compute, *arguments: compute(*arguments))

    def add_and_norm(self, *arguments: Any) -> Any:
        return self._launched(_add_and_norm, *arguments)

    def norm_and_rotate(self, query: Any, key: Any, norms: Any, tables: Any, positions: Any, dtype: Any) -> Any:
        return self._launched(_norm_and_rotate, query, key, norms, *tables, positions, dtype)

    def silu_and_multiply(self, gate: torch.Tensor, up: torch.Tensor) -> Any:
        return self._launched(_silu_and_multiply, gate, up)


def _normed(number: torch.Tensor, eps: float) -> torch.Tensor:
    return number * (number.square().mean(-1, keepdim=True) + eps).rsqrt()


def _add_and_norm(hidden: Any, added: Any, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> Any:
    total = hidden if added is None else hidden + added
    return total, (_normed(total.float(), eps) * weight.float()).to(dtype)


def _norm_and_rotate(query: Any, key: Any, weights: Any, cosine: Any, sine: Any, positions: Any, dtype: Any) -> Any:
    size, parts = cosine.shape[1], []
    for index, flat in enumerate((query, key)):
        heads = flat.float().unflatten(-1, (-1, size))
        if weights is not None:
            heads = _normed(heads, weights[2]).to(flat.dtype).float() * weights[index].float()
        turned = torch.cat(heads.chunk(2, -1)[::-1], -1)
        parts.append(heads * cosine[positions, None].float() + turned * sine[positions, None].float())
    return torch.cat(parts, 1).to(dtype)


def _silu_and_multiply(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up
