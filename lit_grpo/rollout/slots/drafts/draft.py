"""Tokens that are tried in a step, laid out as what goes through the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Draft:
    """Tokens tried in a step: queries after one for each row, a row's one after another.

    Attributes:
        tokens_BK: Those of each row, and -1 for none.
        rows_N: The row of each query, those for the rows' last tokens first.
        ahead_N: How many tokens after its row's last one it stands.
        first_B: The place of each row's first drafted token among the queries.
    """

    tokens_BK: np.ndarray
    rows_N: np.ndarray
    ahead_N: np.ndarray
    first_B: np.ndarray

    @classmethod
    def of(cls, proposals: Sequence[Sequence[int]], most_B: np.ndarray, vocab_size: int) -> Draft | None:
        """Return the first ``most_B`` tokens of what is proposed for each row; None where that is nothing.

        Raises:
            ValueError: A token is not in the vocabulary.
        """
        cut = [[*tokens[:most]] for tokens, most in zip(proposals, most_B.tolist(), strict=True)]
        counts_B = np.array([*map(len, cut)])
        if not counts_B.any():
            return None
        is_there_BK = np.arange(counts_B.max()) < counts_B[:, None]
        tokens_BK = np.full(is_there_BK.shape, -1)
        tokens_BK[is_there_BK] = tokens_D = np.concatenate(cut).astype(np.int64)
        if len(wrong_D := tokens_D[(tokens_D < 0) | (tokens_D >= vocab_size)]):
            raise ValueError(
                f"A drafter proposes token {wrong_D[0]}, but the policy's vocabulary has tokens 0 to {vocab_size - 1}; "
                "mend the drafter, or set model.generator.drafts to off."
            )
        rows_D, places_D = np.nonzero(is_there_BK)
        rows_B = np.arange(len(cut))
        return cls(
            tokens_BK,
            np.concatenate([rows_B, rows_D]),
            np.concatenate([0 * rows_B, 1 + places_D]),
            len(cut) + np.cumsum(counts_B) - counts_B,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.rows_N) - len(self.tokens_BK)
