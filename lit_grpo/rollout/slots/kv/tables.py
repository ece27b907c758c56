"""Places of the keys and values of a decode step's rows, in tensors that a recorded step reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from lit_grpo.policy.architecture.states import RowStates
from lit_grpo.rollout.slots.attention import AttentionInputs, KVShape

if TYPE_CHECKING:
    from lit_grpo.rollout.slots.kv.shelves import Shelf

_FIRST_ROOM = 64
"""Columns of each table at first: enough for most runs, since a table that grows costs all recordings."""
_LAID_OUT = ("segments", "bounds", "sizes", "pointers")
RowAttention = Callable[["RowTables", int, AttentionInputs, torch.Tensor], None]
"""Attends as :func:`lit_grpo.rollout.slots.kv.kernel.attend_rows` does."""


class RowTables:
    """Tables of the rows of a step, which stay where they are while rows come, grow and go.

    Where one has to grow it is another tensor, and what was recorded has to be recorded again: see :attr:`places`.

    Attributes:
        columns: Where each row's next token stands in its completion, int64, shape (most rows,); -1 for rows that are
            not in use. In a step with drafts, where each query's does, of which a row has several.
        rows: The row of each query, int64, in a step with drafts.
        is_drafted: Whether the step is one.
        segments: Of each row the tokens of its prompt, then shelf and entry of the prompt and of each piece of its
            completion, int32, shape (most rows, 3 + 2 x pieces).
        bounds: The number of pieces, then the columns at which they begin, and the end of the last one; int32.
        sizes: The tokens of an entry of each shelf, int32. The shelves of pieces come first, then those of prompts.
        pointers: Where each shelf's keys and values lie, int64, shape (2 x layers, shelves): of each layer the keys,
            then the values.

    Args:
        shape: What the keys of a token look like.
        most_rows: The most rows, or queries, at a time.
        attention: Attends by these tables.
    """

    def __init__(self, shape: KVShape, most_rows: int, attention: RowAttention) -> None:
        self.shape, self._attention = shape, attention
        self.states: RowStates | None = None  # models whose layers have some are decoded by shelves
        self.columns = torch.full((most_rows,), -1, device=shape.device)
        self.rows = torch.arange(most_rows, device=shape.device)
        self.is_drafted, self._num_used = False, 0
        self.segments, self.bounds, self.sizes = (
            torch.zeros(size, dtype=torch.int32, device=shape.device)
            for size in ((most_rows, _FIRST_ROOM), (_FIRST_ROOM,), (_FIRST_ROOM,))
        )
        self._of_shelves, self._awaited = list[np.ndarray](), list[np.ndarray]()  # what is there, and on its way
        self.pointers = torch.zeros((2 * len(shape.layers), _FIRST_ROOM), dtype=torch.int64, device=shape.device)

    @property
    def places(self) -> tuple[int, ...]:
        """Addresses of the tables."""
        tables = (self.columns, self.rows, self.segments, self.bounds, self.sizes, self.pointers)
        return tuple(each.data_ptr() for each in tables)

    def laid_out(
        self,
        pieces: Sequence[Shelf],
        prompts: Mapping[int, Shelf],
        starts: np.ndarray,
        entries: np.ndarray,
        prompt_of: Sequence[tuple[int, int, int]],
    ) -> dict[str, np.ndarray]:
        """Return what the tables are to hold, after rows, pieces or prompts have come, gone or moved.

        That is of shelves nothing if they are what they were.

        Args:
            pieces: The shelves of pieces.
            prompts: Those of prompts, by room.
            starts: The columns at which pieces begin, and the end of the last one.
            entries: Each row's entry on the shelf of each piece, or -1.
            prompt_of: Each row's prompt: room, entry and tokens.
        """
        shelves = [*pieces, *prompts.values()]
        number_of = {room: len(pieces) + index for index, room in enumerate(prompts)}
        segments = np.empty((len(entries), 3 + 2 * len(pieces)), dtype=np.int32)
        segments[:, :3] = [(tokens, number_of[room], entry) for room, entry, tokens in prompt_of]
        segments[:, 3::2] = np.arange(len(pieces))
        segments[:, 4::2] = entries
        of_shelves = {
            "bounds": np.array([len(pieces), *starts], dtype=np.int32),
            "sizes": np.array([shelf.num_tokens for shelf in shelves], dtype=np.int32),
            "pointers": np.stack([shelf.pointers for shelf in shelves], 1),
        }
        if self._of_shelves and all(map(np.array_equal, of_shelves.values(), self._of_shelves)):
            return {"segments": segments}
        self._awaited = [*of_shelves.values()]
        return {"segments": segments} | of_shelves

    def take(self, there: dict[str, torch.Tensor], num_rows: int) -> None:
        """Take the columns of the rows from what has been copied to the device, and what has been laid out again.

        With the ``rows`` of queries they are those of a step with drafts.
        """
        self.is_drafted = "rows" in there
        if self.is_drafted:
            self.rows[:num_rows] = there.pop("rows")
        if num_rows < self._num_used:
            self.columns[num_rows : self._num_used] = -1
        self._num_used = num_rows
        if "pointers" in there:
            self._of_shelves = self._awaited
        for name in _LAID_OUT:
            if name not in there:
                continue
            new, table = there.pop(name), getattr(self, name)
            if new.shape[-1] > table.shape[-1]:
                room = 2 * new.shape[-1]
                table = new.new_zeros((*table.shape[:-1], room))
                setattr(self, name, table)
            table[tuple(slice(size) for size in new.shape)] = new
        self.columns[:num_rows] = there.pop("columns")

    def attend(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Write each row's key and value, then attend over its prompt and its completion so far."""
        rows, heads, _, size = inputs.query.shape
        output = inputs.value.new_empty((rows, heads, size))
        self._attention(self, layer, inputs, output)
        return output
