"""Regular expressions from a config."""

from __future__ import annotations

import re


def compile_pattern(argument: str, pattern: str, flags: int = 0, needs_group: bool = False) -> re.Pattern[str]:
    """Compile ``pattern``, the value of ``argument``.

    Raises:
        ValueError: If it is no regular expression, or has no group where one is needed.
    """
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"{argument} {pattern!r} is no regular expression ({error}); correct it.") from error
    if needs_group and compiled.groups == 0:
        raise ValueError(f"{argument} {pattern!r} has no group; put parentheses around the answer.")
    return compiled


def last_answer(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """Group 1 of the last match, stripped; the whole text without a pattern; ``None`` without a match."""
    if pattern is None:
        return text.strip()
    answer = None
    for match in pattern.finditer(text):
        answer = match.group(1)
    return None if answer is None else answer.strip()
