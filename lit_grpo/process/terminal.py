"""Text for a terminal: text of policies and data made safe, numbers with their nouns, and errors in one line."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters that change a terminal's cursor, colours, clipboard or text direction."""


def visible(text: str) -> str:
    """Write control characters as text, tabs and line ends aside: a terminal would obey them."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def say(text: str, *, flush: bool = False) -> None:
    """Print a line for the user; a terminal or a pipe that is gone is no reason to fail."""
    with suppress(OSError, ValueError):  # a closed pipe; a closed file, or one that cannot encode the text
        print(text, flush=flush)


def warn(message: str, stacklevel: int = 1) -> None:
    """Warn the user; where a filter makes an error of the warning, print it, because a warning may not end a run."""
    try:
        warnings.warn(message, stacklevel=stacklevel + 1)
    except Warning:
        with suppress(OSError, ValueError):
            print(f"warning: {message}", file=sys.stderr, flush=True)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Write a number with its noun: ``1 update``, ``2 updates``, ``2,048 batches``.

    Args:
        number: The number.
        noun: The noun in the singular.
        plural: Of several; the noun with an ``s`` by default.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without a full stop; the error's type if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def error_text(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"


def markdown(text: str) -> str:
    r"""Write a text of others so that Markdown shows it as it stands, on one line: ``[x](y)`` becomes ``\[x\](y)``.

    Punctuation that can begin markup, HTML or a formula is escaped with a backslash (CommonMark 0.31, section 2.4); an
    underscore within a word is none.
    """
    text = " ".join(visible(text).replace("\u2028", " ").replace("\u2029", " ").split())
    return re.sub(r"[\\`*{}\[\]<>#!|~$&]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])", r"\\\g<0>", text)


def code_span(text: str) -> str:
    """Write a text of others as code of Markdown, on one line, also in a cell of a table."""
    text = " ".join(visible(text).replace("`", "'").replace("|", "¦").split())
    return f"`{text or ' '}`"


@contextmanager
def may_fail(what: str, instead: str) -> Iterator[None]:
    """Continue with one warning if a picture or a page cannot be made: what it shows is kept elsewhere already.

    Args:
        what: The file that is made.
        instead: Where its content is, as in ``its figures are in evaluation.json``.
    """
    try:
        yield
    except Exception as error:
        warn(f"{what} could not be made ({error_text(error)}); {instead}.", stacklevel=3)


def on_one_line(text: str) -> str:
    r"""Write tabs and line ends as ``\t`` and ``\n`` as well."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")
