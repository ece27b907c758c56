"""What prompts are asked with, where that is not what their rows say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from lit_grpo.plugins import Plugin, Worker

if TYPE_CHECKING:
    from lit_grpo.types import PassRule, Prompt, RolloutGroup


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


class ByVisits(Rewriter):
    """Rewrites prompts by what their earlier visits have shown, of which it remembers a record of each prompt.

    A visit is any object with a ``prompt_id``. A record is a dataclass of plain values, whose ``after(visit)`` returns
    the record with a visit more.

    Args:
        new: The record of a prompt that has not been visited.
    """

    common = True

    def __init__(self, new: Any) -> None:
        self.new = new
        self.known: dict[str, Any] = {}  # by the ids of prompts

    def visit_of(self, group: RolloutGroup, pass_rule: PassRule) -> Any:
        """Return what is remembered of a group."""
        raise NotImplementedError

    def metrics_of(self, visits: Sequence[Any]) -> dict[str, float]:
        """Return what is logged of a batch's visits on all ranks."""
        return {}

    def record_of(self, prompt_id: str) -> Any:
        """Return what is known of a prompt."""
        return self.known.get(prompt_id, self.new)

    def learnt(
        self,
        groups: Sequence[RolloutGroup],
        pass_rule: PassRule,
        version: int,
        gather: Callable[[Any], list[Any]],
    ) -> dict[str, float]:
        """Remember the visits of a batch, of all ranks."""
        own = [self.visit_of(group, pass_rule) for group in groups]
        visits = [visit for part in gather(own) for visit in part]
        for visit in visits:
            self.known[visit.prompt_id] = self.record_of(visit.prompt_id).after(visit)
        return self.metrics_of(visits)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: a list of plain values for each prompt."""
        return {"known": {prompt_id: list(astuple(record)) for prompt_id, record in self.known.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        kind = type(self.new)
        self.known = {prompt_id: kind(*values) for prompt_id, values in state["known"].items()}


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
