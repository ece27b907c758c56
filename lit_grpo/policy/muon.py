"""Muon, the optimizer that warm-starts the embedded policy in few steps."""

from __future__ import annotations

import math

import torch


class Muon:
    """Momentum whose update of each matrix is replaced by the nearest orthogonal one.

    Muon (K. Jordan et al., 2024), its step scaled to the size of an AdamW step (arXiv 2502.16982, eq. 4).
    It learns this task in far fewer steps than AdamW alone. All matrices of one shape go through the
    Newton-Schulz iteration at once.

    Args:
        weights: The matrices to train.
        momentum: Decay of the running mean of the gradient.
    """

    def __init__(self, weights: list[torch.Tensor], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for weight in weights:
            self.by_shape.setdefault(tuple(weight.shape), []).append(weight)
        self.means: dict[tuple[int, ...], torch.Tensor] = {}

    def step(self, learning_rate: float) -> None:
        """Update every weight from its gradient."""
        with torch.no_grad():
            for shape, weights in self.by_shape.items():
                gradient = torch.stack([weight.grad for weight in weights if weight.grad is not None])
                mean = self.means.setdefault(shape, torch.zeros_like(gradient))
                mean.lerp_(gradient, 1 - self.momentum)
                update = _orthogonal(gradient.lerp_(mean, self.momentum))
                for weight, step in zip(weights, update, strict=True):
                    weight.add_(step, alpha=-0.2 * learning_rate * math.sqrt(max(shape)))


def _orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Bring all singular values near 1 by five Newton-Schulz steps of degree five."""
    if matrices.shape[1] > matrices.shape[2]:
        return _orthogonal(matrices.mT).mT
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x
