"""Who decoded when."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, overload

from lit_grpo.scheduling.jobs import Key


class Span(NamedTuple):
    """A slot decodes one completion from ``start`` to ``end``, in steps or seconds.

    ``group`` is a number that completions of one prompt share. A completion that was set aside has several spans.
    """

    slot: int
    start: float
    end: float
    group: int


class SpanLog(Sequence[tuple[Key, Span]]):
    """The spans of a rollout, in steps, with the completions that they are of; 20 bytes each."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], int] = {}  # numbered in the order in which they came
        self._names: list[tuple[str, int]] = []
        self._columns = [array("i") for _ in range(5)]

    def group(self, group: tuple[str, int]) -> int:
        """Return the number of a group, ``(prompt_id, visit)``; a new one gets the next."""
        number = self._groups.setdefault(group, len(self._names))
        if number == len(self._names):
            self._names.append(group)
        return number

    def add(self, key: Key, slot: int, start: int, end: int) -> None:
        """Note that a slot decoded a completion from step ``start`` to step ``end``."""
        row = (slot, start, end, self.group(key[:2]), key[2])
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, index: int) -> tuple[Key, Span]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[Key, Span]]: ...
    def __getitem__(self, index: int | slice) -> tuple[Key, Span] | list[tuple[Key, Span]]:
        """Return a span and the key of its completion, ``(prompt_id, visit, sample_id)``."""
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        slot, start, end, group, sample_id = (column[index] for column in self._columns)
        return (*self._names[group], sample_id), Span(slot, start, end, group)
