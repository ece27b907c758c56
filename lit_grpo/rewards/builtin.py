"""The rewards that come with the project: exact text, form, and length."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from lit_grpo.limits import Count, checks_arguments
from lit_grpo.rewards.function import StatefulReward
from lit_grpo.rewards.inputs import begun
from lit_grpo.rewards.texts import comparable, is_same_answer, last_answer


def compile_pattern(argument: str, pattern: str, flags: int = 0, needs_group: bool = False) -> re.Pattern[str]:
    """Compile ``pattern``, the value of ``argument``."""
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"{argument} {pattern!r} is no regular expression ({error}); correct it.") from error
    if needs_group and compiled.groups == 0:
        raise ValueError(f"{argument} {pattern!r} has no group; put parentheses around the answer.")
    return compiled


def accepted_answers(answer: Any, column: str) -> list[str]:
    """Return the texts of a row's answer: one, or several of a list, each of which is right.

    Args:
        answer: The row's answer: a text, a number, or a list of these.
        column: Name of the column, for messages.
    """
    given = answer.tolist() if getattr(answer, "ndim", 0) else answer
    listed = list(given) if isinstance(given, list | tuple) else [given]
    texts = [each.item() if hasattr(each, "numel") else each for each in listed]  # tensors
    if not texts or not all(
        isinstance(each, str) or not isinstance(each, Mapping | Sequence | Set | None) for each in texts
    ):
        raise ValueError(
            f"the answer {answer!r:.80} is neither a text, a number nor a list of these, of which each is right; mend "
            f"the column {column!r}"
        )
    return [str(each) for each in texts]


class ExactMatch(StatefulReward):
    """1.0 if the completion's answer equals the row's, else 0.0; ``None`` if the row has none.

    Answers are compared as texts without surrounding white space, in Unicode's NFC; kinds of spaces and of minus signs
    are equal, and characters without width are left out (:func:`lit_grpo.rewards.texts.comparable`). A column may hold
    numbers: ``72`` equals the text 72, and differs from 72.0. Each answer of a list is right.

    Before a run, rows whose answer no match of ``pattern`` can give are counted and named.

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
        self._group = None if self.pattern is None else _first_group(self.pattern)

    def __call__(self, completion: str, **columns: Any) -> float | None:
        """Score one completion."""
        expected = columns[self.answer_column]
        if expected is None:
            return None
        answers = accepted_answers(expected, self.answer_column)
        return float(is_same_answer(completion, answers, self.pattern, self.ignore_case))

    def answer_of(self, completion: str) -> str | None:
        """Return the answer of a completion as it is compared; None without one."""
        answer = last_answer(self.pattern, completion)
        return answer.casefold() if answer is not None and self.ignore_case else answer

    def check(self, columns: Mapping[str, Any]) -> None:
        """Check the answer of a row, before the run."""
        if columns[self.answer_column] is not None:
            accepted_answers(columns[self.answer_column], self.answer_column)

    def doubt(self, columns: Mapping[str, Any]) -> str | None:
        """Return why no completion can give the row's answer; None if one can."""
        expected = columns[self.answer_column]
        if self._group is None or expected is None:
            return None
        answers = [comparable(each) for each in accepted_answers(expected, self.answer_column)]
        if any(self._can_give(answer) for answer in answers):
            return None
        pattern = None if self.pattern is None else self.pattern.pattern
        return f"no match of the pattern {pattern!r} gives the answer {answers[0]!r:.80}; mend one of the two"

    def _can_give(self, answer: str) -> bool:
        assert self._group is not None
        cases = {answer, answer.upper(), answer.lower()} if self.ignore_case else {answer}
        spaced = [f"{before}{each}{after}" for each in cases for before in ("", " ") for after in ("", " ")]
        return any(self._group.fullmatch(each) for each in spaced)


def _first_group(pattern: re.Pattern[str]) -> re.Pattern[str] | None:
    """Return group 1 of a pattern as a pattern of its own; None if it depends on what stands around it."""
    starts: list[bool] = []  # of open parentheses: whether it is that of group 1
    begin = place = 0
    in_class, text = False, pattern.pattern
    while place < len(text):
        one, place = text[place], place + (2 if text[place] == "\\" else 1)
        if one == "[" and not in_class:
            in_class = True
            place += len(re.match(r"\^?\]?", text[place:])[0])  # type: ignore[index]
        elif one == "]":
            in_class = False
        elif one == "(" and not in_class:
            captures = re.match(r"\?P<\w+>|(?!\?)", text[place:])
            is_first = captures is not None and not begin
            begin = place + captures.end() if is_first and captures is not None else begin
            starts.append(is_first)
        elif one == ")" and not in_class and starts.pop():
            group = text[begin : place - 1]
            outside = re.sub(r"(\\.)|\[\^?\]?(?:\\.|[^\]\\])*\]", lambda each: each[1] or "", group)  # of classes
            around = re.search(r"\(\?<?[=!]|\\[1-9bBAZ]|\(\?P=|\(\?\(|[\^$]", outside)
            return None if around or pattern.flags & re.VERBOSE else re.compile(group, pattern.flags)
    return None


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
        limit = max_tokens if self.max_tokens is None else self.max_tokens
        self._check(limit)
        return max(-1.0, min(0.0, (limit - self.buffer - num_tokens) / self.buffer))

    def _check(self, max_tokens: int) -> None:
        if self.buffer > max_tokens:
            raise ValueError(f"buffer {self.buffer} is larger than max_tokens {max_tokens}; make it smaller.")
