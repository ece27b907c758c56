"""Files of JSON lines that a resumed run goes on with."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON that UTF-8 can write: lone surrogates are escaped, numbers not finite are null."""
    text = json.dumps(_finite(row), ensure_ascii=False, default=str)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def writable(text: str) -> str:
    """Return a text that UTF-8 can write: lone surrogates are escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _finite(value: Any) -> Any:
    """Replace what JSON has no number for, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def forget_after(path: Path, step: int) -> None:
    """Drop the rows of a file whose ``step`` is behind this one, and half a line at its end.

    A run that was killed has written them, and the run that is resumed at ``step`` writes them again. A file that is
    not there stays so.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
    if len(kept) < len(lines):
        aside = path.with_name(f".{path.name}.writing")
        aside.unlink(missing_ok=True)  # it may be a link to a file of the user's
        with aside.open("xb") as file:
            file.writelines(kept)
        aside.replace(path)
