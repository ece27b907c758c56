"""A process that imports once what takes seconds, and runs each module that it is told of in a fork of itself.

It reads a line of JSON for each: the module, its arguments, and the file that takes what it prints on standard output
and on standard error; it answers with the exit code. The module runs as with ``python -m``, to the end of its process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import sys
from typing import Any


def main() -> None:
    """Serve until standard input ends."""
    sys.path[0] = os.getcwd()  # as with python -m
    imported = set[str]()
    atexit.register(gc.unfreeze)  # or triton's bindings tell of every object that is left at the end
    for line in sys.stdin:
        task = json.loads(line)
        for name in {"lightning.pytorch", "transformers", *task["imports"]} - imported:
            importlib.import_module(name)
            imported.add(name)
        gc.freeze()  # no fork looks for garbage among what is imported
        if (child := os.fork()) == 0:
            run(task)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(task: dict[str, Any]) -> None:
    """Be the process of a module."""
    for number, path in enumerate((os.devnull, task["stdout"], task["stderr"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.argv = [task["module"], *task["arguments"]]
    runpy.run_module(task["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
