"""A tool that runs Python which nobody has read: an interpreter without files, network and processes.

``tools: [lit_grpo.environments.sandbox.python]`` gives it to a policy. The interpreter is Monty (the package
``pydantic-monty``, the extra ``lit_grpo[python-tool]``): a subset of Python with classes and ``re``, ``json`` and
``math``, in worker processes, so that code that brings its interpreter down does no harm. Limits of CPU time, memory
and recursion are always set; ``time.sleep`` returns at once; each call begins with nothing.

Raises:
    ValueError: The package is not installed.
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import threading
from contextlib import suppress
from typing import Any

from lit_grpo.environments.contract import EnvironmentFailed
from lit_grpo.process.calls import CallTimeout
from lit_grpo.process.packages import require

require("pydantic_monty", "The tool python needs pydantic-monty; install the extra lit_grpo[python-tool].")

COMPUTING_S = 5
"""The most seconds of CPU time that code computes, and that its last value is written out."""
LASTING_S = 60.0
"""The seconds of wall time after which a worker process that does not answer is killed, which only a busy machine or a
system without limits of CPU time (macOS) comes to; the trajectory then has no reward."""
MEMORY_BYTES = 64 * 2**20
"""The most memory of a call."""
DEPTH = 200
"""The deepest recursion."""
PRINTED_BYTES = 2**16
"""The most that is kept of what a call prints."""
LIMITS = {"max_memory": MEMORY_BYTES, "max_recursion_depth": DEPTH}
_making = threading.Lock()
_pools: list[Any] = []


def python(code: str) -> str:
    """Run Python code, and see what it prints and the value of its last line.

    Args:
        code: The code; it has no files, no network and no packages but re, json, math and datetime.
    """
    from pydantic_monty import MontyCrashedError, MontyError

    printed = _Printed()
    try:
        with _pool().checkout(limits=LIMITS, os_policy={"sleep": "zero"}) as session:
            printed.process = session.worker_pid
            _limit_cpu(session.worker_pid)
            value = session.feed_run(code, print_callback=printed)
            shown = "" if value is None else _shown(value, session)
    except MontyCrashedError as error:
        return printed.too_much() if printed.is_full else _ended(error)
    except MontyError as error:
        return printed.text() + _told(error)
    if printed.is_full:
        return printed.too_much()
    return printed.text() + shown or "Nothing was printed."


class _Printed:
    """Keeps what a call prints, up to :data:`PRINTED_BYTES`, and ends a process that prints more.

    Attributes:
        process: The process that prints.
        is_full: Whether more was printed than is kept.
    """

    def __init__(self) -> None:
        self.process = 0
        self.is_full = False
        self._parts: list[str] = []
        self._left = PRINTED_BYTES

    def __call__(self, stream: str, text: str) -> None:
        """Keep a text."""
        if self.is_full:
            return
        kept = text.encode()[: self._left].decode(errors="ignore")
        self._parts.append(kept)
        self._left -= len(kept.encode())
        if len(kept) < len(text):
            self.is_full = True
            with suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)

    def text(self) -> str:
        return "".join(self._parts)

    def too_much(self) -> str:
        return f"{self.text()}MemoryError: the code prints more than {PRINTED_BYTES} bytes."


def _limit_cpu(process: int) -> None:
    """Have the system end a worker process that uses more than :data:`COMPUTING_S` of CPU time."""
    if hasattr(resource, "prlimit"):  # Linux
        _, most = resource.prlimit(process, resource.RLIMIT_CPU)
        resource.prlimit(process, resource.RLIMIT_CPU, (COMPUTING_S, most))


def _ended(error: Any) -> str:
    """Return what the policy reads when its code has ended the worker process; raise where the machine has."""
    if error.timed_out:
        raise CallTimeout.after(LASTING_S)
    if "SIGKILL" in str(error):
        raise EnvironmentFailed("the system has ended the process that ran the code")
    if "SIGXCPU" in str(error):  # what was printed until then depends on the machine
        return f"TimeoutError: the code computes for more than {COMPUTING_S} s."
    return _told(error)


def _shown(value: Any, session: Any) -> str:
    """Return a value as text, which the worker writes: a small value may be a text without end, as of nested lists."""
    from pydantic_monty import MontyCrashedError, MontyError

    try:
        return str(session.feed_run("f'{value}'", inputs={"value": value}))
    except MontyCrashedError:
        raise
    except MontyError as error:
        return f"The value of the last line cannot be shown; print what you need. ({_told(error)})"


def _told(error: Any) -> str:
    return str(error.display("type-msg") if hasattr(error, "display") else error)


def _pool() -> Any:
    """Return the worker processes, which all calls share until the end of this process."""
    from pydantic_monty import Monty

    with _making:
        if not _pools:
            _pools.append(Monty(request_timeout=LASTING_S, max_checkouts_per_worker=1).__enter__())
            atexit.register(_pools[0].__exit__, None, None, None)
    return _pools[0]
