"""The keys and values of the slots: a prompt's once for its whole group, a completion's in pieces.

The pieces of a completion grow in length (:func:`piece_sizes`), and the n-th pieces of all
completions lie on one shelf, side by side. So a short completion does not reserve the maximum, what is not used is not
read, and a decode step is a few batched matrix products over contiguous memory: one pair a shelf.

:class:`KVBudget` is the memory that they may take, and shrinks where memory runs out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from lit_grpo.memory import in_one_copy
from lit_grpo.policy.architecture.attention import ALL, Sight
from lit_grpo.policy.architecture.states import RowStates, States
from lit_grpo.rollout.slots.attention import AttentionInputs, KVShape, attention_weights
from lit_grpo.rollout.slots.kv.shelves import Shelf, ShelfStretch, ShelfWriter
from lit_grpo.rollout.slots.kv.tables import RowTables
from lit_grpo.scheduling.layouts import TIGHT, Pieces, piece_sizes, prompt_room, smallest_budget
from lit_grpo.types import Request, SamplingParams

_WIDTH_STEP = 32  # tokens by which more and more of the last pieces is read
_SLACK, _SLACK_OF_TIGHT = 1.0, 0.25  # what is not used comes and goes, and giving it back copies what is
_NOT_COMPUTED = torch.empty(0)


@dataclass(eq=False)
class CachedPrompt:
    """Place of a prompt: the shelf of its ``room``, and its entry there.

    ``hidden_D`` is its last hidden state, which the first tokens of its completions come from; it is empty until it has
    been computed. So are ``states``, which its completions begin with.
    """

    room: int
    entry: int
    num_tokens: int
    hidden_D: torch.Tensor = _NOT_COMPUTED
    states: States = field(default_factory=dict)


class CopiedRow(NamedTuple):
    """Copy of a row's first tokens.

    ``tensors`` are their keys by layer, then their values, shape (KV heads, tokens, key or value size) each; ``states``
    are those after the last of them, ``hidden_D`` its hidden state, if it is known.
    """

    tensors: Sequence[torch.Tensor]
    states: States
    hidden_D: torch.Tensor | None = None

    def first(self, num_tokens: int) -> CopiedRow:
        """Return what it holds of fewer tokens; states and hidden state are those of all of them."""
        return self._replace(tensors=[tensor[:, :num_tokens] for tensor in self.tensors])


class SlotCache:
    """Rows of completions that are being decoded, numbered from 0 without holes, and the prompts that they share.

    ``prompts`` are those that are there. ``most_entries`` says up to how many entries a shelf of pieces grows ahead of
    need, and may be changed at any time.

    Args:
        shape: What the keys of a token look like.
        max_tokens: The most tokens of one completion.
        max_rows: The most rows at a time.
        tables: Attend for the rows of a step; by default the shelves do, whose shapes change from step to step.
    """

    def __init__(self, shape: KVShape, max_tokens: int, max_rows: int, tables: RowTables | None = None) -> None:
        self.shape, self.max_tokens, self.most_entries, self.tables = shape, max_tokens, max_rows, tables
        self.prompts: dict[Hashable, CachedPrompt] = {}
        self.num_rows = 0
        self.states = None if shape.states is None else RowStates(shape.states)
        self._state_room = 0
        self._slack = _SLACK_OF_TIGHT if shape.pieces.growth == TIGHT else _SLACK
        self._pieces = [Shelf(size, shape) for size in piece_sizes(max_tokens, shape.pieces.growth)]
        bounds = np.cumsum([0, *(shelf.num_tokens for shelf in self._pieces)])
        self._starts, self._ends = bounds[:-1], bounds[1:]  # of the pieces
        self._entries = np.full((max_rows, len(self._pieces)), -1)  # of each row on the shelf of each piece, or -1
        self._prompt_of: list[CachedPrompt] = []  # by row
        self._prompt_shelves: dict[int, Shelf] = {}  # by room
        self._read: list[Shelf] | None = None  # by a step; None where that has to be laid out again
        self._is_drafted = False  # the last step, so the next one brings other than a token more of each row
        self._masks: dict[Sight, torch.Tensor] = {}

    # ---- prompts ----------------------------------------------------------------------------------

    def write_prompts(self, prompts: Sequence[Hashable], lengths: Sequence[int]) -> ShelfWriter:
        """Make room for new prompts of these lengths, which all take the same room; return what is to fill it."""
        room = prompt_room(max(lengths))
        shelf = self._prompt_shelves.setdefault(room, Shelf(room, self.shape))
        entries = shelf.add(len(lengths))
        for entry, prompt, num_tokens in zip(entries, prompts, lengths, strict=True):
            self.prompts[prompt] = CachedPrompt(room, entry, num_tokens)
        self._read = None
        states = None if self.shape.states is None else RowStates(self.shape.states)
        where = slice(entries[0], entries[-1] + 1)  # this shelf has no holes
        return ShelfWriter(self.shape, [ShelfStretch(shelf, where, room)], states=states)

    def drop_prompt(self, prompt: Hashable) -> None:
        """Free a prompt that no row uses."""
        dropped = self.prompts.pop(prompt)
        shelf = self._prompt_shelves[dropped.room]
        shelf.remove(dropped.entry)
        moved = shelf.settle()
        for other in self.prompts.values():
            if other.room == dropped.room:
                other.entry = moved.get(other.entry, other.entry)
        if shelf.num_entries:
            shelf.settle(_SLACK)
        else:
            del self._prompt_shelves[dropped.room]
        self._read = None

    # ---- rows -------------------------------------------------------------------------------------

    def admit(self, prompts: Sequence[Hashable]) -> None:
        """Open a row for a new completion of each of ``prompts``, after the others."""
        first, self.num_rows = self.num_rows, self.num_rows + len(prompts)
        self._entries[first : self.num_rows, 0] = self._pieces[0].add(len(prompts), self.most_entries)
        self._prompt_of += map(self.prompts.__getitem__, prompts)
        if self.states is not None and self.num_rows > first:
            begun_with = [own.states for own in self._prompt_of[first:]]
            if self.num_rows > self._state_room:
                ahead = min(self.num_rows + self.num_rows // 8, self.most_entries)
                self._resize_states(max(self.num_rows, ahead), begun_with[0])
            self.states.put(first, begun_with)
        self._read = None

    def _resize_states(self, room: int, like: States) -> None:
        if self.states is not None and room != self._state_room:
            self.states.resize(room, like)
            self._state_room = room

    def write_completions(
        self,
        prompt: Hashable,
        count: int,
        num_tokens: int,
        beginnings: Sequence[CopiedRow] = (),
        num_known: int = 0,
    ) -> ShelfWriter:
        """Open rows for ``count`` completions of a prompt, of ``num_tokens`` each; return what is to fill them.

        Args:
            prompt: The prompt that they follow, as it was admitted.
            count: Number of completions.
            num_tokens: Tokens of each completion.
            beginnings: What is known of each, as ``copy_completion`` returns it; none by default.
            num_known: The tokens of each beginning.
        """
        first = self.num_rows
        self.settle()  # so that the entries of its rows are neighbors
        self.admit([prompt] * count)
        for piece in range(1, int(np.searchsorted(self._starts, num_tokens))):
            self._entries[first : self.num_rows, piece] = self._pieces[piece].add(count, self.most_entries)
        for row, beginning in enumerate(beginnings, first):
            for stretch, start in zip(self._stretches(row, 1, num_known), self._starts.tolist(), strict=False):
                there = stretch.shelf.tokens_of(stretch.entries.start, stretch.num_tokens)
                for kept, values in zip(there, beginning.tensors, strict=True):
                    kept.copy_(values[:, start : start + stretch.num_tokens])
        shared = self.prompts[prompt]
        where = slice(shared.entry, shared.entry + 1)
        before = ShelfStretch(self._prompt_shelves[shared.room], where, shared.num_tokens)
        states = None
        if self.states is not None:
            self.states.put(first, [beginning.states for beginning in beginnings])
            states = self.states.rows(slice(first, self.num_rows))
        stretches = [before, *self._stretches(first, count, num_tokens)]
        return ShelfWriter(self.shape, stretches, shared.num_tokens + num_known, states)

    def copy_completion(self, row: int, num_tokens: int) -> CopiedRow:
        """Return what a row holds of its first tokens, and its states."""
        parts = [
            stretch.shelf.tokens_of(stretch.entries.start, stretch.num_tokens)
            for stretch in self._stretches(row, 1, num_tokens)
        ]
        tensors = [torch.cat(each, 1) for each in zip(*parts, strict=True)]
        return CopiedRow(tensors, {} if self.states is None else self.states.copy(row))

    def _stretches(self, row: int, count: int, num_tokens: int) -> list[ShelfStretch]:
        """Return the places of the first tokens of rows whose entries are neighbors on each shelf, piece by piece."""
        stretches = []
        for piece, start in enumerate(self._starts.tolist()):
            if start < num_tokens:
                entry, shelf = int(self._entries[row, piece]), self._pieces[piece]
                size = min(num_tokens - start, shelf.num_tokens)
                stretches.append(ShelfStretch(shelf, slice(entry, entry + count), size))
        return stretches

    def remove(self, row: int) -> None:
        """Free a row, and with the last one all memory: the last one takes its place.

        For tables nothing moves but the row's number; shelves attend to entries without holes.
        """
        last = self.num_rows = self.num_rows - 1
        for shelf, entry in zip(self._pieces, self._entries[row].tolist(), strict=True):
            if entry >= 0:
                shelf.remove(entry)
        self._entries[row], self._prompt_of[row] = self._entries[last], self._prompt_of[last]
        if self.states is not None and row != last:
            self.states.move(last, row)
        self._entries[last] = -1
        del self._prompt_of[last]
        if not last:
            self.settle(0.0)
        elif self.tables is None:
            self.settle()
        self._read = None

    def roll_back(self, columns_B: np.ndarray) -> None:
        """Free pieces that hold nothing but tokens which were tried and wrong, as if none had been.

        Args:
            columns_B: Where the next token of each row stands in its completion.
        """
        is_wrong_BP = (self._entries[: len(columns_B)] >= 0) & (self._starts > columns_B[:, None])
        if is_wrong_BP.any():
            for row, piece in np.argwhere(is_wrong_BP).tolist():
                self._pieces[piece].remove(int(self._entries[row, piece]))
                self._entries[row, piece] = -1
            if self.tables is None:
                self.settle()
            self._read = None

    # ---- memory -----------------------------------------------------------------------------------

    @property
    def allocated_tokens(self) -> int:
        """KV tokens there is memory for, states among them."""
        num_tokens = sum(shelf.room * shelf.num_tokens for shelf in (*self._pieces, *self._prompt_shelves.values()))
        return num_tokens + (self._state_room + len(self.prompts)) * self.shape.pieces.state

    def growth(self, columns_B: np.ndarray) -> int:
        """KV tokens that a step will allocate for rows that enter their next piece: the arguments are as in prepare."""
        growth = 0
        for start, shelf in zip(self._starts, self._pieces, strict=True):
            entering = int((columns_B == start).sum()) if start else 0
            room = shelf.room_for(shelf.num_entries + entering, self.most_entries)
            growth += (room - shelf.room) * shelf.num_tokens
        return growth

    def tokens_of(self, lengths: Sequence[int]) -> int:
        """KV tokens that rows of so many tokens take, each at least a piece and its state."""
        if not lengths:
            return 0
        pieces = self._ends[np.searchsorted(self._ends, np.maximum(lengths, 1))].sum()
        return int(pieces) + len(lengths) * self.shape.pieces.state

    def settle(self, slack: float | None = None) -> None:
        """Close the holes that completions have left, and give memory back.

        Args:
            slack: Half of what is not used is given back where that is more than this share of what is used; 0 for all
                of it, of prompts too. By default holes are closed, and none is given back.
        """
        for shelf, entry_of in zip(self._pieces, self._entries.T, strict=True):
            for entry, now in shelf.settle(slack).items():
                entry_of[entry_of == entry] = now
        if slack == 0:
            for shelf in self._prompt_shelves.values():
                shelf.settle(slack)
            self._read = None
        if slack is not None and self.states is not None and self._state_room > (1 + slack) * self.num_rows:
            like = {name: tensor[0] for name, tensor in self.states.tensors.items()}
            self._resize_states(self.num_rows + int(self.num_rows * slack / 2), like)

    # ---- a step -----------------------------------------------------------------------------------

    def prepare(
        self,
        columns_B: np.ndarray,
        others: Mapping[str, np.ndarray] = MappingProxyType({}),
        rows_B: np.ndarray | None = None,
    ) -> dict[str, torch.Tensor]:
        """Make room for one new token a row, or for those of ``rows_B``, which may name a row several times.

        Args:
            columns_B: Where each token stands in its completion: after the one of the last step, unless that was wrong,
                which is written over. A token attends to none after its own column.
            others: What else the step needs on the device, where it goes in the same copy.
            rows_B: The row of each token; by default each row has one.

        Returns:
            The others there.
        """
        is_drafted = rows_B is not None
        if rows_B is None:
            rows_B = np.arange(len(columns_B))
        pieces_B = np.searchsorted(self._ends, columns_B, "right")
        entering_B = self._entries[rows_B, pieces_B] < 0
        if entering_B.any():
            for piece in np.unique(pieces_B[entering_B]).tolist():
                rows = np.unique(rows_B[entering_B & (pieces_B == piece)])
                self._entries[rows, piece] = self._pieces[piece].add(len(rows), self.most_entries)
            self._read = None
        if self.tables is not None:
            arrays = {**others, "columns": columns_B, **self._tabulate()}
            if is_drafted:
                arrays["rows"] = rows_B
            there = in_one_copy(arrays, self.shape.device)
            self.tables.take(there, len(columns_B))
            return there
        longest = int(columns_B.max()) + 1
        if self._read is None or is_drafted or self._is_drafted or longest > len(self._completion_L):
            self._is_drafted = is_drafted
            return self._lay_out(columns_B, longest, others, rows_B)
        self._moving += 1
        for sight in [*self._masks]:
            if sight == ALL:  # each token attends to one column more
                self._masks[sight][:, 0, 0].scatter_(1, self._columns_B[:, None], 0.0)
            else:  # what slides, or is cut, is computed again
                del self._masks[sight]
        return in_one_copy(others, self.shape.device)

    def _tabulate(self) -> dict[str, np.ndarray]:
        """Return what the tables are to hold; nothing where they hold it."""
        assert self.tables is not None
        if self._read is not None:
            return {}
        self.settle(self._slack)
        self._read = []
        return self.tables.laid_out(
            self._pieces,
            self._prompt_shelves,
            np.append(self._starts, self._ends[-1:]),
            self._entries[: self.num_rows],
            [(own.room, own.entry, own.num_tokens) for own in self._prompt_of],
        )

    def _lay_out(
        self, columns_B: np.ndarray, longest: int, others: Mapping[str, np.ndarray], rows_B: np.ndarray
    ) -> dict[str, torch.Tensor]:
        """Lay out who reads what, after rows or prompts have come, gone or moved.

        Completions come first, whose columns are then their positions; all rows read the first pieces, in order.

        Args:
            columns_B: As in ``prepare``.
            longest: The tokens of the longest completion, the new ones included; little more is read of any.
            others: As in ``prepare``.
            rows_B: As in ``prepare``.
        """
        self.settle(self._slack)
        width = -(-longest // _WIDTH_STEP) * _WIDTH_STEP
        self._read = []
        for piece, (start, shelf) in enumerate(zip(self._starts.tolist(), self._pieces, strict=True)):
            its_width = min(shelf.num_tokens, width - start)
            if shelf.num_entries and its_width > 0:
                shelf.aim(self._entries[rows_B, piece], its_width, columns_B - start)
                self._read.append(shelf)
        width = min(width, self.max_tokens)
        rooms, entries, lengths = np.array([(own.room, own.entry, own.num_tokens) for own in self._prompt_of])[rows_B].T
        prompt_columns, valid = [], []
        for room, shelf in self._prompt_shelves.items():
            if (member_B := rooms == room).any():
                shelf.aim(np.where(member_B, entries, -1), room)
                self._read.append(shelf)
                prompt_columns.append(np.arange(room))
                valid.append((prompt_columns[-1] < lengths[:, None]) & member_B[:, None])
        # What moves on by one with each token comes first.
        moving, fixed = [columns_B], [lengths, np.concatenate(prompt_columns)]
        for shelf in self._read:
            moving += shelf.targets.values()
            fixed += shelf.layout.values()
        own = {"valid": np.concatenate(valid, -1), "layout": np.concatenate([*moving, *fixed], None)}
        there = in_one_copy({**others, **own}, self.shape.device)
        self._prompt_valid_BL, layout = there.pop("valid"), there.pop("layout")
        self._moving = layout[: sum(map(np.size, moving))]
        parts = iter(layout.split([*map(np.size, [*moving, *fixed])]))
        self._columns_B = next(parts)
        for shelf in self._read:
            shelf.targets = dict(zip(shelf.targets, parts, strict=False))
        self._prompt_lengths_B, self._prompt_L = next(parts), next(parts)
        for shelf in self._read:
            shelf.places = dict(zip(shelf.layout, parts, strict=False))
        self._completion_L = torch.arange(width, device=self.shape.device)
        self._masks.clear()
        return there

    def attend(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Write each token's key and value, then attend over its row's prompt and its completion so far."""
        if self.tables is not None:
            return self.tables.attend(layer, inputs)
        rows, heads, _, size = inputs.query.shape
        kv_heads = self.shape.layers[layer].num_heads
        # The query heads that share a KV head stand together, so keys are not repeated.
        query = inputs.query.reshape(rows * kv_heads, heads // kv_heads, size)
        key, value = inputs.key.reshape(-1, size), inputs.value.reshape(-1, inputs.value.shape[-1])
        assert self._read is not None
        scores = torch.cat([shelf.scores(layer, query, key, value) for shelf in self._read], -1)
        scores = scores.view(rows, kv_heads, heads // kv_heads, -1)
        if (mask := self._masks.get(inputs.sight)) is None:  # addends of each row's scores, (rows, 1, 1, columns)
            columns_B1 = self._columns_B[:, None]
            valid_BL = torch.cat([self._completion_L <= columns_B1, self._prompt_valid_BL], -1)
            if inputs.sight != ALL:
                lengths_B1 = self._prompt_lengths_B[:, None]
                absolute_BL = torch.cat([self._completion_L + lengths_B1, self._prompt_L.expand(rows, -1)], -1)
                valid_BL &= inputs.sight.sees(lengths_B1 + columns_B1, absolute_BL)
            mask_BL = torch.zeros(valid_BL.shape, dtype=torch.float32, device=valid_BL.device)
            mask = self._masks[inputs.sight] = mask_BL.masked_fill_(~valid_BL, -torch.inf)[:, None, None]
        if inputs.cap is None and inputs.sinks is None:
            torch.add(mask, scores, alpha=inputs.scaling, out=scores)
            weights = scores.softmax(-1)
        else:
            weights = attention_weights(scores[..., None, :] * inputs.scaling, inputs, mask[..., None, :])
        weights = weights.to(query.dtype).view(rows * kv_heads, heads // kv_heads, -1)
        output, start = None, 0
        for shelf in self._read:
            output = shelf.mix(layer, weights[..., start : start + shelf.width], output)
            start += shelf.width
        assert output is not None
        return output.to(query.dtype).view(rows, heads, 1, -1)


class KVBudget:
    """Limits of the slots: KV tokens, and prompt tokens that go through the model at once.

    Where memory runs out, the part that failed shrinks: KV tokens to four fifths of the most that were held, prompts to
    half. After some steps without a shortage both double, up to what was granted; with each shortage it takes twice as
    many steps, so that little is lost where the shortage lasts, and nothing where it passes.

    ``tokens`` and ``prefill_tokens`` are what there is now, ``granted_tokens`` the KV tokens that there were to begin
    with.

    Args:
        granted_bytes: The memory for keys and values.
        bytes_per_token: What those of a token take.
        prefill_tokens: Prompt tokens at once.
    """

    SHRINKAGE = 0.8
    PATIENCE = 8

    def __init__(self, granted_bytes: int, bytes_per_token: int, prefill_tokens: int) -> None:
        self._granted_bytes, self.bytes_per_token = granted_bytes, bytes_per_token
        self.tokens = self.granted_tokens = granted_bytes // bytes_per_token
        self._granted_prefill = self.prefill_tokens = prefill_tokens
        self._most_held = 0
        self._patience, self._num_good = self.PATIENCE, 0

    def measure(self, bytes_per_token: int) -> None:
        """Count tokens of another size: autocast decides in which dtype keys and values come."""
        self.tokens = self.tokens * self.bytes_per_token // bytes_per_token
        self.bytes_per_token, self.granted_tokens = bytes_per_token, self._granted_bytes // bytes_per_token

    def shrink(self, allocated_tokens: int, num_preempted: int, is_prefilling: bool) -> str:
        """Go on with less after memory ran out; return what the user is told.

        Args:
            allocated_tokens: KV tokens there were when it did.
            num_preempted: Completions that had to be set aside for it.
            is_prefilling: Whether memory ran out while prompts or prefixes went through the model.
        """
        if is_prefilling and self.prefill_tokens > 1:
            self.prefill_tokens //= 2
        else:
            self.tokens = min(self.tokens, int(self.SHRINKAGE * max(self._most_held, allocated_tokens)))
        self._patience, self._num_good = 2 * self._patience, 0
        return (
            f"Memory ran out with {allocated_tokens} KV tokens allocated; {num_preempted} completions were set aside "
            f"and go on with at most {self.tokens}, and prompts in pieces of {self.prefill_tokens} tokens; lower "
            "num_slots, kv_memory or prefill_tokens to keep this from happening."
        )

    def note_success(self, allocated_tokens: int) -> None:
        """A step has passed without a shortage."""
        self._most_held = max(self._most_held, allocated_tokens)
        self._num_good += 1
        if self._num_good % self._patience == 0:
            self.tokens = min(2 * self.tokens, self.granted_tokens)
            self.prefill_tokens = min(2 * self.prefill_tokens, self._granted_prefill)


def check_request(request: Request, sampling: SamplingParams, context: int, budget: KVBudget, layout: Pieces) -> None:
    """Check one request.

    Args:
        request: Request that is to be admitted.
        sampling: That of the requests in flight.
        context: The most tokens that the model takes, prompt and completion together.
        budget: The KV tokens that were granted.
        layout: How they are taken.

    Raises:
        ValueError: Its sampling is another, its prompt is empty, or it fits the context or the memory at no time.
    """
    if request.sampling != sampling:
        raise ValueError(
            f"Sample {request.path} of prompt {request.prompt.prompt_id!r} has other sampling parameters than the "
            "requests in flight, and in SlotGenerator these must share their sampling parameters; submit it once they "
            "have ended, or take a generator of vLLM's."
        )
    prompt, num_tokens = request.prompt, len(request.prompt.token_ids)
    if not num_tokens:
        raise ValueError(f"Prompt {prompt.prompt_id!r} has no tokens; a completion needs at least one.")
    if num_tokens + sampling.room > context:
        raise ValueError(
            f"Prompt {prompt.prompt_id!r} has {num_tokens} tokens and up to {sampling.room} are to follow, but "
            f"the model's context is {context}; lower sampling.max_tokens or data.max_prompt_tokens."
        )
    if request.prefix.num_tokens:
        request.check_prefix()
    smallest = smallest_budget(layout, num_tokens, sampling.room)
    if smallest > budget.granted_tokens:
        raise ValueError(
            f"Prompt {prompt.prompt_id!r} and {sampling.room} tokens of completion take "
            f"{_mib(smallest * budget.bytes_per_token)} of keys and values, but kv_memory allows "
            f"{_mib(budget.granted_tokens * budget.bytes_per_token)}; give at least the former."
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.2f}GiB"
