"""Whether the completion has the expected form."""

from __future__ import annotations

import re

from lit_grpo.rewards.pattern import compile_pattern


class FormatMatch:
    r"""1.0 if the completion matches a regular expression, in which ``.`` matches newlines too, else 0.0.

    Python cannot interrupt a match, not even for a reward's time limit: avoid nested repeats, as ``(a+)+``.

    Args:
        pattern: The regular expression, for example ``<think>.*</think>\s*<answer>.*</answer>``.
        full: Whether it must match the whole completion; otherwise any part of it will do.
    """

    def __init__(self, pattern: str, full: bool = True) -> None:
        compiled = compile_pattern("pattern", pattern, re.DOTALL)
        self._match = compiled.fullmatch if full else compiled.search

    def __call__(self, completion: str) -> float:
        """Score one completion."""
        return float(self._match(completion) is not None)
