"""Storage for keys and values of equal room, side by side, that grows and shrinks with what it holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVShape:
    """What the keys of one token look like, and where they live."""

    num_layers: int
    num_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_size * self.dtype.itemsize


class Shelf:
    """Entries of ``num_tokens`` tokens each. Entries in use are the first ones, without holes.

    ``keys[layer]`` and ``values[layer]`` have shape (room, KV heads, num_tokens, head size). They are separate tensors
    so that growing, which copies, needs the memory of one layer twice and not of all.

    Args:
        num_tokens: The tokens of an entry.
        shape: What the keys of a token look like.
        most_entries: Entries that there will be at most, as far as that is known; up to there it grows ahead of need.
    """

    def __init__(self, num_tokens: int, shape: KVShape, most_entries: int = 0) -> None:
        self.num_tokens = num_tokens
        self.shape = shape
        self.most_entries = most_entries
        self.num_entries = 0
        size = (0, shape.num_heads, num_tokens, shape.head_size)
        empty = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self.keys = [empty] * shape.num_layers
        self.values = [empty] * shape.num_layers

    @property
    def room(self) -> int:
        """Entries there is memory for."""
        return self.keys[0].shape[0]

    @property
    def allocated_tokens(self) -> int:
        """Tokens there is memory for."""
        return self.room * self.num_tokens

    def room_for(self, num_entries: int) -> int:
        """The room that the shelf takes to hold so many entries: what it has, or an eighth more than needed."""
        if num_entries <= self.room:
            return self.room
        return max(num_entries, min(num_entries + num_entries // 8, self.most_entries))

    def add(self, num_entries: int) -> range:
        """Take entries into use, at the end; return their numbers."""
        first, self.num_entries = self.num_entries, self.num_entries + num_entries
        self._resize(self.room_for(self.num_entries))
        return range(first, self.num_entries)

    def remove(self, entry: int) -> int:
        """Free an entry: the last one takes its place. Returns the number that the moved entry had."""
        self.num_entries -= 1
        last = self.num_entries
        if entry != last:
            for tensor in (*self.keys, *self.values):
                tensor[entry] = tensor[last]
        return last

    def trim(self, slack: bool = True) -> None:
        """Give memory back: what is more than twice what is used, or without ``slack`` all that is not used."""
        if not slack or self.room > 2 * self.num_entries + 4:
            self._resize(self.num_entries)

    def _resize(self, room: int) -> None:
        if room == self.room:
            return
        kept = min(room, self.room)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                # Zeros, because what is masked is multiplied by zero, and memory may hold NaN.
                tensors[layer] = old.new_zeros((room, *old.shape[1:]))
                tensors[layer][:kept] = old[:kept]
