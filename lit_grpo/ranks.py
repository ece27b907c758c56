"""Sums, maxima and lists over the ranks of a run."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")


class Ranks:
    """Reductions that every rank must call alike; with one rank they return what they are given.

    Args:
        trainer: A Lightning trainer.
        device: Where numbers are reduced.
    """

    def __init__(self, trainer: Any, device: torch.device | str) -> None:
        self.trainer, self.device = trainer, device

    @property
    def size(self) -> int:
        """How many there are."""
        return self.trainer.world_size

    @property
    def own(self) -> int:
        """The number of this one."""
        return self.trainer.global_rank

    def sum(self, value: float | torch.Tensor) -> torch.Tensor:
        """Add up, in float64."""
        return self._reduce(value, "sum")

    def max(self, value: float | torch.Tensor) -> torch.Tensor:
        """Take the maximum, in float64."""
        return self._reduce(value, "max")

    def gather(self, value: T) -> list[T]:
        """Return what each rank gives, in their order; any object that can be pickled."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return cast("list[T]", values)

    def _reduce(self, value: float | torch.Tensor, operation: str) -> torch.Tensor:
        tensor = torch.as_tensor(value, dtype=torch.float64, device=self.device)
        return cast(torch.Tensor, self.trainer.strategy.reduce(tensor, reduce_op=operation))
