"""Who decoded when."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """A slot decodes one completion from ``start`` to ``end``, in steps or seconds.

    ``group`` is a number that completions of one prompt share. A completion that was set aside has several spans.
    """

    slot: int
    start: float
    end: float
    group: int
