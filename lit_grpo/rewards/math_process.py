"""The process in which answers are compared."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("math_worker.py")


class MathProcess:
    """A running ``math_worker.py``; for one thread at a time.

    Raises:
        RuntimeError: If it does not start.
    """

    def __init__(self, timeout_s: float) -> None:
        # -P: the folder of the script, whose modules have common names, stays out of its import path.
        command = [sys.executable, "-P", str(WORKER), str(timeout_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._reply() is None:
            raise RuntimeError("math-verify does not start; install it with: pip install math-verify")

    @property
    def is_alive(self) -> bool:
        """Whether it can compare."""
        return self._process.poll() is None

    def compare(self, expected: str, completion: str) -> bool | None:
        """Whether the completion's answer equals the expected one; ``None`` if that is no mathematics.

        A comparison that brings the process down (by time or memory) is ``False``.

        Raises:
            RuntimeError: If the process ends in any other way.
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
        """The next line, or ``None`` once the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return line
        self._process.communicate()
        return None
