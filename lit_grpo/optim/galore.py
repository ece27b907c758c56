"""GaLore: AdamW whose moments are kept in a low-rank space of the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class GaLoreAdamW(torch.optim.Optimizer):
    """AdamW on projected gradients (GaLore, arXiv 2403.03507, algorithm 2), all weights trained.

    The gradient of a matrix, say ``m x n`` with ``m >= n``, is projected on its first ``rank`` right singular vectors.
    The two moments are of shape ``m x rank``, and the update is projected back. Weights that are no matrices or have a
    side of at most ``rank``, and those of :meth:`leave_whole`, are updated as ``torch.optim.AdamW`` does. All state is
    tensors and numbers, which a checkpoint holds as they are (the package galore-torch keeps Python objects there).

    Args:
        params: The weights.
        lr: The learning rate.
        betas: Decay of the running means of gradient and squared gradient.
        eps: Added to the root of the second.
        weight_decay: Decoupled, as in AdamW.
        rank: Of the space that moments are kept in.
        update_every: Steps after which the space is found anew, from the gradient of that step.
        scale: Factor on the update of a projected matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        rank: int = 128,
        update_every: int = 200,
        scale: float = 0.25,
    ) -> None:
        for name, value in (("rank", rank), ("update_every", update_every)):
            if value < 1:
                raise ValueError(f"optimizer.{name} must be at least 1, not {value}.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.rank, self.update_every, self.scale = rank, update_every, scale
        self._whole: set[int] = set()
        if any(hasattr(weight, "full_tensor") for group in self.param_groups for weight in group["params"]):
            raise ValueError(
                "GaLoreAdamW projects whole gradients, of which trainer.strategy fsdp2 leaves shards on ranks; take "
                "torch.optim.AdamW, or ddp."
            )

    def leave_whole(self, weights: Iterable[torch.Tensor]) -> None:
        """Do not project these, such as embeddings: most of their rows have no gradient of their own in a step."""
        self._whole = {id(weight) for weight in weights}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every weight that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group, self.state[weight])
        return loss

    def _update(self, weight: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        step, gradient = state.get("step", 0), weight.grad
        assert gradient is not None
        is_projected = weight.ndim == 2 and min(weight.shape) > self.rank and id(weight) not in self._whole
        if is_projected:
            if step % self.update_every == 0:
                state["basis"] = _basis(gradient, self.rank)
            gradient = _project(gradient, state["basis"])
        if step == 0:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["step"] = step + 1
        update, scale = _adam(gradient, state, group), 1.0
        if is_projected:
            update, scale = _project_back(update, state["basis"]), self.scale
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * scale)


def _adam(gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
    (beta1, beta2), step = group["betas"], state["step"]
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    return (mean / (1 - beta1**step)).div_(root)


def _basis(gradient: torch.Tensor, rank: int) -> torch.Tensor:
    """Singular vectors of the smaller side, as columns: shape ``min(m, n) x rank``."""
    left, _, right = torch.linalg.svd(gradient.float(), full_matrices=False)
    vectors = right.mT if _is_tall(gradient) else left
    return vectors[:, :rank].to(gradient.dtype, copy=True, memory_format=torch.contiguous_format)


def _is_tall(matrix: torch.Tensor) -> bool:
    return matrix.shape[0] >= matrix.shape[1]


def _project(gradient: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    return gradient @ basis if _is_tall(gradient) else basis.mT @ gradient


def _project_back(update: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Undo :func:`_project`; a projection of a tall matrix has ``rank`` columns, and more rows than that."""
    return update @ basis.mT if _is_tall(update) else basis @ update
