"""Rows that are drawn: the tasks of the embedded policies."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from lit_grpo.data.sources import RowSource
from lit_grpo.policy.exercises import LARGEST_DIVISOR, MOST_STEPS, SMALLEST_DIVISOR, Remainder, draw_exercise
from lit_grpo.policy.puzzles import FEWEST, MOST, draw_puzzle
from lit_grpo.policy.splits import Split

PUZZLES_OF_THE_FEWEST: dict[Split, int] = {"train": 14936, "validation": 3240}
"""How many puzzles of three characters there are; of four there are millions."""


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
        """Draw a row of the split, which may have come before."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one dict a row."""
        rng = random.Random(f"{self.split}/{self.seed}")
        seen: set[str] = set()
        while len(seen) < self.num_rows:
            row = self.draw(rng)
            if row["prompt"] not in seen:
                seen.add(row["prompt"])
                yield row


class ArithmeticRows(DrawnRows):
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
        super().__init__(num_rows, split, seed)
        if not SMALLEST_DIVISOR <= max_divisor <= LARGEST_DIVISOR:
            raise ValueError(f"max_divisor must be from {SMALLEST_DIVISOR} to {LARGEST_DIVISOR}, not {max_divisor}.")
        if not 1 <= max_steps <= MOST_STEPS:
            raise ValueError(f"max_steps must be from 1 to {MOST_STEPS}, not {max_steps}.")
        self.max_divisor, self.max_steps = max_divisor, max_steps
        available = self._count_exercises()
        if num_rows > available:
            raise ValueError(
                f"num_rows is {num_rows}, but the {split} split has only {available} exercises with "
                f"max_divisor={max_divisor} and max_steps={max_steps}; ask for fewer rows or raise these."
            )

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw an exercise."""
        exercise = draw_exercise(rng, self.split, self.max_divisor, self.max_steps)
        return {"prompt": exercise.prompt, "answer": exercise.answer, "num_steps": exercise.num_steps}

    def _count_exercises(self) -> int:
        return sum(
            Remainder(number, divisor).split == self.split
            for divisor in range(SMALLEST_DIVISOR, self.max_divisor + 1)
            for number in range(divisor, (self.max_steps + 1) * divisor)
        )


class KnightsRows(DrawnRows):
    """Knights and knaves, each puzzle once and with one solution, none in both splits.

    A row has the columns ``prompt`` (``A=ABB/CAC|BC:``), ``answer`` (``aBC``: A is a knave, B and C are knights) and
    ``num_characters``. Puzzles that differ by names and by order alone are in one split. The embedded policy
    ``tiny_knights`` has been warm-started on the train split.

    Args:
        num_rows: How many rows.
        split: Which puzzles: ``train`` or ``validation``; none is in both.
        seed: Decides which puzzles of the split are drawn, and their order.
        min_characters: The fewest characters of a puzzle, from 3 to 7.
        max_characters: The most, from there to 7.

    Raises:
        ValueError: A limit is out of its range, or the split has fewer puzzles than ``num_rows``.
    """

    def __init__(
        self,
        num_rows: int = 2048,
        split: Split = "train",
        seed: int = 0,
        min_characters: int = FEWEST,
        max_characters: int = MOST,
    ) -> None:
        super().__init__(num_rows, split, seed)
        if not FEWEST <= min_characters <= MOST:
            raise ValueError(f"min_characters must be from {FEWEST} to {MOST}, not {min_characters}.")
        if not min_characters <= max_characters <= MOST:
            raise ValueError(f"max_characters must be from {min_characters} to {MOST}, not {max_characters}.")
        if max_characters == FEWEST and num_rows > PUZZLES_OF_THE_FEWEST[split]:
            raise ValueError(
                f"num_rows is {num_rows}, but the {split} split has only {PUZZLES_OF_THE_FEWEST[split]} puzzles with "
                f"max_characters={FEWEST}; ask for fewer rows or raise max_characters."
            )
        self.min_characters, self.max_characters = min_characters, max_characters

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw a puzzle."""
        puzzle = draw_puzzle(rng, self.split, self.min_characters, self.max_characters)
        return {"prompt": puzzle.prompt, "answer": puzzle.answer, "num_characters": puzzle.num_characters}
