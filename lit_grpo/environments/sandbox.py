"""A tool that runs Python which nobody has read: an interpreter without files, network and processes.

``tools: [lit_grpo.environments.sandbox.python]`` gives it to a policy. The interpreter is Monty (the package
``pydantic-monty``, the extra ``lit_grpo[python-tool]``): a subset of Python with classes and ``re``, ``json`` and
``math``, in worker processes, so that code that brings its interpreter down does no harm. Limits of time, memory and
recursion are always set; each call begins with nothing.

Raises:
    ValueError: The package is not installed.
"""

from __future__ import annotations

import atexit
import threading
from typing import Any

from lit_grpo.process.packages import require

require("pydantic_monty", "The tool python needs pydantic-monty; install the extra lit_grpo[python-tool].")

COMPUTING_S = 5.0
"""The most seconds that code computes, and that its last value is written out."""
SLEEPING_S = 1.0
"""The most seconds that a call sleeps in all."""
LASTING_S = 10.0
"""The seconds after which a worker process that does not answer is killed."""
MEMORY_BYTES = 64 * 2**20
"""The most memory of a call."""
DEPTH = 200
"""The deepest recursion."""
PRINTED_BYTES = 2**16
"""The most that is kept of what a call prints."""
LIMITS = {
    "max_feed_duration_secs": COMPUTING_S,
    "max_total_sleep_secs": SLEEPING_S,
    "max_memory": MEMORY_BYTES,
    "max_recursion_depth": DEPTH,
}
_making = threading.Lock()
_pools: list[Any] = []


def python(code: str) -> str:
    """Run Python code, and see what it prints and the value of its last line.

    Args:
        code: The code; it has no files, no network and no packages but re, json, math and datetime.
    """
    from pydantic_monty import CollectString, MontyError  # pyright: ignore[reportMissingImports]

    printed = CollectString(max_bytes=PRINTED_BYTES)
    try:
        with _pool().checkout(limits=LIMITS) as session:
            value = session.feed_run(code, print_callback=printed)
            shown = "" if value is None else _shown(value, session)
    except MontyError as error:
        return printed.output + _told(error)
    return printed.output + shown or "Nothing was printed."


def _shown(value: Any, session: Any) -> str:
    """Return a value as text, which the worker writes: a small value may be a text without end, as of nested lists."""
    from pydantic_monty import MontyError  # pyright: ignore[reportMissingImports]

    try:
        return str(session.feed_run("f'{value}'", inputs={"value": value}))
    except MontyError as error:
        return f"The value of the last line cannot be shown; print what you need. ({_told(error)})"


def _told(error: Any) -> str:
    """Return an exception of the code by its type and message."""
    return str(error.display("type-msg") if hasattr(error, "display") else error)


def _pool() -> Any:
    """Return the worker processes, which all calls share until the end of this process."""
    from pydantic_monty import Monty  # pyright: ignore[reportMissingImports]

    with _making:
        if not _pools:
            _pools.append(Monty(request_timeout=LASTING_S).__enter__())
            atexit.register(_pools[0].__exit__, None, None, None)
    return _pools[0]
