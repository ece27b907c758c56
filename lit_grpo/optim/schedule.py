"""A learning rate that rises, and then falls or stays."""

from __future__ import annotations

import math
from typing import Literal

import torch

from lit_grpo.limits import checks_arguments


class WarmupDecayLR(torch.optim.lr_scheduler.LRScheduler):
    """Rise linearly from 0 over ``warmup_steps``, then follow ``shape`` down to 0 at ``total_steps``.

    The factors are those of transformers' ``get_linear_schedule_with_warmup`` and its sisters.

    Args:
        optimizer: Whose learning rate it sets.
        total_steps: Optimizer steps of the run.
        warmup_steps: Of these how many the rise takes; with any, the first step is made with a learning rate of 0.
        shape: ``linear``, ``cosine`` (half a period) or ``constant``.
        last_epoch: Steps made, less one.

    Raises:
        ValueError: The rise is longer than the run, or there is no such shape.
    """

    @checks_arguments()
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        shape: Literal["linear", "cosine", "constant"] = "linear",
        last_epoch: int = -1,
    ) -> None:
        if not 0 <= warmup_steps <= total_steps or total_steps < 1:
            raise ValueError(
                f"warmup_steps is {warmup_steps} and total_steps {total_steps}; the rise is a part of these."
            )
        self.total_steps, self.warmup_steps, self.shape = total_steps, warmup_steps, shape
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The learning rates of this step."""
        return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by at a step."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return 1 - done if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * done))
