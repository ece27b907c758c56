"""A reward that compares mathematical answers, in separate processes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import threading
import warnings
from decimal import Decimal, InvalidOperation
from typing import Any

from lit_grpo.limits import Positive, checks_arguments
from lit_grpo.process.calls import CallTimeout
from lit_grpo.process.packages import require
from lit_grpo.process.processes import ProcessCall, ProcessEnded
from lit_grpo.rewards.builtin import compile_pattern, last_answer

MEMORY_BYTES = 2 * 1024**3
"""The most memory of a process that compares."""
MARKED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")


class MathEquivalence:
    r"""1.0 if math-verify finds the completion's answer equal to the row's, else 0.0; ``None`` if the row has none.

    Answers are compared in a separate process, because a model can write an answer that blocks the whole interpreter,
    such as ``9^9^9^9``. An answer whose comparison takes longer than ``timeout_s``, or far too much memory, is wrong.

    Args:
        answer_column: The column with the expected answer: a number, or text with or without LaTeX.
        answer_pattern: Regular expression; group 1 of its last match in the column is the expected answer, for example
            ``####\s*(.+)`` for GSM8K. By default the whole column is the expected answer.
        timeout_s: The most seconds that one comparison may take.

    Raises:
        ValueError: math-verify is not installed.
    """

    @checks_arguments()
    def __init__(
        self, answer_column: str = "answer", answer_pattern: str | None = None, timeout_s: Positive = 3.0
    ) -> None:
        require(
            "math_verify",
            "it compares with the package math-verify, which is not installed; install the extra lit_grpo[math], or "
            "take lit_grpo.rewards.ExactMatch.",
        )
        self.columns = (answer_column,)
        self.answer_column = answer_column
        self.answer_pattern = answer_pattern
        self.timeout_s = timeout_s
        self._compiled = compile_pattern("answer_pattern", answer_pattern, needs_group=True) if answer_pattern else None
        self._few = threading.BoundedSemaphore(min(4, os.cpu_count() or 1))
        self._call = ProcessCall(Comparison, timeout_s)

    def __call__(self, completion: str, **columns: Any) -> float | None:
        """Score one completion.

        Raises:
            ValueError: The row's answer cannot be read.
        """
        answer = columns[self.answer_column]
        if answer is None:
            return None
        expected = last_answer(self._compiled, str(answer))
        if expected is None:
            pattern = self.answer_pattern
            raise ValueError(f"the expected answer {answer!r} does not match answer_pattern {pattern!r}; mend one")
        with self._few:  # each comparison keeps one process busy
            equal = self._compare(expected, completion)
        if equal is None:
            raise ValueError(f"the expected answer {answer!r} is no mathematics; mend it, or set answer_pattern")
        return float(equal)

    def _compare(self, expected: str, completion: str) -> bool | None:
        try:
            return self._call(expected=expected, completion=completion)
        except CallTimeout:
            return False
        except ProcessEnded as error:
            if error.code < 0:  # by a signal: the system ran out of memory
                return False
            raise RuntimeError(f"math-verify ended with code {error.code}; see its error output") from None


class Comparison:
    """Compares answers with math-verify, in a process that has it to itself and little memory.

    math-verify evaluates only digits and operators as Python.

    Raises:
        RuntimeError: math-verify cannot be imported.
    """

    def __init__(self) -> None:
        import resource

        logging.disable()
        warnings.simplefilter("ignore")
        with contextlib.suppress(ValueError, OSError):  # the limit is lower already, or the system has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
        try:
            import math_verify
        except Exception as error:  # a package that is broken may fail in any way
            raise RuntimeError(f"math-verify does not start ({error}); install lit_grpo[math] again") from None
        self._parse, self._verify = math_verify.parse, math_verify.verify
        self._parsed = functools.lru_cache(maxsize=1024)(self._parse_expected)

    def __call__(self, expected: str, completion: str) -> bool | None:
        """Whether the completion's answer equals the expected one; ``None`` if the expected one is no mathematics."""
        gold = self._parsed(expected)
        if not gold:
            return None
        try:
            answer = self._parse(completion, parsing_timeout=None)  # type: ignore[arg-type]
            return bool(self._verify(gold, answer, timeout_seconds=None))
        except (MemoryError, RecursionError):
            return False

    def _parse_expected(self, text: str) -> list[Any]:
        """Parse an expected answer, with or without marks of LaTeX; return an empty list if it is no mathematics."""
        with contextlib.suppress(InvalidOperation):
            text = f"{Decimal(text):f}"  # math-verify cannot read 1e-05
        as_latex = f"${text}$"
        if MARKED.search(text):
            readings = [text]
        elif WORD.search(text):
            readings = [text, as_latex]  # "18 dollars" is 18, not a product of letters
        else:
            readings = [as_latex, text]  # "2\pi" is not 2
        for reading in readings:
            if parsed := self._parse(reading, fallback_mode="no_fallback", parsing_timeout=None):  # type: ignore[arg-type]
                return parsed
        return []
