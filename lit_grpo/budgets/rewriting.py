"""What prompts are asked with, where that is not what their rows say."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from lit_grpo.plugins import Plugin, Worker

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
    """What prompts are asked with: here, what their rows say.

    A rule of your own derives from it, and its :meth:`worker` returns a :class:`Rewriter` of your own.
    """

    role: ClassVar[str] = "what prompts are asked with"

    @property
    def needs(self) -> frozenset[str]:
        """Only the loader of ``PromptDataModule`` asks it."""
        return frozenset({"prompt_stream"})

    def worker(self) -> Rewriter:
        """Return what rewrites prompts."""
        return Rewriter()


class Rewriter(Worker):
    """Rewrites training prompts before they are asked; this one leaves them as they are.

    The loader marks a prompt as ``altered`` where the policy reads something else than the row says. Such a visit says
    nothing about the prompt itself: the history of prompts, and all that goes by the history, leave it out. Prompts of
    validation, test and predict are never rewritten.

    A rewritten prompt keeps its ``prompt_id`` and ``visit``. All ranks must rewrite alike, so what a rewriter goes by
    has to be the same on all of them (:attr:`common`).
    """

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
