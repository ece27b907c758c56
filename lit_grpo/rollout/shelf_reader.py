"""How the rows of a decode step read and write one shelf."""

from __future__ import annotations

import numpy as np
import torch

from lit_grpo.rollout.shelf import Shelf


class ShelfReader:
    """Attention of rows to the entries of one shelf, as batched products over its contiguous memory.

    An entry is read by one row (a piece of a completion) or by several (a prompt): their queries stand side by side, so
    that the keys are read once for all of them. A *line* is a row's part in one KV head: line = row x KV heads + head.
    Readers hold views of the shelf's memory, and have to be made anew when it has grown or shrunk.

    Args:
        shelf: The keys and values.
        entries_B: By row, the entry that it reads, or -1.
        start: The position in its completion of a piece's first token; -1 for prompts, which are not written.
    """

    def __init__(self, shelf: Shelf, entries_B: np.ndarray, start: int = -1) -> None:
        self.width, self.start = shelf.num_tokens, start
        self._entries_B, self._device = entries_B, shelf.shape.device
        self._heads = heads = shelf.shape.num_heads
        num_entries, size = shelf.num_entries, shelf.shape.head_size
        self._flat_keys = [keys.view(-1, size) for keys in shelf.keys]
        self._flat_values = [values.view(-1, size) for values in shelf.values]
        keys = [keys[:num_entries].view(num_entries * heads, self.width, size) for keys in shelf.keys]
        self._keys = [keys.transpose(1, 2) for keys in keys]
        self._values = [values[:num_entries].view(num_entries * heads, self.width, size) for values in shelf.values]

        members = np.flatnonzero(entries_B >= 0)
        counts = np.bincount(entries_B[members], minlength=num_entries)
        self._per_entry = per_entry = int(counts.max())
        by_entry = members[np.argsort(entries_B[members], kind="stable")]
        ranks = np.arange(len(members)) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.zeros(len(entries_B), dtype=np.int64)  # a row that reads nothing stands where row 0 does
        places[by_entry] = entries_B[by_entry] * per_entry + ranks
        order = np.zeros(num_entries * per_entry, dtype=np.int64)  # a place that is left over reads what row 0 reads
        order[places[members]] = members
        identity = len(order) == len(entries_B) and bool((order == np.arange(len(order))).all())
        all_read = len(members) == len(entries_B)
        head = np.arange(heads)
        entry, rank = np.divmod(np.arange(len(order)).reshape(num_entries, per_entry), per_entry)
        back = (places[:, None] // per_entry * heads + head) * per_entry + places[:, None] % per_entry
        there = order[(entry * per_entry + rank)[:, None, :]] * heads + head[:, None]
        simple = identity and per_entry == 1
        self._there = None if simple else self._index(there)  # place -> line
        self._back = None if simple else self._index(back)  # line -> place
        self._members = None if all_read else self._index(members[:, None] * heads + head)  # lines that read here
        self._member_back = None if all_read else self._index(back[members])

    def aim(self, counts_B: np.ndarray) -> None:
        """Set which rows write their next token to this shelf, and where."""
        if self.start < 0:
            return
        columns_B = counts_B - self.start
        writers = np.flatnonzero((columns_B >= 0) & (columns_B < self.width))
        head = np.arange(self._heads)
        lines = (self._entries_B[writers, None] * self._heads + head) * self.width + columns_B[writers, None]
        self._targets = self._index(lines)
        everybody = len(writers) == len(counts_B)
        self._writers = None if everybody else self._index(writers[:, None] * self._heads + head)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the new keys and values, shape (lines, head size), of the rows that stand here."""
        if self.start < 0 or not len(self._targets):
            return
        if self._writers is not None:
            keys, values = keys.index_select(0, self._writers), values.index_select(0, self._writers)
        self._flat_keys[layer].index_copy_(0, self._targets, keys)
        self._flat_values[layer].index_copy_(0, self._targets, values)

    def scores(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Return the products of ``query``, shape (lines, queries, head size), with the keys: (lines, queries, width).

        Lines that read nothing here get those of another.
        """
        queries = query.shape[1]
        if self._there is not None:
            query = query.index_select(0, self._there)
        scores = torch.bmm(query.view(-1, self._per_entry * queries, query.shape[2]), self._keys[layer])
        scores = scores.view(-1, queries, self.width)
        return scores if self._back is None else scores.index_select(0, self._back)

    def add_mix(self, layer: int, weights: torch.Tensor, output: torch.Tensor) -> None:
        """Add the values, weighted by ``weights`` of shape (lines, queries, width), to ``output``."""
        queries = weights.shape[1]
        if self._there is not None:
            weights = weights.index_select(0, self._there).view(-1, self._per_entry * queries, self.width)
        mix = torch.bmm(weights, self._values[layer]).view(-1, queries, output.shape[-1])
        if self._members is not None:
            assert self._member_back is not None
            output.index_add_(0, self._members, mix.index_select(0, self._member_back))
        else:
            output.add_(mix if self._back is None else mix.index_select(0, self._back))

    def _index(self, index: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(index).reshape(-1)).to(self._device)
