"""Muon for the matrices of a policy's layers, and AdamW for all other weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lit_grpo.limits import Positive, checks_arguments


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for matrices and torch's AdamW for embeddings, head, norms and biases, as one optimizer.

    Muon replaces the momentum of a matrix by the nearest matrix with orthonormal rows or columns (Newton-Schulz
    iteration in bfloat16) and keeps one moment per weight, AdamW two. A step is scaled by ``0.2 sqrt(max(rows,
    columns))``, so that its mean square is about that of a step of AdamW at the same rate (arXiv 2502.16982)::

        optimizer: {class_path: MuonAdamW, init_args: {lr: 3.0e-6, adamw_lr: 1.0e-6}}

    Both parts have the groups' ``lr``, which schedules change; AdamW multiplies it by ``adamw_lr / lr``.

    Args:
        params: The weights, as :class:`lit_grpo.policy.weights.TrainedWeights`, which tells embeddings from matrices.
        lr: Learning rate of Muon.
        adamw_lr: Learning rate of AdamW; by default ``lr``.
        momentum: Momentum of Muon, which is Nesterov's.
        betas: Coefficients of AdamW's two moments.
        eps: Term that AdamW adds to the denominator.
        weight_decay: Weight decay of both parts.

    Raises:
        ValueError: ``params`` does not say which matrices are embeddings, or weights are shards (fsdp2), or a rate is
            not positive.
    """

    @checks_arguments()
    def __init__(
        self,
        params: Any,
        lr: Positive = 1e-6,
        adamw_lr: Positive | None = None,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not hasattr(params, "tables"):
            raise ValueError(
                "MuonAdamW is not told which weights are embeddings; give it lit_grpo.policy.weights.TrainedWeights("
                "policy) in place of policy.parameters()."
            )
        if any(hasattr(weight, "_local_tensor") for weight in params):  # of a DTensor
            raise ValueError("it needs whole matrices, and trainer.strategy fsdp2 keeps shards of them; use ddp")
        self.adamw_lr = lr if adamw_lr is None else adamw_lr
        tables = {id(weight) for weight in params.tables}
        matrices = [weight for weight in params if weight.ndim == 2 and id(weight) not in tables]
        others = [weight for weight in params if weight.ndim != 2 or id(weight) in tables]
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        if matrices:
            muon = torch.optim.Muon(matrices, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw")
            self._parts.append((muon, 1.0))
        if others:  # foreach would take as much memory as these weights
            adamw = torch.optim.AdamW(others, lr, betas, eps, weight_decay, foreach=False)
            self._parts.append((adamw, self.adamw_lr / lr))
        super().__init__([group for part, _ in self._parts for group in part.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both parts, whose states and settings are this optimizer's own."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for (part, factor), group in zip(self._parts, self.param_groups, strict=True):
            part.state, part.param_groups = self.state, [{**group, "lr": factor * group["lr"]}]
            part.step()
        return loss
