"""The common part of drawn tasks: rows drawn one after another, two splits, and sizes that are rarer the larger."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Literal

from lit_grpo.data.sources import RowSource

Split = Literal["train", "validation"]
_VALIDATION_ONE_IN = 5


def split_of(number: int) -> Split:
    """Return the split of an exercise with this hash."""
    return "train" if number % _VALIDATION_ONE_IN else "validation"


def geometric(rng: random.Random, least: int, most: int, more: float) -> int:
    """Draw a number from ``least`` to ``most``: it grows by one with probability ``more``, again and again."""
    number = least
    while number < most and rng.random() < more:
        number += 1
    return number


class DrawnRows(RowSource):
    """Rows with a ``prompt`` that are drawn one after another, each prompt once.

    Args:
        num_rows: How many rows.
        split: ``train`` or ``validation``; no prompt is in both.
        seed: Decides which rows of the split are drawn, and their order.

    Raises:
        ValueError: There is no such split, or ``num_rows`` is below 1.
    """

    def __init__(self, num_rows: int, split: Split, seed: int) -> None:
        if split not in ("train", "validation"):
            raise ValueError(f"split must be 'train' or 'validation', not {split!r}.")
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, not {num_rows}.")
        self.split: Split = split
        self.num_rows, self.seed = num_rows, seed

    @abstractmethod
    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw a row of the split; a row may be drawn twice."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one dict a row."""
        rng = random.Random(f"{self.split}/{self.seed}")
        seen: set[str] = set()
        while len(seen) < self.num_rows:
            row = self.draw(rng)
            prompt = str(row["prompt"])  # a text or a conversation
            if prompt not in seen:
                seen.add(prompt)
                yield row
