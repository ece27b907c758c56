"""A small game in text: a ball falls, and a paddle on the bottom row is to be under it.

The environment has TRL's shape (its example ``grpo_catch``), with ``done``, a reward by turn and ``state`` beside it.
"""

from __future__ import annotations

import random
from typing import Any

from lit_grpo.tasks.drawn import DrawnRows, Split, split_of

ROWS, COLUMNS = 6, 5
PROMPT = "A ball (o) falls by a row with each of your moves. Bring the paddle (_) under it by the last row.\n\n"


class Catch:
    """The game: ``left``, ``right`` or ``stay``, until the ball is down."""

    def reset(self, seed: int, **_: Any) -> str:
        rng = random.Random(seed)
        self.height, self.ball, self.paddle = 0, rng.randrange(COLUMNS), rng.randrange(COLUMNS)
        self._distance = self._before = abs(self.ball - self.paddle)
        return self.board

    @property
    def board(self) -> str:
        rows = [["."] * COLUMNS for _ in range(ROWS)]
        rows[-1][self.paddle] = "_"
        rows[self.height][self.ball] = "o"
        return "\n".join(map("".join, rows))

    @property
    def done(self) -> bool:
        return self.height == ROWS - 1

    def move(self, direction: str) -> str:
        """Move the paddle, while the ball falls by a row.

        Args:
            direction: left, right or stay.
        """
        steps = {"left": -1, "right": 1, "stay": 0}
        if direction not in steps:
            raise ValueError("direction must be left, right or stay")
        if self.done:
            raise ValueError("the ball is down")
        self.height += 1
        self.paddle = min(max(self.paddle + steps[direction], 0), COLUMNS - 1)
        self._before, self._distance = self._distance, abs(self.ball - self.paddle)
        return self.board

    def turn_reward(self) -> float:
        """Return by how much the paddle has come nearer to the ball's column."""
        gained, self._before = self._before - self._distance, self._distance
        return gained / COLUMNS

    def get_reward(self) -> float:
        return float(self.done and self.ball == self.paddle)

    def state(self) -> dict[str, int]:
        return dict(vars(self))

    def restore(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class CatchRows(DrawnRows):
    """Games of :class:`Catch`: a row has the columns ``prompt`` and ``seed``.

    The embedded policy ``tiny_catch`` has been warm-started on the train split. There are 25 different beginnings, so
    games of the splits differ by their seeds alone.

    Args:
        num_rows: Number of games to draw.
        split: Split of the games: ``train`` or ``validation``.
        seed: Seed of the draw of games from the split.
    """

    def __init__(self, num_rows: int = 1024, split: Split = "train", seed: int = 0) -> None:
        super().__init__(num_rows, split, seed)

    def key(self, row: dict[str, Any]) -> str:
        return str(row["seed"])

    def draw(self, rng: random.Random) -> dict[str, Any]:
        while True:
            seed = rng.randrange(2**31)
            if split_of(seed) == self.split:
                return {"prompt": PROMPT, "seed": seed}
