"""A learning rate that rises, and then falls or stays."""

from __future__ import annotations

import math
from typing import Literal

import torch

from lit_grpo.limits import Count, checks_arguments


class WarmupDecayLR(torch.optim.lr_scheduler.LRScheduler):
    """Rise linearly from 0 over ``warmup_steps``, then follow ``shape`` down to 0 at ``total_steps``.

    The factors are those of transformers' ``get_linear_schedule_with_warmup`` and its sisters. With ``decay_steps`` the
    rate stays at its height in between (warmup, stable, decay: MiniCPM, arXiv 2404.06395), as in ``get_wsd_schedule``::

        lr_scheduler:
          class_path: WarmupDecayLR
          init_args: {total_steps: 1000, warmup_steps: 20, decay_steps: 100}

    Args:
        optimizer: Optimizer whose learning rate is set.
        total_steps: Optimizer steps of the run.
        warmup_steps: Number of these steps in which the rate rises; with any, the first step has a learning rate of 0.
        shape: Shape of the decay: ``linear``, ``cosine`` (half a period) or ``constant``.
        decay_steps: Number of steps of the decay at the end; by default all steps after the warmup. MiniCPM uses a
            tenth of the run.
        last_epoch: Number of steps made, less one.

    Raises:
        ValueError: Rise and fall are longer than the run, or there is no such shape, or none that falls.
    """

    @checks_arguments()
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        shape: Literal["linear", "cosine", "constant"] = "linear",
        last_epoch: int = -1,
        decay_steps: Count | None = None,
    ) -> None:
        if not 0 <= warmup_steps <= total_steps or total_steps < 1:
            raise ValueError(
                f"warmup_steps is {warmup_steps} and total_steps {total_steps}; the rise is a part of these."
            )
        most = total_steps - warmup_steps
        if decay_steps is not None and (decay_steps > most or shape == "constant"):
            raise ValueError(
                f"decay_steps is {decay_steps}, with {most} steps after the warm-up and shape {shape}; give at most "
                f"{most}, with shape linear or cosine, or leave decay_steps out."
            )
        self.total_steps, self.warmup_steps, self.shape = total_steps, warmup_steps, shape
        self.decay_steps = most if decay_steps is None else decay_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        done = min(1.0, max(0, step - self.total_steps + self.decay_steps) / max(1, self.decay_steps))
        return 1 - done if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * done))
