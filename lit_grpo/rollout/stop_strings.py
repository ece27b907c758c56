"""Stop strings, looked for in the last tokens of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_grpo.rollout.token_rows import TokenRows


def rows_with_stop_string(rows: TokenRows, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the rows whose text has come to hold one of ``stop``; only as many tokens are decoded as it can take."""
    if not stop:
        return []
    longest = max(len(text.encode()) for text in stop)  # a token may hold as little as one byte of a character
    texts = tokenizer.batch_decode(rows.tails(longest + 1))
    return [row for row, text in enumerate(texts) if any(string in text for string in stop)]
