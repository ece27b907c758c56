"""Prompts whose text differs from that of their rows, such as with a hint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lit_grpo.types import Prompt


class TextWriter(Protocol):
    """Puts a text into a prompt; :class:`lit_grpo.data.writing.PromptWriter` is one.

    ``most_tokens`` are the most of a prompt together with its text.
    """

    most_tokens: int

    def put_before(self, prompt: Prompt, text: str) -> Prompt:
        """Return a prompt with a text before its question."""
        ...

    def put_after(self, prompt: Prompt, text: str, share: float = 1.0) -> Prompt:
        """Return a prompt that is followed by a share of a text, from which the policy goes on."""
        ...


def text_of(prompt: Prompt, column: str) -> str:
    """Return the text of a column; an empty one where it has no value.

    Raises:
        ValueError: There is no such column, or it holds something else; to go on after the row's number.
    """
    if column not in prompt.columns:
        raise ValueError(f"has no column {column!r} (it has {', '.join(map(repr, prompt.columns)) or 'none'})")
    value = "" if prompt.columns[column] is None else prompt.columns[column]
    if not isinstance(value, str):
        raise ValueError(f"has no text in column {column!r}, but {value!r}")
    return value
