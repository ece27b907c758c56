"""``python -m lit_grpo.process.bound MODULE ...`` runs a module as a program that is killed when its parent ends.

Processes that the program starts with multiprocessing's method ``spawn`` are killed when the program ends: each of them
imports the main module first of all, by the name ``__mp_main__``. Busy and stopped processes end like others, because
Linux sends the signal. On other systems the module runs unbound.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

from lit_grpo.process.signals import end_with_parent

PARENT_VARIABLE = "LIT_GRPO_PARENT"
"""The process id of the parent, which may have ended before this process could ask for the signal."""


def _bind() -> None:
    end_with_parent(signal.SIGKILL)
    if os.environ.get(PARENT_VARIABLE, "") not in ("", str(os.getppid())):
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the processes that this one starts


if __name__ in ("__main__", "__mp_main__"):
    _bind()
if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")  # not as sys.modules["__main__"], which is imported again
