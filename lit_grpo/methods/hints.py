"""Hints for prompts that nobody passes: the beginning of a solution (ADHint, arXiv 2512.13095), or a strategy.

The strategy is as in NudgeRL (arXiv 2605.15726).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lit_grpo.budgets.hints import Hint
from lit_grpo.types import Prompt


@dataclass(frozen=True)
class Reference(Hint):
    """The beginning of a solution that a column holds, in tokens (as in ADHint, arXiv 2512.13095).

    Args:
        column: Of the data.
        most: Below 1, so that an answer at the solution's end is left to the policy.
    """

    goes_on: ClassVar[bool] = True

    most: float = 0.9
    column: str = "solution"

    def text(self, prompt: Prompt, share: float) -> str:
        """The whole solution."""
        return text_of(prompt, self.column)


@dataclass(frozen=True)
class Strategy(Hint):
    """A strategy in front of the question, whole (as in NudgeRL, arXiv 2605.15726).

    Args:
        column: Of the data, whose text it is where ``say`` is empty.
        say: What every prompt gets.
        between: What stands between it and the question.
    """

    column: str = "strategy"
    say: str = ""
    between: str = "\n\n"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("say", "between"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be text, not {getattr(self, name)!r}; put it into quotes.")

    def text(self, prompt: Prompt, share: float) -> str:
        """The strategy, and what follows it."""
        text = self.say or text_of(prompt, self.column)
        return text and text + self.between


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


PLUGINS = {"reference_hint": Reference(), "strategy_hint": Strategy()}
