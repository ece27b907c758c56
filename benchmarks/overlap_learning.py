"""Learning curves of the modes in which a vLLM server decodes during the update, and of the synchronous mode.

As :mod:`benchmarks.modes_learning`, on the demo's task: one server with 64 slots on the first core, and training on the
second.
"""

from __future__ import annotations

import sys

from benchmarks.modes_learning import SYNCHRONOUS, Task, compare
from benchmarks.report import parse_options

TASKS = {
    "arithmetic, with a server": Task("arithmetic", (SYNCHRONOUS, "periodic", "asynchronous"), on_server=True),
}

if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(compare("overlap_learning", TASKS, parse_options(__doc__)))
