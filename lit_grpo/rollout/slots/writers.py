"""Writing whole sequences to the shelves that decoding reads, with attention to what is written there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lit_grpo.rollout.slots.attention import AttentionInputs
from lit_grpo.rollout.slots.forward import causal_attention
from lit_grpo.rollout.slots.shelves import Shelf


class PromptWriter:
    """Takes the keys and values of prompts, piece after piece, and attends to them where they are kept.

    Args:
        shelf: Where the prompts are kept.
        entries: Their entries there, one a row; what stands behind a prompt's own tokens is not read.
    """

    def __init__(self, shelf: Shelf, entries: range) -> None:
        self._shelf, self._entries = shelf, slice(entries.start, entries.stop)
        self._begin = self._end = 0

    def attend(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Write the new keys and values, and attend over all so far."""
        if layer == 0:
            self._begin, self._end = self._end, self._end + inputs.key.shape[2]
        key, value = self._shelf.keys[layer][self._entries], self._shelf.values[layer][self._entries]
        key[:, :, self._begin : self._end] = inputs.key
        value[:, :, self._begin : self._end] = inputs.value
        return causal_attention(inputs, key[:, :, : self._end], value[:, :, : self._end])


@dataclass(frozen=True)
class Stretch:
    """The first ``num_tokens`` tokens of an entry of a shelf."""

    shelf: Shelf
    entry: int
    num_tokens: int

    def keys(self, layer: int) -> torch.Tensor:
        """Shape (1, KV heads, num_tokens, head size), no copy."""
        return self.shelf.keys[layer][self.entry : self.entry + 1, :, : self.num_tokens]

    def values(self, layer: int) -> torch.Tensor:
        """Shape (1, KV heads, num_tokens, head size), no copy."""
        return self.shelf.values[layer][self.entry : self.entry + 1, :, : self.num_tokens]


class CompletionWriter:
    """Takes the keys and values of one completion that is computed anew, and attends over its prompt as well.

    What attention reads is put together for one layer at a time.

    Args:
        prompt: Where the prompt stands.
        pieces: Where the completion is to stand, one stretch after another.
    """

    def __init__(self, prompt: Stretch, pieces: Sequence[Stretch]) -> None:
        self._prompt, self._pieces = prompt, pieces
        self._begin = self._end = 0

    def attend(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Write the new keys and values, and attend over the prompt and all so far."""
        if layer == 0:
            self._begin, self._end = self._end, self._end + inputs.key.shape[2]
        start = 0
        for piece in self._pieces:
            first, last = max(self._begin, start), min(self._end, start + piece.num_tokens)
            if first < last:
                there, here = slice(first - start, last - start), slice(first - self._begin, last - self._begin)
                piece.keys(layer)[:, :, there] = inputs.key[:, :, here]
                piece.values(layer)[:, :, there] = inputs.value[:, :, here]
            start += piece.num_tokens
        parts, num_tokens = [self._prompt, *self._pieces], self._prompt.num_tokens + self._end
        key = torch.cat([part.keys(layer) for part in parts], 2)[:, :, :num_tokens]
        value = torch.cat([part.values(layer) for part in parts], 2)[:, :, :num_tokens]
        return causal_attention(inputs, key, value)
