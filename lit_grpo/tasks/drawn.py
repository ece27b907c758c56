"""The common part of drawn tasks: rows drawn one after another, two splits, and sizes that are rarer the larger."""

from __future__ import annotations

import random
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Set
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from lit_grpo.data.sources import RowSource
from lit_grpo.limits import Limit, checks_arguments

Split = Literal["train", "validation"]
_VALIDATION_ONE_IN = 5


def split_of(drawn: int | str) -> Split:
    """Return the split of an exercise by its number, or by the hash of its text."""
    number = zlib.crc32(drawn.encode()) if isinstance(drawn, str) else drawn
    return "train" if number % _VALIDATION_ONE_IN else "validation"


MOST_ROWS = 10**6
"""The most rows that are drawn; more take hours and all memory."""


def geometric(rng: random.Random, least: int, most: int, more: float) -> int:
    """Draw a number from ``least`` to ``most``: it grows by one with probability ``more``, again and again."""
    number = least
    while number < most and rng.random() < more:
        number += 1
    return number


class DrawnRows(RowSource):
    """Rows with a ``prompt`` that are drawn one after another, each prompt once.

    A task that cannot count its rows beforehand sets ``most_draws``: after so many draws in a row that bring nothing
    new, there are taken to be no more.

    Args:
        num_rows: Number of rows to draw.
        split: Split of the rows: ``train`` or ``validation``; no prompt is in both.
        seed: Seed of the draw of rows from the split, and of their order.

    Raises:
        ValueError: There is no such split, or ``num_rows`` is below 1.
    """

    most_draws: ClassVar[int | None] = None

    @checks_arguments()
    def __init__(self, num_rows: Annotated[int, Limit(ge=1, le=MOST_ROWS)], split: Split, seed: int) -> None:
        self.split: Split = split
        self.num_rows, self.seed = num_rows, seed

    @abstractmethod
    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw a row of the split; a row may be drawn twice."""

    def key(self, row: dict[str, Any]) -> str:
        """Return what two rows may not share: by default the prompt, a text or a conversation."""
        return str(row["prompt"])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one dict a row."""
        rng = random.Random(f"{self.split}/{self.seed}")
        seen: set[str] = set()
        while len(seen) < self.num_rows:
            row = self._new_row(rng, seen)
            seen.add(self.key(row))
            yield row

    def _new_row(self, rng: random.Random, seen: Set[str]) -> dict[str, Any]:
        for _ in count() if self.most_draws is None else range(self.most_draws):
            if self.key(row := self.draw(rng)) not in seen:
                return row
        raise ValueError(
            f"{self.describe()} has only {len(seen)} rows of the {self.split} split, and num_rows is {self.num_rows}; "
            "ask for fewer rows, or for more kinds of them."
        )
