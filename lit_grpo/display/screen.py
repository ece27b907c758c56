"""Where a run shows what it is at."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import IO

from rich.console import Console, RenderableType
from rich.live import Live

REFRESHES_PER_S = 4


@cache
def the_console() -> Console:
    """Return the one console on standard output: a second one would write into the lines that live on the first.

    In a notebook it writes text alone.
    """
    return Console(highlight=False, markup=False, emoji=False, force_jupyter=False)


class Screen:
    """Standard output: on a terminal with live lines at its foot, or plain text.

    While the lines live, what others print, warn of and log comes out above them, whole.
    """

    def __init__(self) -> None:
        self.console = the_console()
        self._live: Live | None = None
        self._logs: list[tuple[logging.StreamHandler[IO[str]], IO[str]]] = []

    @property
    def is_terminal(self) -> bool:
        """Whether lines can live here: not in a file, a pipe, a notebook or an editor's shell."""
        return sys.stdout.isatty() and not self.console.is_dumb_terminal

    def show(self, render: Callable[[], RenderableType]) -> None:
        """Keep lines at the foot of the terminal, made anew a few times a second in a thread of their own."""
        if self._live is not None or not self.is_terminal:
            return
        self._live = Live(
            console=self.console,
            get_renderable=render,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        outputs = {id(stream): name for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr))}
        self._live.start(refresh=True)
        for handler in _stream_handlers():  # they write to the streams that they were made with
            if id(handler.stream) in outputs:
                self._logs.append((handler, handler.stream))
                handler.setStream(getattr(sys, outputs[id(handler.stream)]))

    def hide(self) -> None:
        """Take the lines away."""
        for handler, stream in self._logs:
            handler.setStream(stream)
        self._logs = []
        if self._live is not None:
            self._live.stop()
        self._live = None


def _stream_handlers() -> Iterator[logging.StreamHandler[IO[str]]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            yield from (handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler))
