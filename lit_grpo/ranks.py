"""Sums, maxima and lists over the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import distributed

from lit_grpo.process.terminal import warn

T = TypeVar("T")
Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Reduces a float64 tensor over ranks; every rank must call it, with as many elements."""


class Ranks:
    """Reductions that every rank must call alike; with one rank they return what they are given.

    Sums and maxima are in float64, which not every device has: they lie on the host, but for ranks that talk on GPUs.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._exchange = torch.device(device) if torch.device(device).type == "cuda" else torch.device("cpu")

    @property
    def size(self) -> int:
        return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1

    @property
    def rank(self) -> int:
        return distributed.get_rank() if self.size > 1 else 0

    def sum(self, value: float | torch.Tensor) -> torch.Tensor:
        return self._reduce(value, "SUM")

    def max(self, value: float | torch.Tensor) -> torch.Tensor:
        return self._reduce(value, "MAX")

    def gather(self, value: T) -> list[T]:
        """Return what each rank gives, in their order; any object that can be pickled."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        distributed.all_gather_object(values, value)
        return cast("list[T]", values)

    def together(self, do: Callable[[], T]) -> T:
        """Return what ``do`` does here; where it fails on one rank it fails on all.

        Raises:
            ValueError: It raised one on a rank, here or elsewhere; the message then begins with that rank.
        """
        try:
            done, failure = do(), None
        except ValueError as error:
            done, failure = None, error
        if failure is None and self.size == 1:
            return cast(T, done)
        failures = self.gather(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, elsewhere in enumerate(failures):
            if elsewhere is not None:
                raise ValueError(f"On rank {rank}: {elsewhere}")
        return cast(T, done)

    def warn(self, message: str) -> None:
        if self.rank == 0:
            warn(message, stacklevel=3)

    def _reduce(self, value: float | torch.Tensor, operation: str) -> torch.Tensor:
        on_host = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        reduced = on_host.to(torch.float64, copy=True)
        if self.size > 1:
            reduced = reduced.to(self._exchange)
            distributed.all_reduce(reduced, getattr(distributed.ReduceOp, operation))
        return reduced
