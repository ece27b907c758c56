"""Rows of the embedded task: exercises made on the spot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from lit_grpo.data.sources import RowSource
from lit_grpo.policy.exercises import LARGEST_DIVISOR, MOST_STEPS, SMALLEST_DIVISOR, Remainder, Split, draw_exercise


class ArithmeticRows(RowSource):
    """Remainders by repeated subtraction, each exercise once, none in both splits.

    A row has the columns ``prompt`` (``312%47=``), ``answer`` (``030``) and ``num_steps`` (how many
    subtractions the working has). The embedded policy, ``tiny``, has been warm-started on the train split
    of the default limits.

    Args:
        num_rows: How many rows.
        split: Which exercises: ``train`` or ``validation``; no exercise is in both.
        seed: Decides which exercises of the split are drawn, and their order.
        max_divisor: The largest divisor, from 11 to 49.
        max_steps: The most subtractions of a working, from 1 to 18.

    Raises:
        ValueError: A limit is out of its range, or the split has fewer exercises than ``num_rows``.
    """

    def __init__(
        self,
        num_rows: int = 2048,
        split: Split = "train",
        seed: int = 0,
        max_divisor: int = 39,
        max_steps: int = MOST_STEPS,
    ) -> None:
        if split not in ("train", "validation"):
            raise ValueError(f"split must be 'train' or 'validation', not {split!r}.")
        if not SMALLEST_DIVISOR <= max_divisor <= LARGEST_DIVISOR:
            raise ValueError(f"max_divisor must be from {SMALLEST_DIVISOR} to {LARGEST_DIVISOR}, not {max_divisor}.")
        if not 1 <= max_steps <= MOST_STEPS:
            raise ValueError(f"max_steps must be from 1 to {MOST_STEPS}, not {max_steps}.")
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, not {num_rows}.")
        self.split: Split = split
        self.num_rows, self.seed = num_rows, seed
        self.max_divisor, self.max_steps = max_divisor, max_steps
        available = self._count_exercises()
        if num_rows > available:
            raise ValueError(
                f"num_rows is {num_rows}, but the {split} split has only {available} exercises with "
                f"max_divisor={max_divisor} and max_steps={max_steps}; ask for fewer rows or raise these."
            )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one dict an exercise."""
        rng = random.Random(f"{self.split}/{self.seed}")
        seen: set[Remainder] = set()
        while len(seen) < self.num_rows:
            exercise = draw_exercise(rng, self.split, self.max_divisor, self.max_steps)
            if exercise not in seen:
                seen.add(exercise)
                yield {
                    "prompt": exercise.prompt,
                    "answer": exercise.answer,
                    "num_steps": exercise.num_steps,
                }

    def _count_exercises(self) -> int:
        return sum(
            Remainder(number, divisor).split == self.split
            for divisor in range(SMALLEST_DIVISOR, self.max_divisor + 1)
            for number in range(divisor, (self.max_steps + 1) * divisor)
        )
