"""Texts of others (policies, data, files, users), written so that each place shows them as they stand.

There is one function for each place: :func:`visible` and :func:`say` for a terminal, :func:`markdown`,
:func:`code_span` and :func:`fenced` for Markdown, :func:`shell` for a command to copy, :func:`html_text` for HTML, and
:func:`picture_text` for a picture. Also numbers with their nouns, and errors in one line.
"""

from __future__ import annotations

import html
import re
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lit_grpo.process.urls import masked

_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Characters that change a terminal's cursor, colors, clipboard or text direction, and code points that are none."""
_MARKUP = re.compile(r"[\\`*{}\[\]<>#!|~$&]|(?<![0-9A-Za-z])[_@]|_(?![0-9A-Za-z])|:(?=//)|(?<=www)\.", re.IGNORECASE)


def visible(text: str) -> str:
    """Write control characters as text, tabs and line ends aside, for a terminal would obey them, and mask secrets."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", masked(text))


def say(text: str, *, flush: bool = False) -> None:
    """Print a line for the user, control characters in it made visible.

    A terminal or a pipe that is gone is no reason to fail.
    """
    with suppress(OSError, ValueError):  # a closed pipe; a closed file, or one that cannot encode the text
        print(visible(text), flush=flush)


def warn(message: str, stacklevel: int = 1) -> None:
    """Warn the user; where a filter makes an error of the warning, print it, because a warning may not end a run."""
    try:
        warnings.warn(message, stacklevel=stacklevel + 1)
    except Warning:
        with suppress(OSError, ValueError):
            print(f"warning: {visible(message)}", file=sys.stderr, flush=True)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Write a number with its noun: ``1 update``, ``2 updates``, ``2,048 batches``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Iterable[Any], most: int = 20) -> str:
    """Name the first of several things, quoted, and how many more there are: ``'a', 'b' and 2,998 more``."""
    every = list(names)
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return ", ".join(f"{name!r:.60}" for name in every[:most]) + more or "none"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without a full stop; the error's type if it has no message."""
    lines = masked(str(error)).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def error_text(error: BaseException) -> str:
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"


def markdown(text: str) -> str:
    r"""Write a text of others so that Markdown shows it as it stands, on one line: ``[x](y)`` becomes ``\[x\](y)``.

    Punctuation that can begin markup, HTML, a formula, a link or a mention is escaped with a backslash (CommonMark
    0.31, section 2.4); an underscore within a word is none.
    """
    return _MARKUP.sub(r"\\\g<0>", one_line(text))


def code_span(text: str) -> str:
    """Write a text of others as code of Markdown, on one line, also in a cell of a table."""
    return f"`{one_line(text).replace('`', chr(39)).replace('|', '¦') or ' '}`"


def fenced(text: str, language: str = "text") -> str:
    """Write a text of others as a block of code of Markdown that no line of the text can end."""
    text = visible(text)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def shell(text: str) -> str:
    """Write a text of others as one word of a shell, such as a path in a command to copy.

    Line ends and control characters are written as bash, zsh and ksh read them within ``$'...'``.
    """
    if one_line(text) == text:
        return shlex.quote(text)
    plain = re.sub(r"['\\]", r"\\\g<0>", text)
    return "$'" + re.sub(rf"{_CONTROL.pattern}|\s(?<! )", lambda found: _as_bytes(found[0]), plain) + "'"


def html_text(text: str) -> str:
    return html.escape(visible(text))


def picture_text(text: str) -> str:
    r"""Write a text of others for a picture of matplotlib, on one line: dollar signs begin no formula.

    A legend leaves out what begins with an underscore, so a blank stands before it.
    """
    text = one_line(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def one_line(text: str) -> str:
    """Write a text on one line: control characters are made visible, and all white space is one blank."""
    return " ".join(visible(text).split())


def _as_bytes(character: str) -> str:
    of_a_path = "\udc80" <= character <= "\udcff"  # a byte of a path that is no UTF-8
    encoded = character.encode("utf-8", "surrogateescape" if of_a_path else "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in encoded)


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
