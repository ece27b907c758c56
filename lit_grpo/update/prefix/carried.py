"""Tokens that later ones see from other micro-batches: what they compute is carried from one to the next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch

from lit_grpo.types import Pictures

Index = tuple[slice, ...]


class CarriedSpan:
    """Keys, values and last hidden state of a prompt, or of a chunk of a completion, for micro-batches without it.

    They are computed once, without gradient. Micro-batches get them as leaves, and their backward passes leave the
    gradient of each here. The last micro-batch that uses the span has it in its row, adds what the others have left,
    and takes it back through the span. So a span costs one pass and a forward pass however many micro-batches there
    are, and gradients are those of one micro-batch with all that sees the span.

    Args:
        token_ids: Token ids of the prompt or chunk.
        before: What it follows; a prompt follows nothing.
        weight: What the others have left is multiplied by it.
        pictures: The images of a prompt.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        before: CarriedSpan | None = None,
        weight: float = 1.0,
        pictures: Pictures | None = None,
    ) -> None:
        self.token_ids, self.before, self.weight = tuple(token_ids), before, weight
        self.num_before = 0 if before is None else before.end
        """Tokens that it follows."""
        self.pictures = pictures
        self.shift: int = (0 if pictures is None else pictures.shift) if before is None else before.shift
        """How much lower than its place the position of a token after the prompt is."""
        self.end = self.num_before + len(self.token_ids)
        """The position after its last token."""
        self.is_known = False
        """Whether it has been through the model."""
        self._carried: dict[Hashable, torch.Tensor] = {}
        self._gradients: dict[Hashable, torch.Tensor] = {}

    @property
    def chain(self) -> list[CarriedSpan]:
        """All that it follows, a prompt first, and itself."""
        return [*([] if self.before is None else self.before.chain), self]

    def keep(self, name: Hashable, tensor: torch.Tensor) -> None:
        self._carried[name] = tensor.detach()

    def lend(self, name: Hashable) -> torch.Tensor:
        """Return it, a leaf where gradients are computed."""
        if torch.is_grad_enabled() and not self._carried[name].requires_grad:
            leaf = self._carried[name] = self._carried[name].detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(self._add_gradient, name))
        return self._carried[name]

    def _add_gradient(self, name: Hashable, leaf: torch.Tensor) -> None:
        """Sum up in float32 at least, however many micro-batches there are."""
        assert leaf.grad is not None
        gradient, leaf.grad = leaf.grad, None
        if name in self._gradients:
            self._gradients[name] += gradient
        else:
            self._gradients[name] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    def settle(self, name: Hashable, tensor: torch.Tensor, place: Index) -> torch.Tensor:
        """Return a tensor that has, at ``place``, the same again with its graph; its gradient grows by those left here.

        What was kept is given up, so that a second call changes nothing, as when layers run again in the backward pass.
        """
        self._carried.pop(name, None)
        gradient = self._gradients.pop(name, None)
        if gradient is None:
            return tensor
        return _AddGradient.apply(tensor, gradient * self.weight, place)

    def forget(self) -> None:
        """Give up all that is kept: no micro-batch of this pass needs it any more."""
        self.is_known = False
        self._carried.clear()
        self._gradients.clear()


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
