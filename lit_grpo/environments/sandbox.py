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
"""The most seconds that a call computes."""
LASTING_S = 10.0
"""The most seconds of a call, those that it sleeps among them."""
MEMORY_BYTES = 64 * 2**20
"""The most memory of a call."""
DEPTH = 200
"""The deepest recursion."""
PRINTED_BYTES = 2**16
"""The most that is kept of what a call prints."""
_making = threading.Lock()
_pools: list[Any] = []


def python(code: str) -> str:
    """Run Python code, and see what it prints and the value of its last line.

    Args:
        code: The code; it has no files, no network and no packages but re, json, math and datetime.
    """
    from pydantic_monty import CollectString, MontyError  # pyright: ignore[reportMissingImports]

    printed = CollectString(max_bytes=PRINTED_BYTES)
    limits = {"max_feed_duration_secs": COMPUTING_S, "max_memory": MEMORY_BYTES, "max_recursion_depth": DEPTH}
    try:
        with _pool().checkout(limits=limits) as session:
            value = session.feed_run(code, print_callback=printed)
    except MontyError as error:
        return f"{printed.output}{type(error).__name__.removeprefix('Monty')}: {error}"
    return printed.output + ("" if value is None else str(value)) or "Nothing was printed."


def _pool() -> Any:
    """Return the worker processes, which all calls share until the end of this process."""
    from pydantic_monty import Monty  # pyright: ignore[reportMissingImports]

    with _making:
        if not _pools:
            _pools.append(Monty(request_timeout=LASTING_S).__enter__())
            atexit.register(_pools[0].__exit__, None, None, None)
    return _pools[0]
