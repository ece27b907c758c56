"""The logits of a linear head, a block of tokens and vocabulary at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

TOKENS_PER_BLOCK = 2048
LOGITS_PER_BLOCK = {"cpu": 2**21, "cuda": 2**25}  # 8 MiB in float32, most of which caches hold; 128 MiB


@dataclass(frozen=True)
class LogitBlocks:
    """A head applied to tokens; tensors are in the dtype that matrices are multiplied in."""

    hidden_ND: torch.Tensor
    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None
    cap: float | None
    temperature: float

    def tokens(self) -> Iterator[slice]:
        """Cut the tokens."""
        yield from _slices(len(self.hidden_ND), TOKENS_PER_BLOCK)

    def vocabulary(self) -> Iterator[slice]:
        """Cut the vocabulary so that a block has about the same size whatever V is."""
        logits = LOGITS_PER_BLOCK.get(self.hidden_ND.device.type, 2**21)
        columns = max(1, logits // max(1, min(len(self.hidden_ND), TOKENS_PER_BLOCK)))
        yield from _slices(len(self.weight_VD), columns)

    def logits(self, tokens: slice, vocabulary: slice) -> torch.Tensor:
        """Return a block, capped and divided by the temperature, in the dtype that sums are kept in."""
        bias_v = None if self.bias_V is None else self.bias_V[vocabulary]
        logits_nv = linear(self.hidden_ND[tokens], self.weight_VD[vocabulary], bias_v).to(self.exact)
        if self.cap is not None:
            logits_nv = logits_nv.div_(self.cap).tanh_().mul_(self.cap)
        return logits_nv if self.temperature == 1 else logits_nv.div_(self.temperature)

    def slope(self, logits_nv: torch.Tensor) -> torch.Tensor | float | None:
        """Return the derivative of the logits with respect to what the matrix product gives; ``None`` for 1."""
        if self.cap is None:
            return None if self.temperature == 1 else 1 / self.temperature
        return (1 - (logits_nv * (self.temperature / self.cap)).square()) / self.temperature

    @property
    def exact(self) -> torch.dtype:
        """The dtype that sums are kept in."""
        return torch.float64 if self.weight_VD.dtype == torch.float64 else torch.float32


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
