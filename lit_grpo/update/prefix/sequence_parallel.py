"""One row through the policy on several ranks, each with a part of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from lit_grpo.policy.architecture.decoder import hidden_states
from lit_grpo.policy.architecture.states import state_layers
from lit_grpo.policy.sharding import class_of
from lit_grpo.update.batches.layout import PackedRow, in_order


class SequenceParallel:
    """Ranks that share the tokens of a row (DeepSpeed-Ulysses, arXiv 2309.14509).

    Through the policy's layers a rank takes neighboring tokens of the row, all equally many; in attention it has all
    tokens, of its part of the heads. The last hidden states come together again, and of the predicted tokens each rank
    takes a part through the head. Rows of all of these ranks go through one after another: each is of one rank, the
    owner, whose loss it counts in, and the others give their part of its gradient. A rank that shares with no other
    (size 1) calls :meth:`in_turn` alone.

    Args:
        size: How many ranks share a row; neighbors, so that the run's ranks are a multiple of it.
    """

    def __init__(self, size: int = 1) -> None:
        self.size = size
        group: Any = None if size == 1 else distributed.new_subgroups(size)[0]
        self._group, self.rank = group, 0 if size == 1 else distributed.get_rank(group)

    @classmethod
    def of(cls, policy: Any, size: int, shares_prefix: bool) -> SequenceParallel:
        """Return the ranks that share rows with this one.

        Raises:
            ValueError: The policy's rows cannot be packed, its heads cannot be spread over so many, or its layers have
                recurrent states.
        """
        if size == 1:
            return cls(1)
        if not shares_prefix:
            raise ValueError(f"model.sequence_parallel_size {size} needs packed rows, which this policy cannot have.")
        if state_layers(policy):
            raise ValueError(
                f"model.sequence_parallel_size is {size}, but layers of {class_of(policy).__name__} have recurrent "
                "states, for which a rank needs all tokens before its own; take 1."
            )
        config = policy.config.get_text_config()
        counts = {name: value for name, value in config.to_dict().items() if name.endswith("key_value_heads") and value}
        for heads in counts.values() or [config.num_attention_heads]:  # layers of several types have several of them
            if heads % size:
                raise ValueError(
                    f"model.sequence_parallel_size is {size}, which does not divide the policy's {heads} heads of keys "
                    "and values; take a divisor."
                )
        return cls(size)

    def in_turn(self, own: Sequence[PackedRow]) -> Iterator[tuple[int, PackedRow]]:
        """Go through rows of each of these ranks, equally many, by turns, with the number of the one that has it."""
        of_all: list[Any] = [own]
        if self.size > 1:
            of_all = [None] * self.size
            distributed.all_gather_object(of_all, own, self._group)
        for turn in zip(*map(in_order, of_all), strict=True):
            yield from enumerate(turn)

    def hidden_states(
        self, model: Any, input_ids_BT: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Return the last hidden states (B, T, D) of rows, of which each rank takes its part through the layers."""
        ids, positions = self.own_part(input_ids_BT, 1), self.own_part(position_ids, 1)
        part_BtD = hidden_states(model, ids, position_ids=positions, **kwargs)
        whole_BTD: Any = _Join.apply(part_BtD, self._group)
        return whole_BTD[:, : input_ids_BT.shape[1]]

    def to_heads(self, num_tokens: int, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Make of this rank's tokens of all heads all ``num_tokens`` of its heads, shape (1, heads, T, head size)."""
        whole: Any = _ToHeads.apply(self._group, *parts)
        return tuple(each[:, :, :num_tokens] for each in whole)

    def to_tokens(self, heads: torch.Tensor) -> torch.Tensor:
        """Make this rank's tokens of all heads of all tokens of its heads."""
        tokens: Any = _ToTokens.apply(self._group, self._padded(heads, 2))
        return tokens

    def own_part(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's part along an axis; the last ones are filled up with zeros."""
        return self._padded(tensor, dim).chunk(self.size, dim)[self.rank]

    def join(self, owner: int, part: torch.Tensor, length: int) -> torch.Tensor:
        """Put all parts along the first axis together, up to ``length``; the gradient is the owner's."""
        whole: Any = _JoinForOwner.apply(part, self._group, owner)
        return whole[:length]

    def _padded(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Fill up with zeros to a multiple of the ranks, one at least for each."""
        missing = max(-tensor.shape[dim] % self.size, self.size - tensor.shape[dim])
        later_axes = [0, 0] * (tensor.ndim - 1 - dim)
        return functional.pad(tensor, [*later_axes, 0, missing]) if missing else tensor


SINGLE_RANK = SequenceParallel()
"""A rank that takes whole rows."""


def _exchanged(group: Any, parts: torch.Tensor) -> torch.Tensor:
    """Send the n-th part to the n-th rank; return what all have sent here, in their order."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    distributed.all_to_all_single(received, parts.contiguous(), group=group)
    return received


def _tokens_to_heads(group: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Shape (1, heads, tokens of a rank, size) to (1, heads of a rank, tokens, size)."""
    ranks, (_, heads, length, size) = distributed.get_world_size(group), tokens.shape
    received = _exchanged(group, tokens.view(ranks, heads // ranks, length, size))
    return received.transpose(0, 1).reshape(1, heads // ranks, ranks * length, size)


def _heads_to_tokens(group: Any, heads: torch.Tensor) -> torch.Tensor:
    ranks, (_, own, length, size) = distributed.get_world_size(group), heads.shape
    received = _exchanged(group, heads.reshape(own, ranks, length // ranks, size).transpose(0, 1))
    return received.view(1, ranks * own, length // ranks, size)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, *tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(_tokens_to_heads(group, each.contiguous()) for each in tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(_heads_to_tokens(ctx.group, each) for each in gradients)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, heads: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return _heads_to_tokens(group, heads)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, _tokens_to_heads(ctx.group, gradients[0].contiguous())


class _Join(torch.autograd.Function):
    """Puts parts along the second axis together, on all ranks; sums up what all make of its gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, part.contiguous(), group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        size = distributed.get_world_size(ctx.group)
        parts = torch.cat(gradients[0].chunk(size, 1))
        own = parts.new_empty((len(parts) // size, *parts.shape[1:]))
        distributed.reduce_scatter_tensor(own, parts, group=ctx.group)
        return own, None


class _JoinForOwner(torch.autograd.Function):
    """Puts parts along the first axis together, on all ranks; takes the gradient that their owner has."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any, owner: int) -> torch.Tensor:
        ctx.group, ctx.owner = group, distributed.get_global_rank(group, owner)
        parts = [torch.empty_like(part) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, part.contiguous(), group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole = gradients[0].clone(memory_format=torch.contiguous_format)
        distributed.broadcast(whole, ctx.owner, ctx.group)
        size = distributed.get_world_size(ctx.group)
        return whole.chunk(size)[distributed.get_rank(ctx.group)], None, None
