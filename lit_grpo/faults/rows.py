"""Files of JSON lines that a resumed run goes on with."""

from __future__ import annotations

import json
from pathlib import Path


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
