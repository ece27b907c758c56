"""Compares answers with math-verify, as a process of its own: ``python math_worker.py TIMEOUT_S``.

Reads a JSON list ``[expected answer, completion]`` a line and answers each with ``true``, ``false``, or
``null`` if the expected answer is no mathematics; an empty line at the start says that it is ready. A
comparison beyond the time limit ends the process: the alarm keeps its default action, since Python could not
handle it within an operation on huge numbers. What math-verify evaluates as Python holds digits and
operators alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import resource
import signal
import sys
import warnings
from decimal import Decimal, InvalidOperation
from typing import Any

from math_verify import parse, verify

MEMORY_BYTES = 2 * 1024**3
MARKED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")


@functools.lru_cache(maxsize=1024)
def parse_expected(text: str) -> list[Any]:
    """Parse an expected answer, which need not be marked as LaTeX; an empty list if it is no mathematics."""
    with contextlib.suppress(InvalidOperation):
        text = f"{Decimal(text):f}"  # math-verify does not know 1e-05
    as_latex = f"${text}$"
    if MARKED.search(text):
        readings = [text]
    elif WORD.search(text):
        readings = [text, as_latex]  # "18 dollars" is 18, not a product of letters
    else:
        readings = [as_latex, text]  # "2\pi" is not 2
    for reading in readings:
        if parsed := parse(reading, fallback_mode="no_fallback", parsing_timeout=None):  # type: ignore[arg-type]
            return parsed
    return []


def compare(expected: str, completion: str) -> bool | None:
    """Whether the completion's answer equals the expected one; ``None`` if that is no mathematics."""
    gold = parse_expected(expected)
    if not gold:
        return None
    try:
        answer = parse(completion, parsing_timeout=None)  # type: ignore[arg-type]
        return bool(verify(gold, answer, timeout_seconds=None))
    except (MemoryError, RecursionError):
        return False


def main() -> None:
    """Answer each line of the standard input until it ends."""
    replies, sys.stdout = sys.stdout, sys.stderr
    logging.disable()
    warnings.simplefilter("ignore")
    for ignored in (signal.SIGINT, signal.SIGTERM):  # meant for the trainer, whose end closes the input
        signal.signal(ignored, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):  # where the limit is lower already, or there is none to set
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    timeout_s = float(sys.argv[1])
    print(file=replies, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        equal = compare(*json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(equal), file=replies, flush=True)


if __name__ == "__main__":
    main()
