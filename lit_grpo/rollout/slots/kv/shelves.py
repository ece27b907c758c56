"""Storage for keys and values of equal room, side by side, and how rows and whole sequences read and write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from lit_grpo.policy.architecture.states import RowStates
from lit_grpo.rollout.slots.attention import AttentionInputs, KVShape, causal_attention

_CAST_NUMBERS = 2**18


class Shelf:
    """Entries of ``num_tokens`` tokens each, and the attention of a decode step's rows to them.

    Entries in use are the first ones; those that are freed are holes, until others take them or :meth:`close` does.
    ``keys[layer]`` and ``values[layer]`` have shape (room, KV heads, num_tokens, key or value size). They are separate
    tensors so that growing, which copies, needs the memory of one layer twice and not of all. ``pointers`` says where
    they lie: of each layer the keys, then the values.

    Attention is batched products over this contiguous memory. An entry is read by one row (a piece of a completion) or
    by several (a prompt): their queries stand side by side, so that the keys are read once for all of them. A *line* is
    a row's part in one KV head: line = row x KV heads + head. ``aim`` lays out which row reads which entry, after
    entries or rows have come, gone or moved. The caller copies ``layout`` to the device, as ``places``, and puts
    tensors in the place of ``targets``.

    Args:
        num_tokens: The tokens of an entry.
        shape: What the keys of a token look like.
    """

    def __init__(self, num_tokens: int, shape: KVShape) -> None:
        self.num_tokens, self.shape = num_tokens, shape
        self.num_entries = self.room = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for layer in shape.layers:
            no_entries = torch.empty((0, layer.num_heads, num_tokens, 0), dtype=shape.dtype, device=shape.device)
            self.keys.append(no_entries.new_empty((*no_entries.shape[:3], layer.key_size)))
            self.values.append(no_entries.new_empty((*no_entries.shape[:3], layer.value_size)))
        self.pointers = np.zeros(2 * len(shape.layers), dtype=np.int64)
        self._holes: list[int] = []
        self.width = self._num_read = self._per_entry = 0
        self.targets: dict[int, Any] = {}
        """Where rows write their next tokens, by number of KV heads: an array, and a tensor once it has been copied."""
        self.layout: dict[tuple[str, int], np.ndarray] = {}
        self.places: dict[tuple[str, int], torch.Tensor] = {}
        """The layout by name and number of KV heads, on the host and on the device."""

    # ---- entries ----------------------------------------------------------------------------------

    def room_for(self, num_entries: int, most_entries: int) -> int:
        """The room that the shelf takes to hold so many entries: what it has, or an eighth more than needed.

        With the eighth it is not more than ``most_entries``.
        """
        if num_entries <= self.room:
            return self.room
        return max(num_entries, min(num_entries + num_entries // 8, most_entries))

    def add(self, num_entries: int, most_entries: int = 0) -> list[int]:
        """Take entries into use, holes first, then at the end; return their numbers.

        Up to ``most_entries`` room grows ahead of need.
        """
        entries, end = self._holes[:num_entries], self.num_entries + len(self._holes)
        del self._holes[:num_entries]
        self.num_entries += num_entries
        self._resize(self.room_for(self.num_entries, most_entries))
        return [*entries, *range(end, end + num_entries - len(entries))]

    def remove(self, entry: int) -> None:
        """Free an entry."""
        self._holes.append(entry)
        self.num_entries -= 1

    def settle(self, slack: float | None = None) -> dict[int, int]:
        """Have the last entries take the place of holes, and give memory back.

        Args:
            slack: Half of what is not used is given back where that is more than this share of what is used; else
                nothing is done. By default holes are closed, and none is given back.

        Returns:
            The new number of each entry that has moved by its old one.
        """
        if slack is not None and self.room <= (1 + slack) * self.num_entries:
            return {}
        last = range(self.num_entries, self.num_entries + len(self._holes))
        holes = [hole for hole in self._holes if hole < self.num_entries]
        moved = dict(zip((entry for entry in last if entry not in self._holes), holes, strict=True))
        for entry, hole in moved.items():
            for tensor in (*self.keys, *self.values):
                tensor[hole] = tensor[entry]
        self._holes.clear()
        if slack is not None:
            self._resize(self.num_entries + int(self.num_entries * slack / 2))
        return moved

    def _resize(self, room: int) -> None:
        if room == self.room:
            return
        kept, self.room = min(room, self.room), room
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = tensors[layer] = old.new_empty((room, *old.shape[1:]))
                new[:kept] = old[:kept]
                new[kept:] = 0  # because what is masked is multiplied by zero, and memory may hold NaN
        for first, tensors in enumerate((self.keys, self.values)):
            self.pointers[first::2] = [tensor.data_ptr() for tensor in tensors]

    def tokens_of(self, entry: int, num_tokens: int) -> list[torch.Tensor]:
        """The first keys of an entry by layer, then its values, shape (KV heads, tokens, size) each, no copies."""
        return [tensor[entry, :, :num_tokens] for tensor in (*self.keys, *self.values)]

    # ---- a step -----------------------------------------------------------------------------------

    def aim(self, entries_B: np.ndarray, width: int, columns_B: np.ndarray | None = None) -> None:
        """Lay out which rows read and write what.

        Args:
            entries_B: By row, the entry that it reads, or -1.
            width: How many tokens of each entry are read, from its first one on.
            columns_B: Where each row writes its next token, if that is among them; ``None`` for prompts: nobody does.
        """
        self.width, self.targets, self.layout = width, {}, {}
        self._num_read = int(entries_B.max()) + 1  # prompts that nobody reads yet may lie after these
        self._per_entry = 1
        if columns_B is not None:
            writers = np.flatnonzero((columns_B >= 0) & (columns_B < width))
            for heads in self.shape.head_counts if len(writers) else ():
                head = np.arange(heads)
                lines = entries_B[writers, None] * heads + head
                self.targets[heads] = lines * self.num_tokens + columns_B[writers, None]
                if len(writers) < len(columns_B):
                    self.layout["writers", heads] = writers[:, None] * heads + head
        if len(entries_B) == self._num_read and (entries_B == np.arange(self._num_read)).all():
            return  # row n reads entry n
        # How the queries of the rows come to stand beside what they read, and their results back.
        members = np.flatnonzero(entries_B >= 0)
        its_entries = entries_B[members]
        counts = np.bincount(its_entries, minlength=self._num_read)
        per_entry = self._per_entry = int(counts.max())
        by_entry = np.argsort(its_entries, kind="stable")
        ranks = np.arange(len(members)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.zeros(len(entries_B), dtype=np.int64)  # a row that reads nothing stands where row 0 does
        places[members[by_entry]] = its_entries[by_entry] * per_entry + ranks
        order = np.zeros((self._num_read, 1, per_entry), dtype=np.int64)  # places left over read what row 0 reads
        order.reshape(-1)[places[members]] = members
        entry, rank = np.divmod(places[:, None], per_entry)
        for heads in self.shape.head_counts:
            head = np.arange(heads)
            back = (entry * heads + head) * per_entry + rank
            self.layout["there", heads] = order * heads + head[:, None]  # place -> line
            self.layout["back", heads] = back  # line -> place
            if len(members) < len(entries_B):
                self.layout["members", heads] = members[:, None] * heads + head  # lines that read here
                self.layout["member_back", heads] = back[members]

    def scores(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write the new keys and values of the rows that stand here; return the products of queries with the keys.

        Args:
            layer: The number of the attention call.
            query: Shape (lines, queries, key size).
            key: The new keys, shape (lines, key size).
            value: The new values, shape (lines, value size).

        Returns:
            Shape (lines, queries, width), in float32 whatever the keys are in. Lines that read nothing here get those
            of another.
        """
        heads, num_queries = self.shape.layers[layer].num_heads, query.shape[1]
        if heads in self.targets:
            if ("writers", heads) in self.places:
                writers = self.places["writers", heads]
                key, value = key.index_select(0, writers), value.index_select(0, writers)
            self.keys[layer].view(-1, key.shape[-1]).index_copy_(0, self.targets[heads], key)
            self.values[layer].view(-1, value.shape[-1]).index_copy_(0, self.targets[heads], value)
        there, back = self.places.get(("there", heads)), self.places.get(("back", heads))
        if there is not None:
            query = query.index_select(0, there)
        keys = self.keys[layer][: self._num_read].flatten(0, 1)[:, : self.width]
        scores = _product(query.view(-1, self._per_entry * num_queries, query.shape[2]), keys.transpose(1, 2))
        scores = scores.view(-1, num_queries, self.width)
        return scores if back is None else scores.index_select(0, back)

    def mix(self, layer: int, weights: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values, weighted by ``weights`` of shape (lines, queries, width), added to ``output`` in place.

        Without an ``output`` every line has to read here.
        """
        heads = self.shape.layers[layer].num_heads
        there, back = self.places.get(("there", heads)), self.places.get(("back", heads))
        num_queries, members = weights.shape[1], self.places.get(("members", heads))
        if there is not None:
            weights = weights.index_select(0, there)
        values = self.values[layer][: self._num_read].flatten(0, 1)[:, : self.width]
        mixed = _product(weights.view(len(values), -1, self.width), values).view(len(weights), num_queries, -1)
        if output is not None and members is not None:
            return output.index_add_(0, members, mixed.index_select(0, self.places["member_back", heads]))
        if back is not None:
            mixed = mixed.index_select(0, back)
        return mixed if output is None else output.add_(mixed)


class ShelfStretch(NamedTuple):
    """The first ``num_tokens`` tokens of neighboring entries of a shelf, an entry a row."""

    shelf: Shelf
    entries: slice
    num_tokens: int


@dataclass(eq=False)
class ShelfWriter:
    """Takes the keys and values of prompts or of completions, some tokens after others, and attends to all so far.

    Where they lie on several shelves, what attention reads is put together for one layer at a time.

    Args:
        shape: What the keys of a token look like.
        stretches: Where they are to stand, one after another; what is after a row's own tokens is not read. The first
            one may be the one entry of a prompt that all rows share.
        written: How many tokens are there already: new ones come after these.
        states: What the layers remember of the rows' tokens so far, where any do.
    """

    shape: KVShape
    stretches: Sequence[ShelfStretch]
    written: int = 0
    states: RowStates | None = None
    _begin: int = field(default=0, init=False)  # the tokens before those that the current forward brings

    def attend(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Write the new keys and values, which may be of the first rows alone, and attend over all so far."""
        if layer == 0:
            self._begin, self.written = self.written, self.written + inputs.key.shape[2]
        start, keys, values = 0, [], []
        for shelf, entries, num_tokens in self.stretches:
            entries = slice(entries.start, min(entries.stop, entries.start + len(inputs.key)))
            key, value = shelf.keys[layer][entries, :, :num_tokens], shelf.values[layer][entries, :, :num_tokens]
            first, last = max(self._begin, start), min(self.written, start + num_tokens)
            if first < last:
                new, here = slice(first - self._begin, last - self._begin), slice(first - start, last - start)
                key[:, :, here], value[:, :, here] = inputs.key[:, :, new], inputs.value[:, :, new]
            keys.append(key.expand(len(inputs.key), -1, -1, -1))
            values.append(value.expand(len(inputs.key), -1, -1, -1))
            start += num_tokens
        key, value = (keys[0], values[0]) if len(keys) == 1 else (torch.cat(keys, 2), torch.cat(values, 2))
        return causal_attention(inputs, key[:, :, : self.written], value[:, :, : self.written])


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the batched matrix product, in float32 where both are in bfloat16.

    Rounded to bfloat16 before the softmax, scores would cost three to six times the error of bfloat16 attention.
    """
    if left.dtype.itemsize > 2:
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    # There is no such product elsewhere: both are cast, so much at a time as stays in a processor's cache.
    left, step = left.float(), max(1, _CAST_NUMBERS // right[0].numel())
    product = left.new_empty((*left.shape[:2], right.shape[2]))
    for first in range(0, len(left), step):
        some = slice(first, first + step)
        torch.bmm(left[some], right[some].float(), out=product[some])
    return product
