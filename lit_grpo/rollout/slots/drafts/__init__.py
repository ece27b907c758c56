"""Tokens that rows try ahead in a decode step, which keeps those that it would have sampled: what proposes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from lit_grpo.rollout.slots.rows import SampledStep, TokenRows
    from lit_grpo.types import GroupKey


class Drafter(Protocol):
    """Proposes tokens that may follow the last ones of rows. Wrong ones cost time, and change no sample.

    ``most_tokens`` is the most that it proposes for a row in a step.
    """

    most_tokens: int

    def most(self, rows: TokenRows, num_rows: int, room: int) -> np.ndarray:
        """Decide how many tokens each row may try in the next step, by price; it may be asked twice before a step.

        Args:
            rows: All rows.
            num_rows: The first ones, which may try some; all others enter in this step.
            room: The most tokens that all rows together can try. More are cut, the last rows' first.

        Returns:
            int64, shape (num_rows,). If all are 0 the step is one without drafts, and may be launched ahead.
        """
        ...

    def draft(self, rows: TokenRows, most_B: np.ndarray, hidden_BD: torch.Tensor | None) -> Sequence[Sequence[int]]:
        """Return tokens that may come after the last token of each row, likeliest first; none for no proposal.

        Args:
            rows: All rows, on the host.
            most_B: The most tokens of each of the first rows: more are cut. It keeps rows within their limits, and from
                passing points at which they are observed.
            hidden_BD: The hidden states that last tokens were sampled from, those of the first rows: rows that have
                just been resumed have none. None before the first step.
        """
        ...

    def took(self, rows: TokenRows, step: SampledStep, accepted_B: np.ndarray) -> None:
        """Learn from a step, drafted or not, whose tokens the rows have.

        Args:
            rows: All rows; none has left since the step.
            step: The step: ``step.draft`` is what was tried, ``step.places`` the place of each row's last token, and
                ``step.hidden_BD`` the hidden states at all places.
            accepted_B: How many of its drafted tokens each row got, beyond the one that a step brings anyway.
        """
        ...

    def left(self, rows: TokenRows, row: int, ended: bool) -> None:
        """Note that a row leaves: its completion has ended, or may come back."""
        ...

    def release(self, groups: Iterable[GroupKey]) -> None:
        """Note that no more requests of these prompts will come, and none is in flight."""
        ...


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
        tokens_BK = np.full((len(cut), counts_B.max()), -1)
        is_there_BK = np.arange(tokens_BK.shape[1]) < counts_B[:, None]
        tokens_BK[is_there_BK] = tokens_D = np.concatenate([tokens for tokens in cut if tokens]).astype(np.int64)
        if tokens_D.min() < 0 or tokens_D.max() >= vocab_size:
            token = int(tokens_D[(tokens_D < 0) | (tokens_D >= vocab_size)][0])
            raise ValueError(
                f"A drafter proposes token {token}, but the policy's vocabulary has tokens 0 to {vocab_size - 1}; "
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
