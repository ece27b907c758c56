"""A reward that compares mathematical answers, in separate processes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import signal
import threading
import unicodedata
import warnings
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from lit_grpo.limits import Positive, checks_arguments
from lit_grpo.process.calls import CallTimeout
from lit_grpo.process.packages import require
from lit_grpo.process.processes import ProcessCall, ProcessEnded, TooMuchComputing
from lit_grpo.rewards.builtin import accepted_answers, compile_pattern
from lit_grpo.rewards.function import StatefulReward
from lit_grpo.rewards.texts import comparable, last_answer

MEMORY_BYTES = 2 * 1024**3
"""The most memory of a process that compares."""
WAITING_S = 60.0
"""The least limit of wall time of a comparison; it is 20 times the limit of CPU time where that is longer."""
MOST_COMPARED = 2000
"""Answers that are no plain numbers and are compared with themselves before a run, at most."""
MARKED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
WORD = re.compile(r"(?<![\\A-Za-z{])(?!(?:pi|sqrt|sin|cos|tan|log|ln|exp|inf|infinity)\b)[A-Za-z]{2,}")
NUMBER = re.compile(r"\d[\d.,/]*")
PLAIN_NUMBER = re.compile(r"-?\d{1,12}(?:\.\d{1,12})?")
BOXED = "\\boxed{"
GROUPED = re.compile(r"-?\d{1,3}(?:(?:\\,|\{,\}| )\d{3})+(?:\.\d+)?")
LAYOUT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit|mbox)\s*\{([^{}]*)\}|\\[,;:! ]|[~$]")
"""What LaTeX adds around a text that is the same without it; group 1 stays."""
FOR_SIGNS = (
    (
        re.compile(r"(\d)?([¼-¾⅐-⅞])"),
        lambda found: f"{found[1] or ''} \\frac{{{_halves(found)[0]}}}{{{_halves(found)[2]}}}",
    ),
    (re.compile(r"√(\d+|[A-Za-z]|\([^()]*\))"), r"\\sqrt{\1}"),
    (re.compile(r"^(-?\d+) (\d+)/(\d+)$"), r"\1 \\frac{\2}{\3}"),
)
"""Signs that math-verify cannot read, and what they stand for in LaTeX: fractions, roots and mixed numbers."""


def _halves(found: re.Match[str]) -> tuple[str, str, str]:
    return unicodedata.normalize("NFKC", found[2]).partition("\u2044")


class MathEquivalence(StatefulReward):
    r"""1.0 if the completion's answer equals the row's, else 0.0; ``None`` if the row has none.

    The completion's answer is what its last ``\boxed{}`` holds, or else what math-verify finds in it. It is right if it
    is the row's answer as a text, without the layout of LaTeX (:func:`lit_grpo.rewards.texts.comparable`), or if
    math-verify finds the two equal. So each answer equals itself, also one that math-verify cannot read, such as
    ``12:00``. Each answer of a list is right; write several solutions of one task as one text, such as ``1, 2``.

    Answers are compared in a separate process, because a model can write an answer that blocks the whole interpreter,
    such as ``9^9^9^9``. An answer whose comparison takes more CPU time than ``timeout_s``, or far too much memory, is
    wrong. A comparison that a busy machine does not finish, within a minute or 20 times ``timeout_s`` of wall time, or
    that the system ends, gives no reward, and is counted in ``rewards/NAME/unscored``.

    Before a run, rows whose answer math-verify does not find equal to itself are counted and named: there only the same
    text is right.

    Args:
        answer_column: The column with the expected answer: a number, or text with or without LaTeX, or a list of these.
        answer_pattern: Regular expression; group 1 of its last match in the column is the expected answer, for example
            ``####\s*(.+)`` for GSM8K. By default the whole column is the expected answer.
        timeout_s: The most seconds of CPU time that one comparison may take.

    Raises:
        ValueError: math-verify is not installed.
    """

    limits_itself = True

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
        self._call = ProcessCall(Comparison, max(WAITING_S, 20 * timeout_s), cpu_s=timeout_s)
        self._counting = threading.Lock()
        self._num_unscored = 0
        self._equals_itself: dict[str, bool] = {}  # by answer, as far as they were compared before the run

    def __call__(self, completion: str, **columns: Any) -> float | None:
        """Score one completion."""
        answers = self._answers(columns)
        if not answers:
            return None
        given, is_boxed = _shown(comparable(completion))
        if any(_laid_flat(given) == _laid_flat(answer) for answer in answers):
            return 1.0
        try:
            return float(self._are_equal(answers, f"{BOXED}{given}}}" if is_boxed else given))
        except (CallTimeout, ProcessEnded):
            with self._counting:
                self._num_unscored += 1
            return None

    def check(self, columns: Mapping[str, Any]) -> None:
        self._answers(columns)

    def doubt(self, columns: Mapping[str, Any]) -> str | None:
        """Return that only the same text is right, if math-verify does not find the row's answer equal to itself."""
        answers = self._answers(columns)
        if not answers or any(self._is_read(answer) for answer in answers):
            return None
        return (
            f"math-verify does not find the answer {answers[0]!r:.80} equal to itself, so only the same text is right"
        )

    def take_counts(self) -> dict[str, float]:
        """Return the number of completions without a reward because their comparison was not finished."""
        with self._counting:
            number, self._num_unscored = self._num_unscored, 0
        return {"unscored": float(number)}

    def _answers(self, columns: Mapping[str, Any]) -> list[str]:
        """Return the expected answers of a row, each of which is right; none if it has none."""
        answer = columns[self.answer_column]
        if answer is None:
            return []
        answers: list[str] = []
        for each in accepted_answers(answer, self.answer_column):
            expected = last_answer(self._compiled, each)
            if expected is None:
                pattern = self.answer_pattern
                raise ValueError(f"the expected answer {each!r} does not match answer_pattern {pattern!r}; mend one")
            answers.append(_shown(expected)[0])
            if not answers[-1]:
                raise ValueError(f"the expected answer {each!r} is empty; mend the column {self.answer_column!r}")
        return answers

    def _is_read(self, answer: str) -> bool:
        """Return whether math-verify finds an answer equal to itself; True where it was not asked."""
        if PLAIN_NUMBER.fullmatch(answer):
            return True
        if answer not in self._equals_itself:
            if len(self._equals_itself) == MOST_COMPARED:
                return True
            try:
                self._equals_itself[answer] = self._are_equal([answer], f"{BOXED}{answer}}}")
            except (CallTimeout, ProcessEnded):
                return True
        return self._equals_itself[answer]

    def _are_equal(self, expected: list[str], completion: str) -> bool:
        """Compare with math-verify."""
        try:
            with self._few:  # each comparison keeps one process busy
                return self._call(expected=expected, completion=completion)
        except TooMuchComputing:
            return False
        except ProcessEnded as error:
            if error.code == -signal.SIGKILL:  # by somebody else, such as the system that has no more memory
                raise
            if error.code < 0:  # such as a stack that is too deep
                return False
            raise RuntimeError(f"math-verify ended with code {error.code}; see its error output") from None


def _shown(text: str) -> tuple[str, bool]:
    r"""Return what the last ``\boxed{}`` of a text holds, and whether it has one; without one the whole text."""
    begin = text.rfind(BOXED)
    depth = 1
    for place in range(begin + len(BOXED), len(text)) if begin >= 0 else ():
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[begin + len(BOXED) : place].strip(), True
    return text, False


def _laid_flat(text: str) -> str:
    return " ".join(LAYOUT.sub(lambda found: found[1] or " ", text).split())


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

    def __call__(self, expected: list[str], completion: str) -> bool:
        """Return whether the completion's answer equals an expected one; one that cannot be read equals nothing."""
        try:
            answer = self._parse(_rewritten(completion), parsing_timeout=None)  # type: ignore[arg-type]
            return any(self._verify(gold, answer, timeout_seconds=None) for gold in map(self._parsed, expected) if gold)
        except (MemoryError, RecursionError):
            return False

    def _parse_expected(self, text: str) -> list[Any]:
        """Parse an expected answer, with or without marks of LaTeX; return an empty list if it is no mathematics."""
        with contextlib.suppress(InvalidOperation):
            text = f"{Decimal(text):f}"  # math-verify cannot read 1e-05
        text = _rewritten(text)
        as_latex = f"${text}$"
        if MARKED.search(text):
            readings = [text]
        elif not WORD.search(text):
            readings = [as_latex, text]  # "2\pi" is not 2
        elif len(NUMBER.findall(text)) > 1:
            readings = []  # "1331 and 1728" is not 1728
        else:
            readings = [text, as_latex]  # "18 dollars" is 18, not a product of letters
        for reading in readings:
            if parsed := self._parse(reading, fallback_mode="no_fallback", parsing_timeout=None):  # type: ignore[arg-type]
                return parsed
        return []


def _rewritten(text: str) -> str:
    """Return an answer, or a completion that is one boxed answer, with LaTeX for signs that math-verify cannot read."""
    is_boxed = text.startswith(BOXED)
    inner = text[len(BOXED) : -1] if is_boxed else text
    for signs, latex in FOR_SIGNS:
        inner = signs.sub(latex, inner)
    if GROUPED.fullmatch(inner):
        inner = re.sub(r"[^\d.-]", "", inner)
    return f"{BOXED}{inner}}}" if is_boxed else inner
