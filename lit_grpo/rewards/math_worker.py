"""Compares answers with math-verify, in a separate process: ``python math_worker.py TIMEOUT_S``.

Each line of the standard input is a JSON list ``[expected answer, completion]``. The reply is ``true``, ``false``, or
``null`` if the expected answer is no mathematics. An empty line at the start says that the process is ready. A
comparison that takes longer than the time limit ends the process: Python could not handle the alarm during an
operation on huge numbers, so the alarm keeps its default action. math-verify evaluates only digits and operators as
Python.
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
        if parsed := parse(reading, fallback_mode="no_fallback", parsing_timeout=None):  # type: ignore[arg-type]
            return parsed
    return []


def compare(expected: str, completion: str) -> bool | None:
    """Whether the completion's answer equals the expected one; ``None`` if the expected one is no mathematics."""
    gold = parse_expected(expected)
    if not gold:
        return None
    try:
        answer = parse(completion, parsing_timeout=None)  # type: ignore[arg-type]
        return bool(verify(gold, answer, timeout_seconds=None))
    except (MemoryError, RecursionError):
        return False


def main() -> None:
    """Answer each line of the standard input until the input ends."""
    replies, sys.stdout = sys.stdout, sys.stderr
    logging.disable()
    warnings.simplefilter("ignore")
    for ignored in (signal.SIGINT, signal.SIGTERM):  # meant for the trainer; when the trainer ends, the input ends
        signal.signal(ignored, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):  # the limit is lower already, or the system has no such limit
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
