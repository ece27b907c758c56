"""Rollouts to micro-batches under a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

from lit_grpo.types import MicroBatch, Rollout
from lit_grpo.update.layout import in_rows, packed
from lit_grpo.update.packing import pack_groups, pack_rows


def num_row_tokens(rollout: Rollout) -> int:
    """Tokens of a rollout by itself: the prompt and the completion."""
    return len(rollout.prompt.token_ids) + rollout.completion.num_tokens


@dataclass(frozen=True)
class MicroBatches(Sequence[MicroBatch]):
    """The micro-batches of a step, each laid out when it is asked for, so that only one of them takes memory.

    Args:
        rollouts: The step's.
        advantages_C: One a rollout.
        shared_prefix: Lay them out packed; otherwise in rows.
        rows: Of each micro-batch, the places of its rollouts; none make an empty one.
    """

    rollouts: Sequence[Rollout]
    advantages_C: Sequence[float]
    shared_prefix: bool
    rows: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...

    @overload
    def __getitem__(self, index: slice) -> MicroBatches: ...

    def __getitem__(self, index: int | slice) -> MicroBatch | MicroBatches:
        if isinstance(index, slice):
            return replace(self, rows=self.rows[index])
        rows = self.rows[index]
        members, advantages = [self.rollouts[row] for row in rows], [self.advantages_C[row] for row in rows]
        return make_micro_batch(members, advantages, self.shared_prefix, rows)

    def and_empty(self, number: int) -> MicroBatches:
        """Return these, and as many empty ones behind them."""
        return replace(self, rows=self.rows + ((),) * number)


def make_micro_batches(
    rollouts: Sequence[Rollout], advantages_C: Sequence[float], max_tokens: int, shared_prefix: bool = True
) -> MicroBatches:
    """Cut rollouts into micro-batches of at most ``max_tokens``, the largest first.

    Best fit by length packs them. A prompt counts once for all of its completions in a micro-batch. The largest come
    first, so that a shortage of memory shows at once.

    Args:
        rollouts: In any order; those with the same prompt tokens share it.
        advantages_C: One a rollout.
        max_tokens: Prompt and completion tokens of a micro-batch; in rows, padding counts as well.
        shared_prefix: Lay them out packed; otherwise in rows (see :class:`~lit_grpo.types.MicroBatch`).

    Raises:
        ValueError: A rollout is longer than ``max_tokens``; the message says the smallest that works.
    """
    longest = max(map(num_row_tokens, rollouts), default=0)
    if longest > max_tokens:
        raise ValueError(
            f"max_tokens_per_micro_batch is {max_tokens}, but a prompt with its completion has {longest} tokens; "
            f"set it to at least {longest}."
        )
    chosen = _packed_rows(rollouts, max_tokens) if shared_prefix else pack_rows(_lengths(rollouts), max_tokens)
    return MicroBatches(rollouts, advantages_C, shared_prefix, tuple(map(tuple, chosen)))


def make_micro_batch(
    rollouts: Sequence[Rollout],
    advantages_C: Sequence[float],
    shared_prefix: bool = True,
    rows_C: Sequence[int] | None = None,
) -> MicroBatch:
    """Lay all these rollouts out as one micro-batch.

    ``rows_C`` are their places among the rollouts of the step; by default they are the step's.
    """
    places = range(len(rollouts)) if rows_C is None else rows_C
    return (packed if shared_prefix else in_rows)(rollouts, advantages_C, places)


def _lengths(rollouts: Sequence[Rollout]) -> list[int]:
    return [num_row_tokens(rollout) for rollout in rollouts]


def _packed_rows(rollouts: Sequence[Rollout], max_tokens: int) -> list[list[int]]:
    """The rollouts of each packed micro-batch."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row, rollout in enumerate(rollouts):
        by_prompt.setdefault(rollout.prompt.token_ids, []).append(row)
    order = [row for rows in by_prompt.values() for row in rows]
    lengths = [[rollouts[row].completion.num_tokens for row in rows] for rows in by_prompt.values()]
    bins = pack_groups([len(prompt) for prompt in by_prompt], lengths, max_tokens)
    return [[order[item] for part in parts for item in part] for parts in bins]
