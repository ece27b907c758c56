"""The file that a run records its completions' lengths in."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One completion of a run; see :func:`read_rows` for the fields."""

    prompt_id: str
    sample_id: int
    prompt_tokens: int
    tokens: int
    visit: int = 0
    step: int = 0
    predicted: float | None = None


LEAST = {"sample_id": 0, "prompt_tokens": 1, "tokens": 1, "visit": 0, "step": 0}
NEEDED = ("prompt_id", "sample_id", "prompt_tokens", "tokens")


def read_rows(path: Path) -> list[TraceRow]:
    """Read JSON lines, one object for each completion; a ValueError tells file, line, field, value and remedy.

    Fields: ``prompt_id`` (text), ``sample_id`` (0 or more), ``prompt_tokens`` and ``tokens`` (1 or more); and where
    recorded ``visit`` and ``step`` (0 or more, whole) and ``predicted`` (the tokens that were expected). Other fields
    are left alone. ``(prompt_id, visit, sample_id)`` comes once.
    """
    rows: list[TraceRow] = []
    seen: dict[tuple[str, int, int], int] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = _parse(line, f"{path}, line {number}")
            key = (row.prompt_id, row.visit, row.sample_id)
            if key in seen:
                raise ValueError(
                    f"{path}, line {number}: prompt_id, visit and sample_id {key} are those of line {seen[key]}: "
                    "count visit up where a prompt comes again."
                )
            seen[key] = number
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no rows: give a trace with one JSON object a line.")
    return rows


def _parse(line: str, place: str) -> TraceRow:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: {line.strip()[:60]!r} is no JSON ({error.msg}): give one object a line.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{place}: {line.strip()[:60]!r} is no JSON object: give one with {', '.join(NEEDED)}.")
    missing = [name for name in NEEDED if name not in record]
    if missing:
        raise ValueError(f"{place}: {missing[0]} is missing: give {', '.join(NEEDED)} in each row.")
    if not isinstance(record["prompt_id"], str):
        raise ValueError(f"{place}: prompt_id is {record['prompt_id']!r}: give text in quotes.")
    whole = {name: _whole(place, name, record[name]) for name in LEAST if name in record}
    return TraceRow(record["prompt_id"], predicted=_predicted(place, record.get("predicted")), **whole)


def _whole(place: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < LEAST[name]:
        raise ValueError(f"{place}: {name} is {value!r}: give a whole number of {LEAST[name]} or more.")
    return value


def _predicted(place: str, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{place}: predicted is {value!r}: give the tokens expected, above 0, or leave it out.")
    return float(value)
