"""Programs on a pseudo-terminal, whose screen is read."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyte
from rich.cells import cell_len

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Seen:
    """What a terminal has shown."""

    columns: int
    code: int = -1
    raw: str = ""
    final: list[str] = field(default_factory=list)
    """All lines at the end, those that have scrolled away among them."""
    screens: list[list[str]] = field(default_factory=list)
    """The screen after each output."""

    @property
    def longest(self) -> int:
        """The columns of the longest line that was written, which may have wrapped."""
        return max(cell_len(line) for line in re.split(r"[\r\n]", ESCAPES.sub("", self.raw)))

    def lines(self, pattern: str) -> list[str]:
        """All lines that any screen had and that match."""
        found = {line: None for screen in self.screens for line in screen if re.search(pattern, line)}
        return list(found)


def run_on_terminal(
    arguments: Sequence[str], columns: int, lines: int, folder: Path, stop_at: str = "", signal: int = 0
) -> Seen:
    """Run ``python ARGUMENTS`` on a terminal of this size; send a signal once ``stop_at`` is on the screen."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=environment
    )
    os.close(slave)
    screen = pyte.HistoryScreen(columns, lines, history=10_000, ratio=0.5)
    stream = pyte.ByteStream(screen)
    seen, deadline = Seen(columns), time.monotonic() + 500
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 1)[0]:
            continue
        try:
            data = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen.raw += data.decode(errors="replace")
        stream.feed(data)
        seen.screens.append([line.rstrip() for line in screen.display])
        if stop_at and any(stop_at in line for line in screen.display):
            stop_at = ""
            process.send_signal(signal)
    os.close(master)
    seen.code = process.wait(120)
    above = ["".join(row[x].data for x in range(columns)).rstrip() for row in screen.history.top]
    seen.final = [*above, *(line.rstrip() for line in screen.display)]
    return seen
