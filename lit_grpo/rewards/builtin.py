"""The rewards that come with the project: exact text, form, and length."""

from __future__ import annotations

import re
from typing import Any

from lit_grpo.limits import Count, checks_arguments
from lit_grpo.rewards.inputs import begun


def compile_pattern(argument: str, pattern: str, flags: int = 0, needs_group: bool = False) -> re.Pattern[str]:
    """Compile ``pattern``, the value of ``argument``.

    Raises:
        ValueError: It is no regular expression, or it has no group and needs one.
    """
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"{argument} {pattern!r} is no regular expression ({error}); correct it.") from error
    if needs_group and compiled.groups == 0:
        raise ValueError(f"{argument} {pattern!r} has no group; put parentheses around the answer.")
    return compiled


def last_answer(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """Return group 1 of the pattern's last match, or the whole text without a pattern; ``None`` without a match."""
    if pattern is None:
        return text.strip()
    answer = None
    for match in pattern.finditer(text):
        answer = match.group(1)
    return None if answer is None else answer.strip()


class ExactMatch:
    """1.0 if the completion's answer equals the row's, else 0.0; ``None`` if the row has none.

    Answers are compared as text without surrounding white space. A column may hold numbers: ``72`` equals the text 72,
    and differs from 72.0.

    Args:
        answer_column: Column with the expected answer.
        pattern: Regular expression; group 1 of its last match is the completion's answer, and a completion without a
            match scores 0.0. By default the whole completion is the answer.
        ignore_case: Count upper and lower case as the same.
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
        return float(self.answer_of(completion) == self._comparable(str(expected).strip()))

    def answer_of(self, completion: str) -> str | None:
        """Return the answer of a completion as it is compared; None without one."""
        answer = last_answer(self.pattern, completion)
        return None if answer is None else self._comparable(answer)

    def _comparable(self, answer: str) -> str:
        return answer.casefold() if self.ignore_case else answer


exact_match = ExactMatch()


class FormatMatch:
    r"""1.0 if the completion matches a regular expression, else 0.0; ``.`` matches line ends too.

    If the prompt ends in opening tags, such as the ``<think>`` that some chat templates put there, the completion
    matches with these tags before it, or without them.

    Python cannot interrupt a match, not even for a reward's time limit: avoid nested repeats such as ``(a+)+``.

    Args:
        pattern: Regular expression, for example ``<think>.*</think>\s*<answer>.*</answer>``.
        full: Require a match of the whole completion; with false a part of it is enough.
    """

    def __init__(self, pattern: str, full: bool = True) -> None:
        compiled = compile_pattern("pattern", pattern, re.DOTALL)
        self._match = compiled.fullmatch if full else compiled.search

    def __call__(self, completion: str, prompt: str = "") -> float:
        """Score one completion."""
        return float(any(self._match(text) is not None for text in (completion, begun(prompt) + completion)))


class SoftOverlongPenalty:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    0 up to ``max_tokens - buffer`` tokens, then linear down to -1 at ``max_tokens``. With ``max_tokens`` 100 and
    ``buffer`` 20, a completion of 90 tokens gets -0.5.

    Args:
        buffer: The number of tokens over which the punishment grows; at least 1.
        max_tokens: The number of tokens at which it reaches -1; by default that of sampling.
    """

    @checks_arguments()
    def __init__(self, buffer: Count, max_tokens: int | None = None) -> None:
        self.buffer = buffer
        self.max_tokens = max_tokens
        if max_tokens is not None:
            self._check(max_tokens)

    def __call__(self, completion: str, num_tokens: int, max_tokens: int) -> float:
        """Score one completion by its length."""
        limit = max_tokens if self.max_tokens is None else self.max_tokens
        self._check(limit)
        return max(-1.0, min(0.0, (limit - self.buffer - num_tokens) / self.buffer))

    def _check(self, max_tokens: int) -> None:
        if self.buffer > max_tokens:
            raise ValueError(f"buffer {self.buffer} is larger than max_tokens {max_tokens}; make it smaller.")
