"""Whether the answer is mathematically the expected one."""

from __future__ import annotations

import weakref
from typing import Any

from lit_grpo.rewards.math_process import MathProcess
from lit_grpo.rewards.pattern import compile_pattern, last_answer


class MathEquivalence:
    r"""1.0 if math-verify finds the completion's answer equal to the row's, else 0.0.

    ``None`` for a row whose answer is ``None``. Answers are compared in a process of their own, because a
    model can write what a thread cannot be freed from: ``9^9^9^9`` would hold up the whole interpreter. An
    answer that takes longer than ``timeout_s`` to compare, or far too much memory, is wrong: 0.0.

    Args:
        answer_column: The column that holds the expected answer: a number, or text with or without LaTeX.
        answer_pattern: Regular expression; group 1 of its last match in the column is the expected answer,
            for example ``####\s*(.+)`` for GSM8K. By default the whole column is.
        timeout_s: The most seconds one comparison may take.
    """

    def __init__(
        self, answer_column: str = "answer", answer_pattern: str | None = None, timeout_s: float = 3.0
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0, not {timeout_s}.")
        self.columns = (answer_column,)
        self.answer_column = answer_column
        self.answer_pattern = answer_pattern
        self.timeout_s = timeout_s
        self._compiled = compile_pattern("answer_pattern", answer_pattern, needs_group=True) if answer_pattern else None
        self._idle: list[MathProcess] = []  # one for each thread that has compared at the same time
        weakref.finalize(self, _close_all, self._idle)

    def __call__(self, completion: str, **columns: Any) -> float | None:
        """Score one completion.

        Raises:
            ValueError: If the row's answer cannot be read.
        """
        answer = columns[self.answer_column]
        if answer is None:
            return None
        expected = last_answer(self._compiled, str(answer))
        if expected is None:
            pattern = self.answer_pattern
            raise ValueError(f"the expected answer {answer!r} does not match answer_pattern {pattern!r}; mend one")
        equal = self._compare(expected, completion)
        if equal is None:
            raise ValueError(f"the expected answer {answer!r} is no mathematics; mend it, or set answer_pattern")
        return float(equal)

    def _compare(self, expected: str, completion: str) -> bool | None:
        try:
            process = self._idle.pop()
        except IndexError:
            process = MathProcess(self.timeout_s)
        equal = process.compare(expected, completion)
        if process.is_alive:
            self._idle.append(process)
        return equal


def _close_all(processes: list[MathProcess]) -> None:
    while processes:
        processes.pop().close()


math_equivalence = MathEquivalence()
