"""Storage for keys and values of equal room, side by side, and how the rows of a decode step read and write it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lit_grpo.policy.architecture.attention import ALL, Sight
from lit_grpo.scheduling.layouts import FEW, TIGHT, Pieces

_CAST_NUMBERS = 2**18
_TIGHT_FROM_BYTES = 2**14  # a token


@dataclass(frozen=True)
class KVLayer:
    """What the keys and values of one token are in one attention call: heads, and the numbers of each.

    ``sight`` says which tokens a token sees there.
    """

    num_heads: int
    key_size: int
    value_size: int
    sight: Sight = ALL


@dataclass(frozen=True)
class KVShape:
    """What the keys and values of one token look like, by the attention calls of a forward, and where they live."""

    layers: tuple[KVLayer, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        numbers = sum(layer.num_heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return numbers * self.dtype.itemsize

    @property
    def head_counts(self) -> list[int]:
        """The numbers of KV heads that there are, ascending."""
        return sorted({layer.num_heads for layer in self.layers})

    @property
    def pieces(self) -> Pieces:
        """How a completion lies: in more pieces, with less that is not used, where that is much memory.

        Not so on a GPU, where operations are many launches and memory is read fast.
        """
        return Pieces(TIGHT if self.bytes_per_token >= _TIGHT_FROM_BYTES and self.device.type == "cpu" else FEW)


class Shelf:
    """Entries of ``num_tokens`` tokens each. Entries in use are the first ones, without holes.

    ``keys[layer]`` and ``values[layer]`` have shape (room, KV heads, num_tokens, key or value size). They are separate
    tensors so that growing, which copies, needs the memory of one layer twice and not of all.

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
        like = torch.empty(0, dtype=shape.dtype, device=shape.device)
        self.keys = [like.new_empty((0, each.num_heads, num_tokens, each.key_size)) for each in shape.layers]
        self.values = [like.new_empty((0, each.num_heads, num_tokens, each.value_size)) for each in shape.layers]

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

    def trim(self, slack: float = 0.0) -> None:
        """Give memory back: all that is not used, or half of it where more than ``slack`` of what is used is not."""
        if self.room > (1 + slack) * self.num_entries:
            self._resize(self.num_entries + int(self.num_entries * slack / 2))

    def _resize(self, room: int) -> None:
        if room == self.room:
            return
        kept = min(room, self.room)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = tensors[layer] = old.new_empty((room, *old.shape[1:]))
                new[:kept] = old[:kept]
                new[kept:] = 0  # because what is masked is multiplied by zero, and memory may hold NaN


class ShelfReader:
    """Attention of rows to the entries of one shelf, as batched products over its contiguous memory.

    An entry is read by one row (a piece of a completion) or by several (a prompt): their queries stand side by side, so
    that the keys are read once for all of them. A *line* is a row's part in one KV head: line = row x KV heads + head.
    Readers have to be made again when entries or rows have come, gone or moved; before they are used, their ``layout``
    goes to the device together with that of the others.

    Args:
        shelf: The keys and values.
        entries_B: By row, the entry that it reads, or -1.
        width: How many tokens of each entry are read, from its first one on.
        columns_B: Where each row writes its next token, if that is among them; ``None`` for prompts: nobody does.
    """

    def __init__(self, shelf: Shelf, entries_B: np.ndarray, width: int, columns_B: np.ndarray | None = None) -> None:
        self.width, self._shelf = width, shelf
        self._num_entries = int(entries_B.max()) + 1  # that are read; prompts that nobody reads yet may lie after these
        self._per_entry = 1
        self.layout: dict[tuple[str, int], np.ndarray] = {}
        """By name and number of KV heads."""
        self._indices: dict[tuple[str, int], torch.Tensor] = {}
        if columns_B is not None:
            self._aim(entries_B, columns_B)
        if len(entries_B) != self._num_entries or (entries_B != np.arange(self._num_entries)).any():
            self._order(entries_B, self._num_entries)  # else row n reads entry n

    def _aim(self, entries_B: np.ndarray, columns_B: np.ndarray) -> None:
        """Lay out which rows write their next token to this shelf, and where."""
        writers = np.flatnonzero((columns_B >= 0) & (columns_B < self.width))
        if not len(writers):
            return
        for heads in self._shelf.shape.head_counts:
            head = np.arange(heads)
            lines = entries_B[writers, None] * heads + head
            self.layout["targets", heads] = lines * self._shelf.num_tokens + columns_B[writers, None]
            if len(writers) < len(columns_B):
                self.layout["writers", heads] = writers[:, None] * heads + head

    def _order(self, entries_B: np.ndarray, num_entries: int) -> None:
        """Lay out how the queries of the rows come to stand beside what they read, and their results back."""
        members = np.flatnonzero(entries_B >= 0)
        its_entries = entries_B[members]
        counts = np.bincount(its_entries, minlength=num_entries)
        per_entry = self._per_entry = int(counts.max())
        by_entry = np.argsort(its_entries, kind="stable")
        ranks = np.arange(len(members)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.zeros(len(entries_B), dtype=np.int64)  # a row that reads nothing stands where row 0 does
        places[members[by_entry]] = its_entries[by_entry] * per_entry + ranks
        order = np.zeros((num_entries, 1, per_entry), dtype=np.int64)  # places left over read what row 0 reads
        order.reshape(-1)[places[members]] = members
        entry, rank = np.divmod(places[:, None], per_entry)
        for heads in self._shelf.shape.head_counts:
            head = np.arange(heads)
            back = (entry * heads + head) * per_entry + rank
            self.layout["there", heads] = order * heads + head[:, None]  # place -> line
            self.layout["back", heads] = back  # line -> place
            if len(members) < len(entries_B):
                self.layout["members", heads] = members[:, None] * heads + head  # lines that read here
                self.layout["member_back", heads] = back[members]

    def settle(self, parts: Iterator[torch.Tensor]) -> None:
        """Take the ``layout``, one part after another, as it has come to the device."""
        self._indices = {name: next(parts) for name in self.layout}

    def advance(self) -> None:
        """Go on to the next token of those that write here."""
        for (name, _), places in self._indices.items():
            if name == "targets":
                places += 1

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the new keys and values, shape (lines, key or value size), of the rows that stand here."""
        targets, writers = self._index("targets", layer), self._index("writers", layer)
        if targets is None:
            return
        if writers is not None:
            keys, values = keys.index_select(0, writers), values.index_select(0, writers)
        self._shelf.keys[layer].view(-1, keys.shape[-1]).index_copy_(0, targets, keys)
        self._shelf.values[layer].view(-1, values.shape[-1]).index_copy_(0, targets, values)

    def scores(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Return the products of ``query``, shape (lines, queries, key size), with the keys: (lines, queries, width).

        They are in float32, whatever the keys are in. Lines that read nothing here get those of another.
        """
        queries, there, back = query.shape[1], self._index("there", layer), self._index("back", layer)
        if there is not None:
            query = query.index_select(0, there)
        keys = self._read(self._shelf.keys[layer])
        scores = _product(query.view(-1, self._per_entry * queries, query.shape[2]), keys.transpose(1, 2))
        scores = scores.view(-1, queries, self.width)
        return scores if back is None else scores.index_select(0, back)

    def mix(self, layer: int, weights: torch.Tensor) -> torch.Tensor:
        """Return the values, weighted by ``weights`` of shape (lines, queries, width), where every line reads here."""
        mixed, back = self._mix(layer, weights), self._index("back", layer)
        return mixed if back is None else mixed.index_select(0, back)

    def add_mix(self, layer: int, weights: torch.Tensor, output: torch.Tensor) -> None:
        """Add the values, weighted by ``weights`` of shape (lines, queries, width), to ``output``."""
        members, back = self._index("members", layer), self._index("member_back", layer)
        if members is None or back is None:
            output.add_(self.mix(layer, weights))
        else:
            output.index_add_(0, members, self._mix(layer, weights).index_select(0, back))

    def _mix(self, layer: int, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted values in the order of their places."""
        there, values = self._index("there", layer), self._read(self._shelf.values[layer])
        places = weights if there is None else weights.index_select(0, there)
        mixed = _product(places.view(len(values), -1, self.width), values)
        return mixed.view(len(places), weights.shape[1], -1)

    def _read(self, kept: torch.Tensor) -> torch.Tensor:
        """What is read of the keys or values of a layer, shape (lines, width, size)."""
        return kept[: self._num_entries].flatten(0, 1)[:, : self.width]

    def _index(self, name: str, layer: int) -> torch.Tensor | None:
        return self._indices.get((name, self._shelf.shape.layers[layer].num_heads))


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
