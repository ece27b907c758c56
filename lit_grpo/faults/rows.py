"""Files of JSON lines that a resumed run continues."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_grpo.process.files import replace_file
from lit_grpo.process.inputs import read_lines

_SURROGATE = re.compile("[\ud800-\udfff]")


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON; lone surrogates are escaped, and numbers that are not finite become null."""
    text = json.dumps(_finite(row), ensure_ascii=False, default=str)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def writable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _finite(value: Any) -> Any:
    """Replace numbers that JSON lacks, NaN and infinity, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def forget_after(path: Path, step: int) -> None:
    """Drop the rows of a file whose ``step`` is larger than this one, and an unfinished line at its end.

    A killed run has written these rows, and the run that is resumed at ``step`` writes them again. A line that is no
    row stays.
    """
    if not path.exists():
        return
    lines = list(read_lines(path))
    kept = [line for line in lines if line.endswith(b"\n") and not _is_after(line, step)]
    if len(kept) < len(lines):
        replace_file(path, b"".join(kept))


def _is_after(line: bytes, step: int) -> bool:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    found = row.get("step") if isinstance(row, dict) else None
    return isinstance(found, int) and found > step
