"""Rows of the harder embedded task: puzzles made on the spot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from lit_grpo.data.sources import RowSource
from lit_grpo.policy.puzzles import FEWEST, MOST, Split, draw_puzzle

OF_THE_FEWEST: dict[Split, int] = {"train": 14936, "validation": 3240}
"""How many puzzles of three characters there are; of four there are millions."""


class KnightsRows(RowSource):
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
        if split not in ("train", "validation"):
            raise ValueError(f"split must be 'train' or 'validation', not {split!r}.")
        if not FEWEST <= min_characters <= MOST:
            raise ValueError(f"min_characters must be from {FEWEST} to {MOST}, not {min_characters}.")
        if not min_characters <= max_characters <= MOST:
            raise ValueError(f"max_characters must be from {min_characters} to {MOST}, not {max_characters}.")
        if num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, not {num_rows}.")
        if max_characters == FEWEST and num_rows > OF_THE_FEWEST[split]:
            raise ValueError(
                f"num_rows is {num_rows}, but the {split} split has only {OF_THE_FEWEST[split]} puzzles with "
                f"max_characters={FEWEST}; ask for fewer rows or raise max_characters."
            )
        self.split: Split = split
        self.num_rows, self.seed = num_rows, seed
        self.min_characters, self.max_characters = min_characters, max_characters

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one dict a puzzle."""
        rng = random.Random(f"{self.split}/{self.seed}")
        seen: set[str] = set()
        while len(seen) < self.num_rows:
            puzzle = draw_puzzle(rng, self.split, self.min_characters, self.max_characters)
            if puzzle.prompt not in seen:
                seen.add(puzzle.prompt)
                yield {"prompt": puzzle.prompt, "answer": puzzle.answer, "num_characters": puzzle.num_characters}
