"""Whether the answer is the expected text."""

from __future__ import annotations

from typing import Any

from lit_grpo.rewards.pattern import compile_pattern, last_answer


class ExactMatch:
    """1.0 if the completion's answer equals the row's, else 0.0; ``None`` for a row whose answer is ``None``.

    Both are compared as text without surrounding white space, so a column may hold numbers: ``72`` is the
    text 72, and ``72.0`` is another text.

    Args:
        answer_column: The column that holds the expected answer.
        pattern: Regular expression; group 1 of its last match is the completion's answer, no match is 0.0.
            By default the whole completion is the answer.
        ignore_case: Whether upper and lower case are the same.
    """

    def __init__(self, answer_column: str = "answer", pattern: str | None = None, ignore_case: bool = False) -> None:
        self.columns = (answer_column,)
        self.answer_column = answer_column
        self.pattern = None if pattern is None else compile_pattern("pattern", pattern, needs_group=True)
        self.ignore_case = ignore_case

    def __call__(self, completion: str, **columns: Any) -> float | None:
        """Score one completion."""
        expected = columns[self.answer_column]
        if expected is None:
            return None
        answer, expected = last_answer(self.pattern, completion), str(expected).strip()
        if self.ignore_case and answer is not None:
            answer, expected = answer.casefold(), expected.casefold()
        return float(answer == expected)


exact_match = ExactMatch()
