"""Standard output with live lines at its foot."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import IO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from lit_grpo.process.terminal import visible

REFRESHES_PER_S = 4


@cache
def the_console() -> Console:
    """Return the only console on standard output; a second one would write into the live lines of the first.

    In a notebook it writes plain text.
    """
    return _Console(highlight=False, markup=False, emoji=False, force_jupyter=False)


def tell(text: str) -> None:
    """Print a sentence; on a terminal its lines end between words."""
    console = the_console()
    console.print(Text(visible(text)), soft_wrap=not console.is_terminal)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Print no more, and raise the error of the closed pipe; rich would end the process, and the run with it."""
        self.quiet = True
        raise


class Screen:
    """Standard output: a terminal with live lines at its foot, or plain text.

    While there are live lines, prints, warnings and logs of other code appear above them.
    """

    def __init__(self) -> None:
        self.console = the_console()
        self._live: Live | None = None
        self._logs: list[tuple[logging.StreamHandler[IO[str]], IO[str]]] = []

    @property
    def is_terminal(self) -> bool:
        """True if live lines are possible; in a file, a pipe, a notebook or an editor's shell they are not."""
        return sys.stdout.isatty() and not self.console.is_dumb_terminal

    def show(self, render: Callable[[], RenderableType]) -> None:
        """Show live lines at the foot of the terminal; a thread renders them again a few times a second."""
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
        for handler in _stream_handlers():  # they write to the streams of their creation, not to rich's
            if id(handler.stream) in outputs:
                self._logs.append((handler, handler.stream))
                handler.setStream(getattr(sys, outputs[id(handler.stream)]))

    def hide(self) -> None:
        """Remove the live lines."""
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
