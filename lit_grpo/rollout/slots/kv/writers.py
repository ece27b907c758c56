"""Writing whole sequences to the shelves that decoding reads, with attention to what is written there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lit_grpo.rollout.slots.attention import AttentionInputs
from lit_grpo.rollout.slots.forward import causal_attention
from lit_grpo.rollout.slots.kv.shelves import KVShape, Shelf


@dataclass(frozen=True)
class Stretch:
    """The first ``num_tokens`` tokens of neighbouring entries of a shelf, an entry a row."""

    shelf: Shelf
    entries: range
    num_tokens: int

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, shape (entries, KV heads, num_tokens, head size), no copy."""
        where = slice(self.entries.start, self.entries.stop), slice(None), slice(self.num_tokens)
        return self.shelf.keys[layer][where], self.shelf.values[layer][where]

    def rows(self, entry: int) -> list[torch.Tensor]:
        """The keys of all layers of one of the entries, then the values, shape (KV heads, num_tokens, head size)."""
        where = self.entries[entry]
        return [tensor[where, :, : self.num_tokens] for tensor in (*self.shelf.keys, *self.shelf.values)]


class ShelfWriter:
    """Takes the keys and values of prompts or of completions, some tokens after others, and attends to all so far.

    Where they lie on several shelves, what attention reads is put together for one layer at a time.

    Args:
        pieces: Where they are to stand, one stretch after another; what is after a row's own tokens is not read.
        before: What stands before them: the prompt that the completions share.
        written: How many tokens of each row are there already.
    """

    def __init__(self, pieces: Sequence[Stretch], before: Sequence[Stretch] = (), written: int = 0) -> None:
        self._pieces, self._before = pieces, before
        self._begin = self._end = written

    @property
    def shape(self) -> KVShape:
        """What keys and values look like."""
        return self._pieces[0].shelf.shape

    def attend(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Write the new keys and values, and attend over what is before them and all so far."""
        if layer == 0:
            self._begin, self._end = self._end, self._end + inputs.key.shape[2]
        start = 0
        for piece in self._pieces:
            first, last = max(self._begin, start), min(self._end, start + piece.num_tokens)
            if first < last:
                for kept, new in zip(piece.layer(layer), (inputs.key, inputs.value), strict=True):
                    kept[:, :, first - start : last - start] = new[:, :, first - self._begin : last - self._begin]
            start += piece.num_tokens
        num_tokens = sum(part.num_tokens for part in self._before) + self._end
        parts = zip(*(part.layer(layer) for part in (*self._before, *self._pieces)), strict=True)
        rows = len(inputs.key)
        key, value = (
            each[0] if len(each) == 1 else torch.cat([part.expand(rows, -1, -1, -1) for part in each], 2)
            for each in parts
        )
        return causal_attention(inputs, key[:, :, :num_tokens], value[:, :, :num_tokens])
