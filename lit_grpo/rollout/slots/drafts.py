"""Tokens that rows try ahead while slots are free, taken from other completions of their prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lit_grpo.rollout.slots.rows import TokenRows
from lit_grpo.scheduling.drafting import Drafts
from lit_grpo.types import Completion, Key, Prompt

MOST_TOKENS = 2**24
"""Tokens of completions that are kept for drafts, four bytes each; beyond, the prompts that came first are dropped."""


@dataclass
class _Ended:
    """A completion that has ended: of which visit, its tokens, and whether they have been read."""

    visit: int
    token_ids: np.ndarray
    is_read: bool


class RowDrafts:
    """Makes drafts for rows from the completions of their prompts: of this visit, and of the one before.

    Nothing is read before slots are free. Tokens are the same with drafts and without, so nothing of this has to be in
    a checkpoint.

    Args:
        most: The most tokens a row and step; 0 for none.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._drafts = Drafts()
        self._num_read: dict[Key, int] = {}  # how many tokens of a row have been read
        self._ended: dict[str, list[_Ended]] = {}  # by prompt
        self._num_kept = 0

    def draft(self, rows: TokenRows, num_free: int) -> list[list[int]]:
        """Return tokens for each row: so many that drafts take no more than the free slots, and ``most`` at most."""
        width = min(self.most, num_free // len(rows))
        if width < 1:
            return []
        counts = rows.counts_B.tolist()
        for row, request in enumerate(rows.requests):
            if (num_read := self._num_read.get(request.key)) is None:
                self._read_ended(request.prompt)
                begun = [*request.prompt.token_ids, *rows.tokens(row, 0)]
                self._drafts.begin(request.key, request.prompt.prompt_id, begun)
            else:
                self._drafts.extend(request.key, rows.tokens(row, num_read))
            self._num_read[request.key] = counts[row]
        limits = [min(width, rows.max_tokens - count - 1) for count in counts]
        return [self._drafts.draft(row.key, most) for row, most in zip(rows.requests, limits, strict=True)]

    def _read_ended(self, prompt: Prompt) -> None:
        for each in self._ended.get(prompt.prompt_id, ()):
            if not each.is_read:
                self._drafts.read(prompt.prompt_id, [*prompt.token_ids, *each.token_ids.tolist()])
                each.is_read = True

    def finish(self, completion: Completion) -> None:
        """A row has ended: keep what it has come to."""
        request, tokens = completion.request, completion.token_ids_T.numpy().astype(np.int32)
        is_read = request.key in self._num_read
        if is_read:
            self._drafts.extend(request.key, tokens[self._num_read[request.key] :].tolist())
        self.leave([request.key])
        prompt, before = request.prompt, self._ended.get(request.prompt.prompt_id, [])
        kept = [each for each in before if each.visit >= prompt.visit - 1]
        self._ended[prompt.prompt_id] = [*kept, _Ended(prompt.visit, tokens, is_read)]
        self._num_kept += len(tokens) + _num_tokens(kept) - _num_tokens(before)
        while self._num_kept > MOST_TOKENS:
            self._num_kept -= _num_tokens(self._ended.pop(next(iter(self._ended))))

    def leave(self, keys: Iterable[Key]) -> None:
        """These have no row any more; where they have not ended, they may come back."""
        for key in keys:
            if self._num_read.pop(key, None) is not None:
                self._drafts.end(key)

    def rest(self) -> None:
        """No row is in use: drop what has been made of the completions, which stay, and are read again when needed."""
        self._drafts = Drafts()
        for ended in self._ended.values():
            for each in ended:
                each.is_read = False


def _num_tokens(ended: Iterable[_Ended]) -> int:
    return sum(len(each.token_ids) for each in ended)
