"""Tokens that rows try ahead in a decode step, which keeps those that it would have sampled: what proposes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lit_grpo.rollout.slots.drafts.draft import Draft

if TYPE_CHECKING:
    from lit_grpo.rollout.slots.kv.cache import SlotCache
    from lit_grpo.rollout.slots.rows import SampledStep, TokenRows
    from lit_grpo.types import GroupKey, Request, SamplingParams

__all__ = ["Draft", "Drafter"]


class Drafter:
    """Proposes tokens that may follow the last ones of rows. Wrong ones cost time, and change no sample.

    ``most_tokens`` is the most that it proposes for a row in a step.
    """

    most_tokens: int

    def expect(self, requests: Sequence[Request], expected: Sequence[float] | None) -> None:
        """Note how many tokens requests that enter are expected to sample in all, each of them; None if unknown."""

    def most(self, rows: TokenRows, num_rows: int, room: int) -> np.ndarray:
        """Decide how many tokens each row may try in the next step; it may be asked twice before a step.

        By default equally many, as far as there is room for them.

        Args:
            rows: All rows.
            num_rows: The first ones, which may try some; all others enter in this step.
            room: The most tokens that all rows together can try. More are cut, the last rows' first.

        Returns:
            int64, shape (num_rows,). If all are 0 the step is one without drafts, and may be launched ahead.
        """
        return np.full(num_rows, min(self.most_tokens, max(room // max(num_rows, 1), 1)))

    def draft(
        self, rows: TokenRows, most_B: np.ndarray, cache: SlotCache, sampling: SamplingParams
    ) -> Sequence[Sequence[int]]:
        """Return tokens that may come after the last token of each row, likeliest first; none for no proposal.

        Args:
            rows: All rows, on the host.
            most_B: The most tokens of each of the first rows: more are cut. It keeps rows within their limits, and from
                passing points at which they are observed.
            cache: Keys, values and states of the rows, without those of their last tokens.
            sampling: How tokens are sampled.
        """
        raise NotImplementedError

    def took(self, rows: TokenRows, step: SampledStep, accepted_B: np.ndarray) -> Mapping[str, int]:
        """Learn from a step, drafted or not, whose tokens the rows have.

        Args:
            rows: All rows; none has left since the step.
            step: The step: ``step.draft`` is what was tried, ``step.places`` the place of each row's last token, and
                ``step.hidden_BD`` the hidden states at all places.
            accepted_B: How many of its drafted tokens each row got, beyond the one that a step brings anyway.

        Returns:
            How many of these tokens were drafted from each source, by its name.
        """
        raise NotImplementedError

    def left(self, rows: TokenRows, row: int, ended: bool) -> None:
        """Note that a row leaves: its completion has ended, or may come back."""

    def release(self, groups: Iterable[GroupKey]) -> None:
        """Note that no more requests of these prompts will come, and none is in flight."""
