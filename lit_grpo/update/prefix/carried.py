"""Tokens that later ones see from other micro-batches: what they compute is carried from one to the next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

Index = tuple[slice, ...]


class CarriedSpan:
    """Keys, values and last hidden state of a prompt, or of a chunk of a completion, for micro-batches without it.

    They are computed once, without gradient. Micro-batches get them as leaves, and their backward passes leave the
    gradient of each here. The last micro-batch that uses the span has it in its row, adds what the others have left,
    and takes it back through the span. So a span costs one pass and a forward pass however many micro-batches there
    are, and gradients are those of one micro-batch with all that sees the span.

    Args:
        token_ids: The span's.
        before: What it follows; a prompt follows nothing.
        weight: What the others have left is multiplied by it.
    """

    def __init__(self, token_ids: Sequence[int], before: CarriedSpan | None = None, weight: float = 1.0) -> None:
        self.token_ids, self.before, self.weight = tuple(token_ids), before, weight
        self.is_known = False
        """Whether it has been through the model."""
        self._carried: dict[Hashable, _Carried] = {}

    @property
    def chain(self) -> list[CarriedSpan]:
        """All that it follows, a prompt first, and itself."""
        return [*([] if self.before is None else self.before.chain), self]

    @property
    def num_before(self) -> int:
        """Tokens that it follows."""
        return sum(len(span.token_ids) for span in self.chain[:-1])

    def keep(self, name: Hashable, tensor: torch.Tensor) -> None:
        """Note what is to be lent under a name."""
        self._carried[name] = _Carried(tensor)

    def lend(self, name: Hashable) -> torch.Tensor:
        """Return it, a leaf where gradients are computed."""
        return self._carried[name].lend()

    def settle(self, name: Hashable, tensor: torch.Tensor, place: Index) -> torch.Tensor:
        """Return a tensor that has, at ``place``, the same again with its graph; its gradient grows by those left here.

        What was kept is given up, so that a second call changes nothing, as when layers run again in the backward pass.
        """
        carried = self._carried.pop(name, None)
        gradient = None if carried is None else carried.settle()
        if gradient is None:
            return tensor
        return _AddGradient.apply(tensor, gradient * self.weight, place)  # pyright: ignore[reportReturnType]


class _Carried:
    """A tensor, and the gradient of what was computed from it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._leaf = tensor.detach(), None
        self._gradient: torch.Tensor | None = None

    def lend(self) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self._tensor
        if self._leaf is None:
            self._leaf = self._tensor.detach().requires_grad_()
            self._leaf.register_post_accumulate_grad_hook(self._add)
        return self._leaf

    def _add(self, leaf: torch.Tensor) -> None:
        """Sum up in float32 at least, however many micro-batches there are."""
        assert leaf.grad is not None
        gradient, leaf.grad = leaf.grad, None
        if self._gradient is None:
            self._gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        else:
            self._gradient += gradient

    def settle(self) -> torch.Tensor | None:
        self._leaf = None  # its hook refers to this
        return self._gradient


class _AddGradient(torch.autograd.Function):
    """The identity, whose gradient is more than what comes in."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: torch.Tensor, place: Index) -> torch.Tensor:
        ctx.gradient, ctx.place = gradient, place
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = gradients[0].clone()
        total[ctx.place] += ctx.gradient
        return total, None, None
