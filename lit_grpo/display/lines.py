"""Lines of fields that fit the width of the screen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

GAP = "  "
LEAST_BAR, MOST_BAR = 8, 30


class Field(NamedTuple):
    """A part of a line. On a narrow screen the field with the highest ``rank`` is left out first.

    A field with a ``share`` is a bar, which takes the remaining columns.
    """

    text: str
    rank: int = 0
    style: str = ""
    share: float | None = None

    @property
    def width(self) -> int:
        """The smallest number of columns that it needs."""
        return cell_len(self.text) if self.share is None else LEAST_BAR


def fitting(fields: Sequence[Field], width: int) -> list[Field]:
    """Leave out fields until the others fit in ``width`` columns; one field always stays."""
    kept = [field for field in fields if field.text or field.share is not None]
    while len(kept) > 1 and _columns(kept) > width:
        kept.remove(max(kept, key=lambda field: field.rank))
    return kept


def as_text(fields: Sequence[Field], width: int, ascii_only: bool = False) -> Text:
    """Return one line of at most ``width`` columns."""
    kept = fitting(fields, width)
    bar = min(MOST_BAR, LEAST_BAR + max(width - _columns(kept), 0))
    parts = [
        Text(field.text, field.style) if field.share is None else _bar(field.share, bar, field.style, ascii_only)
        for field in kept
    ]
    line = Text(GAP).join(parts)
    if cell_len(line.plain) > width:
        line = Text(set_cell_size(line.plain, width), kept[0].style)
    line.no_wrap = True
    return line


def as_plain(fields: Sequence[Field]) -> str:
    """Return all fields except bars as text."""
    return GAP.join(field.text for field in fields if field.text and field.share is None)


def _columns(fields: Sequence[Field]) -> int:
    return sum(field.width for field in fields) + len(GAP) * (len(fields) - 1)


def _bar(share: float, width: int, style: str, ascii_only: bool) -> Text:
    done, to_do = ("#", "-") if ascii_only else ("━", "─")
    filled = math.floor(min(max(share, 0.0), 1.0) * width)
    return Text.assemble((done * filled, style), (to_do * (width - filled), "dim"))


def duration(seconds: float) -> str:
    """Write seconds as people do: ``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def count(number: float) -> str:
    """Write a large number in few columns: ``812``, ``2.31k``, ``1.2M``."""
    if not math.isfinite(number):
        return str(number)
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 1000 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"
