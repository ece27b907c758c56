"""What prompts are asked with, where that is not what their rows say."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from lit_grpo.plugins import Plugin

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


class Rewriting(Plugin):
    """What training prompts are asked with: here, what their rows say.

    A rule of your own derives from it. The loader marks a prompt as ``altered`` where the policy reads something else
    than the row says. Such a visit says nothing about the prompt itself: the history of prompts, and all that goes by
    the history, leave it out. Prompts of validation, test and predict are never rewritten.

    A rewritten prompt keeps its ``prompt_id`` and ``visit``. All ranks must rewrite alike, so what a rule goes by has
    to be the same on all of them (:attr:`common`).
    """

    role: ClassVar[str] = "what prompts are asked with"
    needs: ClassVar[frozenset[str]] = frozenset({"prompt_stream"})
    what: ClassVar[str] = "text"
    """What it puts into prompts, as messages call it."""
    writer: TextWriter
    """Puts text into prompts. The data module sets it before it calls :meth:`largest`."""

    def largest(self, prompt: Prompt) -> Prompt:
        """Return a prompt with as many tokens as it may ever be asked with, or itself where it is never rewritten.

        It is called for all training prompts before the run starts. The run checks that the longest of them fits into
        the policy's context.

        Args:
            prompt: As its row says.

        Raises:
            ValueError: The prompt cannot be rewritten; the message goes on after the row's number, as in
                ``has no column 'solution'``.
        """
        return prompt

    def asked(self, prompt: Prompt) -> Prompt:
        """Return a prompt as it is asked now; it is never longer than the longest that :meth:`largest` returned.

        Args:
            prompt: As its row says.
        """
        return prompt


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
