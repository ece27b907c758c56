"""The keys and values of the slots: a prompt's once for its whole group, a completion's in pieces.

The pieces of a completion grow in length (:func:`piece_sizes`), and the n-th pieces of all
completions lie on one shelf, side by side. So a short completion does not reserve the maximum, what is not used is not
read, and a decode step is a few batched matrix products over contiguous memory: one pair a shelf.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from lit_grpo.policy.architecture.attention import ALL, Sight
from lit_grpo.process.copies import in_one_copy
from lit_grpo.rollout.slots.attention import AttentionInputs
from lit_grpo.rollout.slots.forward import attention_weights
from lit_grpo.rollout.slots.kv.shelves import KVShape, Shelf, ShelfReader
from lit_grpo.rollout.slots.kv.writers import ShelfWriter, Stretch
from lit_grpo.scheduling.layouts import TIGHT, piece_sizes, prompt_room

_WIDTH_STEP = 32  # tokens by which more and more of the last pieces is read
_SLACK, _SLACK_OF_TIGHT = 1.0, 0.25  # what is not used comes and goes, and giving it back copies what is


class SlotCache:
    """Rows of completions that are being decoded, numbered from 0 without holes, and the prompts that they share.

    Args:
        shape: What the keys of a token look like.
        max_tokens: The most tokens of one completion.
        max_rows: The most rows at a time.
    """

    def __init__(self, shape: KVShape, max_tokens: int, max_rows: int) -> None:
        self.shape = shape
        self.max_tokens = max_tokens
        self._max_rows = max_rows
        self._slack = _SLACK_OF_TIGHT if shape.pieces.growth == TIGHT else _SLACK
        self._pieces = [Shelf(size, shape, max_rows) for size in piece_sizes(max_tokens, shape.pieces.growth)]
        self._starts = np.cumsum([0, *(shelf.num_tokens for shelf in self._pieces)])[:-1]
        self._rows_of: list[list[int]] = [[] for _ in self._pieces]  # by shelf: the row of each entry
        self._entries_of: list[list[int]] = []  # by row: its entry on each shelf
        self._prompt_of: list[Hashable] = []  # by row
        self._prompt_shelves: dict[int, Shelf] = {}
        self._prompts: dict[Hashable, tuple[int, int, int]] = {}  # its shelf, entry and length
        self._readers: list[ShelfReader] | None = None
        self._masks: dict[Sight, torch.Tensor] = {}

    # ---- prompts ----------------------------------------------------------------------------------

    def __contains__(self, prompt: Hashable) -> bool:
        return prompt in self._prompts

    def write_prompts(self, prompts: Sequence[Hashable], lengths: Sequence[int]) -> ShelfWriter:
        """Make room for new prompts of these lengths, which all take the same room; return what is to fill it."""
        (room,) = {prompt_room(num_tokens) for num_tokens in lengths}
        shelf = self._prompt_shelves.setdefault(room, Shelf(room, self.shape))
        entries = shelf.add(len(lengths))
        for entry, prompt, num_tokens in zip(entries, prompts, lengths, strict=True):
            self._prompts[prompt] = (room, entry, num_tokens)
        self._readers = None
        return ShelfWriter([Stretch(shelf, entries, room)])

    def drop_prompt(self, prompt: Hashable) -> None:
        """Free a prompt that no row uses."""
        room, entry, _ = self._prompts.pop(prompt)
        shelf = self._prompt_shelves[room]
        moved = shelf.remove(entry)
        for other, (its_room, its_entry, length) in self._prompts.items():
            if (its_room, its_entry) == (room, moved):
                self._prompts[other] = (room, entry, length)
        if shelf.num_entries:
            shelf.trim(_SLACK)
        else:
            del self._prompt_shelves[room]
        self._readers = None

    # ---- rows -------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows in use."""
        return len(self._prompt_of)

    @property
    def prompts_in_use(self) -> set[Hashable]:
        """Prompts that rows read."""
        return set(self._prompt_of)

    def admit(self, prompts: Sequence[Hashable]) -> None:
        """Open a row for a new completion of each of ``prompts``, after the others."""
        first = self.num_rows
        self._rows_of[0] += range(first, first + len(prompts))
        self._entries_of += [[entry] for entry in self._pieces[0].add(len(prompts))]
        self._prompt_of += prompts
        self._readers = None

    def write_completions(
        self, prompt: Hashable, count: int, num_tokens: int, beginnings: Sequence[Sequence[torch.Tensor]] = ()
    ) -> ShelfWriter:
        """Open rows for ``count`` completions of a prompt, of ``num_tokens`` each; return what is to fill them.

        Args:
            prompt: Whose completions.
            count: How many.
            num_tokens: Of each.
            beginnings: What is known of each, equally much, as ``copy_completion`` returns it; none by default.
        """
        first = self.num_rows
        self.admit([prompt] * count)
        for piece, start in enumerate(self._starts.tolist()):
            if 0 < start < num_tokens:
                self._extend(piece, range(first, first + count))
        for row, known in enumerate(beginnings, first):
            start = 0
            for part in self._stretches(row, 1, known[0].shape[1]):
                for there, values in zip(part.rows(0), known, strict=True):
                    there.copy_(values[:, start : start + part.num_tokens])
                start += part.num_tokens
        room, entry, length = self._prompts[prompt]
        before = Stretch(self._prompt_shelves[room], range(entry, entry + 1), length)
        written = beginnings[0][0].shape[1] if beginnings else 0
        return ShelfWriter(self._stretches(first, count, num_tokens), [before], written)

    def copy_completion(self, row: int, num_tokens: int) -> list[torch.Tensor]:
        """Return a row's first keys by layer, then its values, shape (KV heads, tokens, key or value size) each."""
        parts = [part.rows(0) for part in self._stretches(row, 1, num_tokens)]
        return [torch.cat(each, 1) for each in zip(*parts, strict=True)]

    def prompt_of(self, row: int) -> Hashable:
        """Return the prompt that a row reads."""
        return self._prompt_of[row]

    def _stretches(self, row: int, count: int, num_tokens: int) -> list[Stretch]:
        """Where the first tokens of rows lie whose entries are neighbours on each shelf, piece by piece."""
        stretches = []
        for piece, (start, shelf) in enumerate(zip(self._starts.tolist(), self._pieces, strict=True)):
            if start < num_tokens:
                entry = self._entries_of[row][piece]
                size = min(num_tokens - start, shelf.num_tokens)
                stretches.append(Stretch(shelf, range(entry, entry + count), size))
        return stretches

    def remove(self, row: int) -> int:
        """Free a row, and with the last one all memory: the last one takes its place. Returns the number it had."""
        last = self.num_rows - 1
        for piece, entry in enumerate(self._entries_of[row]):
            moved_entry = self._pieces[piece].remove(entry)
            moved_row = self._rows_of[piece].pop()
            if moved_entry != entry:
                self._rows_of[piece][entry] = moved_row
                self._entries_of[moved_row][piece] = entry
        if row != last:
            self._entries_of[row], self._prompt_of[row] = self._entries_of[last], self._prompt_of[last]
            for piece, entry in enumerate(self._entries_of[row]):
                self._rows_of[piece][entry] = row
        del self._entries_of[last], self._prompt_of[last]
        self._readers = None
        if not last:
            self.tighten()
        return last

    def _extend(self, piece: int, rows: Sequence[int]) -> None:
        for row, entry in zip(rows, self._pieces[piece].add(len(rows)), strict=True):
            assert len(self._entries_of[row]) == piece
            self._entries_of[row].append(entry)
            self._rows_of[piece].append(row)
        self._readers = None

    # ---- memory -----------------------------------------------------------------------------------

    @property
    def allocated_tokens(self) -> int:
        """KV tokens there is memory for."""
        shelves = [*self._pieces, *self._prompt_shelves.values()]
        return sum(shelf.allocated_tokens for shelf in shelves)

    def growth(self, counts_B: np.ndarray) -> int:
        """KV tokens that a step will allocate for rows that enter their next piece."""
        growth = 0
        for start, shelf in zip(self._starts, self._pieces, strict=True):
            entering = int((counts_B == start).sum()) if start else 0
            growth += (shelf.room_for(shelf.num_entries + entering) - shelf.room) * shelf.num_tokens
        return growth

    def tokens_of(self, num_tokens: int) -> int:
        """KV tokens that a row of so many tokens takes."""
        return sum(
            shelf.num_tokens
            for start, shelf in zip(self._starts, self._pieces, strict=True)
            if start < max(num_tokens, 1)
        )

    def allow_slack(self, allowed: bool) -> None:
        """Let shelves grow ahead of need, or not."""
        for shelf in self._pieces:
            shelf.most_entries = self._max_rows if allowed else 0

    def tighten(self) -> None:
        """Give back all memory that is not in use."""
        for shelf in (*self._pieces, *self._prompt_shelves.values()):
            shelf.trim()
        self._readers = None

    # ---- a step -----------------------------------------------------------------------------------

    def prepare(
        self, positions_B: np.ndarray, others: Mapping[str, np.ndarray] = MappingProxyType({})
    ) -> dict[str, torch.Tensor]:
        """Make room for one new token a row.

        Args:
            positions_B: Where the token of each row stands in its completion: after the one of the last step.
            others: What else the step needs on the device, where it goes in the same copy.

        Returns:
            The others there.
        """
        for piece, start in enumerate(self._starts.tolist()):
            if piece and len(entering := np.flatnonzero(positions_B == start)):
                self._extend(piece, [row for row in entering.tolist() if len(self._entries_of[row]) == piece])
        longest = int(positions_B.max()) + 1
        if self._readers is None or longest > len(self._completion_L):
            return self._lay_out(positions_B, longest, others)
        for reader in self._readers:
            reader.advance()
        self._positions_B += 1
        self._see_next()
        return self._there(others)

    def _there(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return in_one_copy(tensors, self.shape.device)

    def attend(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Write each token's key and value, then attend over its row's prompt and its completion so far."""
        rows, heads, _, size = inputs.query.shape
        kv_heads = self.shape.layers[layer].num_heads
        # The query heads that share a KV head stand together, so keys are not repeated.
        query = inputs.query.reshape(rows * kv_heads, heads // kv_heads, size)
        key, value = inputs.key.reshape(-1, size), inputs.value.reshape(-1, inputs.value.shape[-1])
        assert self._readers is not None
        for reader in self._readers:
            reader.write(layer, key, value)
        scores = torch.cat([reader.scores(layer, query) for reader in self._readers], -1)
        scores = scores.view(rows, kv_heads, heads // kv_heads, -1)
        mask = self._mask(inputs.sight)
        if inputs.is_plain:
            torch.add(mask, scores, alpha=inputs.scaling, out=scores)
            weights = scores.softmax(-1)
        else:
            weights = attention_weights(scores[..., None, :] * inputs.scaling, inputs, mask[..., None, :])
        weights = weights.to(query.dtype).view(rows * kv_heads, heads // kv_heads, -1)
        first, *others = self._readers
        of_first, *of_others = weights.split([reader.width for reader in self._readers], -1)
        output = first.mix(layer, of_first)
        for reader, its_weights in zip(others, of_others, strict=True):
            reader.add_mix(layer, its_weights, output)
        return output.to(query.dtype).view(rows, heads, 1, -1)

    def _lay_out(
        self, positions_B: np.ndarray, longest: int, others: Mapping[str, np.ndarray]
    ) -> dict[str, torch.Tensor]:
        """Lay out who reads what, after rows or prompts have come, gone or moved.

        Completions come first, whose columns are then their positions; all rows read the first pieces, in order.

        Args:
            positions_B: As in ``prepare``.
            longest: The tokens of the longest completion, the new ones included; little more is read of any.
            others: As in ``prepare``.
        """
        for shelf in self._pieces:
            shelf.trim(self._slack)
        width = -(-longest // _WIDTH_STEP) * _WIDTH_STEP
        self._readers = []
        for start, shelf, rows_of in zip(self._starts.tolist(), self._pieces, self._rows_of, strict=True):
            its_width = min(shelf.num_tokens, width - start)
            if rows_of and its_width > 0:
                entries = np.full(self.num_rows, -1)
                entries[rows_of] = np.arange(len(rows_of))
                self._readers.append(ShelfReader(shelf, entries, its_width, positions_B - start))
        width = min(width, self.max_tokens)
        rooms, entries, lengths = np.array([self._prompts[prompt] for prompt in self._prompt_of]).T
        columns, valid = [], []
        for room, shelf in self._prompt_shelves.items():
            if (member_B := rooms == room).any():
                self._readers.append(ShelfReader(shelf, np.where(member_B, entries, -1), room))
                columns.append(np.arange(room))
                valid.append((columns[-1] < lengths[:, None]) & member_B[:, None])
        layouts = [part for reader in self._readers for part in reader.layout.values()]
        arrays = [positions_B, lengths, np.concatenate(columns), *layouts]
        own = {"valid": np.concatenate(valid, -1), "layout": np.concatenate(arrays, None)}
        there = self._there({**others, **own})
        self._prompt_valid_BL = there.pop("valid")
        parts = iter(there.pop("layout").split([array.size for array in arrays]))
        self._positions_B, self._prompt_lengths_B, self._prompt_L = next(parts), next(parts), next(parts)
        for reader in self._readers:
            reader.settle(parts)
        self._completion_L = torch.arange(width, device=self.shape.device)
        self._masks.clear()
        return there

    def _see_next(self) -> None:
        """Let each token attend to one position more; what slides, or is cut, is computed again."""
        self._masks = {sight: mask for sight, mask in self._masks.items() if sight == ALL}
        for mask in self._masks.values():
            mask[:, 0, 0].scatter_(1, self._positions_B[:, None], 0.0)

    def _mask(self, sight: Sight) -> torch.Tensor:
        """What each token adds to its attention scores in this step: shape (tokens, 1, 1, columns)."""
        if sight not in self._masks:
            positions_B1 = self._positions_B[:, None]
            valid_BL = torch.cat([self._completion_L <= positions_B1, self._prompt_valid_BL], -1)
            if sight != ALL:
                lengths_B1 = self._prompt_lengths_B[:, None]
                prompt_BL = self._prompt_L.expand(len(valid_BL), -1)
                absolute_BL = torch.cat([self._completion_L + lengths_B1, prompt_BL], -1)
                valid_BL &= sight.sees(lengths_B1 + positions_B1, absolute_BL)
            mask_BL = torch.zeros(valid_BL.shape, dtype=torch.float32, device=valid_BL.device)
            self._masks[sight] = mask_BL.masked_fill_(~valid_BL, -torch.inf)[:, None, None]
        return self._masks[sight]
