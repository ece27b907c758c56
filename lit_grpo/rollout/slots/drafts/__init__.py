"""Tokens that rows try ahead in a decode step, which keeps those that it would have sampled: what proposes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lit_grpo.rollout.slots.drafts.draft import Draft

if TYPE_CHECKING:
    from lit_grpo.rollout.slots.attention import KVShape
    from lit_grpo.rollout.slots.kv.cache import SlotCache
    from lit_grpo.rollout.slots.rows import SampledStep, TokenRows
    from lit_grpo.types import GroupKey, Request, SamplingParams

__all__ = ["Draft", "Drafter"]


class Drafter:
    """Proposes tokens that may follow the last ones of rows. Wrong ones cost time, and change no sample.

    ``most_tokens`` is the most that it proposes for a row in a step.
    """

    most_tokens: int

    def beside(self, shape: KVShape) -> KVShape:
        """Return what the slots keep of a policy with this drafter; by default no more."""
        return shape

    def expect(self, requests: Sequence[Request], expected: Sequence[float] | None) -> None:
        """Note how many tokens requests that enter are expected to sample in all, each of them; None if unknown."""

    def most(self, rows: TokenRows, num_rows: int, room: int) -> np.ndarray:
        """Decide how many tokens each of the first rows may try in the next step; it may be asked twice before a step.

        Int64, shape (num_rows,); by default equally many, as far as there is ``room``: the most that all rows together
        can try; more are cut, the last rows' first. If all are 0 the step may be launched ahead.
        """
        return np.full(num_rows, min(self.most_tokens, max(room // max(num_rows, 1), 1)))

    def draft(
        self, rows: TokenRows, most_B: np.ndarray, cache: SlotCache, sampling: SamplingParams
    ) -> Sequence[Sequence[int]]:
        """Return tokens that may come after the last token of each row, likeliest first; none for no proposal.

        More than ``most_B`` of a row are cut, which keeps rows within their limits, and from passing points at which
        they are observed. ``cache`` has no keys, values and states of the last tokens yet.
        """
        raise NotImplementedError

    def took(self, rows: TokenRows, step: SampledStep, accepted_B: np.ndarray) -> Mapping[str, int]:
        """Learn from a step, drafted or not, whose tokens the rows have; none of these has left since.

        ``step.draft`` is what was tried, and ``accepted_B`` how many of these tokens each row got; returned is how many
        of them were drafted from each source, by its name. ``step.places`` has the place of each row's last token.
        """
        raise NotImplementedError

    def left(self, rows: TokenRows, row: int, ended: bool) -> None:
        """Note that a row leaves: its completion has ended, or may come back."""

    def release(self, groups: Iterable[GroupKey]) -> None:
        """Note that no more requests of these prompts will come, and none is in flight."""
