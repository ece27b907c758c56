"""Standard output and error, opened again after a user's function has closed them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_NAMES = {1: "stdout", 2: "stderr"}


class StdioGuard:
    """Opens ``sys.stdout``, ``sys.stderr`` and their file descriptors again if they have been closed.

    A function of a user that calls ``sys.stdout.close()`` or ``os.close(1)``, as some libraries do, would otherwise end
    the run at its next line on the screen. What is written while they are closed is lost.
    """

    def __init__(self) -> None:
        self._copies: dict[int, int] = {}
        for descriptor in _NAMES:
            with suppress(OSError):  # a daemon has none
                self._copies[descriptor] = os.dup(descriptor)

    def mend(self) -> list[str]:
        """Open the closed streams again; return their names."""
        mended: list[str] = []
        for descriptor, copy in self._copies.items():
            name = _NAMES[descriptor]
            stream = getattr(sys, name)
            is_gone = False
            try:
                os.fstat(descriptor)
            except OSError:
                is_gone = True
                with suppress(OSError):  # the copy is closed as well
                    os.dup2(copy, descriptor)
            if stream is not None and stream.closed:
                is_gone = True
                again = open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
                setattr(sys, name, again)
            mended += [name] if is_gone else []
        return mended

    def close(self) -> None:
        """Close the copies of the file descriptors."""
        for copy in self._copies.values():
            with suppress(OSError):  # a function has closed it
                os.close(copy)
        self._copies = {}
