"""Prompts whose text differs from that of their rows, such as with a hint."""

from __future__ import annotations

import string
from collections.abc import Collection, Mapping, Sequence
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

    def reworded(self, prompt: Prompt, template: str, texts: Mapping[str, str]) -> Prompt:
        """Return a prompt whose question is a template with the question and other texts, however long it is."""
        ...

    def continued(self, prompt: Prompt, text: str) -> list[int]:
        """Return the tokens of a text as an answer to a prompt."""
        ...

    def decoded(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens, without special tokens."""
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


def check_template(template: str, name: str, fields: Collection[str]) -> None:
    """Check that a template holds each of its fields, as in ``"{prompt} Hint: {hint}"``, and nothing else in braces.

    Args:
        template: Text of the setting, with each field in braces where its text is filled in.
        name: Name of the setting, for the message.
        fields: Names of the fields that the template has to hold.

    Raises:
        ValueError: It holds others, or does not hold all.
    """
    try:
        parts = [part for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        remedy = "write a brace that is meant as one twice"
        raise ValueError(f"{name} {template!r} is malformed: {error}; {remedy}.") from None
    found = {field for _, field, spec, conversion in parts if not spec and not conversion}
    if found != set(fields) or any(spec or conversion for _, _, spec, conversion in parts):
        needed = " and ".join(f"{{{field}}}" for field in fields)
        raise ValueError(f"{name} is {template!r}; let it hold {needed}, and nothing else in braces.")
