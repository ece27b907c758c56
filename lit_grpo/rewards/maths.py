"""A reward that compares mathematical answers, in a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from lit_grpo.limits import Positive, checks_arguments
from lit_grpo.process.packages import require
from lit_grpo.rewards.builtin import compile_pattern, last_answer

WORKER = Path(__file__).with_name("math_worker.py")


class MathProcess:
    """A running ``math_worker.py``; only one thread at a time uses it.

    Raises:
        RuntimeError: The process does not start.
    """

    def __init__(self, timeout_s: float) -> None:
        # -P keeps the folder of the script, whose modules have common names, out of the import path.
        command = [sys.executable, "-P", str(WORKER), str(timeout_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._reply() is None:
            raise RuntimeError("math-verify does not start; see its error output, and install lit_grpo[math] again")

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def compare(self, expected: str, completion: str) -> bool | None:
        """Whether the completion's answer equals the expected one; ``None`` if the expected one is no mathematics.

        A comparison that ends the process, because it takes too much time or memory, is ``False``.

        Raises:
            RuntimeError: The process ends in any other way.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([expected, completion]).encode() + b"\n")
            self._process.stdin.flush()
        reply = self._reply()
        if reply is not None:
            return json.loads(reply)
        if self._process.returncode < 0:  # ended by a signal
            return False
        raise RuntimeError(f"math-verify ended with code {self._process.returncode}; see its error output")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _reply(self) -> bytes | None:
        """Return the next line; ``None`` after the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return line
        self._process.communicate()
        return None


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
        self._idle: list[MathProcess] = []  # as many as threads have compared at the same time
        weakref.finalize(self, _close_all, self._idle)

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
