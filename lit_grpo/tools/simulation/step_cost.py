"""Cost of a decode step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

LONGEST_S = 1e6


@dataclass(frozen=True)
class StepCost:
    """Seconds of a decode step: ``step_s + row_s x active rows + token_s x KV tokens held``.

    Args:
        step_s: Seconds that every step takes, such as reading the weights.
        row_s: Seconds for each row that decodes.
        token_s: Seconds for each token that the KV cache holds, a shared prompt counted once.
    """

    step_s: float
    row_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self) -> None:
        values = (self.step_s, self.row_s, self.token_s)
        if not all(0 <= value <= LONGEST_S for value in values):
            raise ValueError(f"The cost of a step is {values} in s: give three times from 0 s to {LONGEST_S:g} s.")

    def seconds(self, num_steps: np.ndarray, rows: np.ndarray, kv_tokens: np.ndarray) -> float:
        """Return the seconds of segments in which each row adds a token a step to the KV cache.

        Args:
            num_steps: Steps of each segment, shape (segments,).
            rows: Rows that decode in it, shape (segments,).
            kv_tokens: Tokens held in its first step, shape (segments,).
        """
        read = kv_tokens * num_steps + rows * (num_steps * (num_steps - 1) / 2)
        return float((self.step_s * num_steps + self.row_s * rows * num_steps + self.token_s * read).sum())

    @classmethod
    def fit(cls, rows: np.ndarray, kv_tokens: np.ndarray, seconds: np.ndarray) -> StepCost:
        """Return the cost with the least squared error on measured steps, no part of it negative.

        With three parts, non-negative least squares is the best of the plain solutions on each choice of parts that
        is not negative anywhere.

        Args:
            rows: Rows that decoded in each step, shape (steps,).
            kv_tokens: Tokens held in each step, shape (steps,).
            seconds: Seconds of each step, shape (steps,).
        """
        if not len(seconds):
            raise ValueError("There are 0 measured steps: a step cost is fitted to 1 or more.")
        columns = np.stack([np.ones(len(rows)), rows, kv_tokens], axis=1).astype(np.float64)
        scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
        best, least = np.zeros(3), float(np.square(seconds).sum())
        for parts in (list(parts) for size in (1, 2, 3) for parts in combinations(range(3), size)):
            solution = np.linalg.lstsq(columns[:, parts] / scale[parts], seconds, rcond=None)[0]
            error = float(np.square(columns[:, parts] / scale[parts] @ solution - seconds).sum())
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[parts] = solution / scale[parts]
        return cls(*best.tolist())
