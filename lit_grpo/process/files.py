"""Files that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that its readers, and a kill, find the old content or the new one, never a part of it."""
    aside = path.with_name(f".{path.name}.writing")
    aside.unlink(missing_ok=True)  # it may be a link to a file of the user
    with aside.open("xb") as file:
        file.write(data)
    aside.replace(path)


def cache_folder() -> Path:
    """Return the folder of this user for files that can be made again; it may not be there yet.

    It is ``lit_grpo`` in ``XDG_CACHE_HOME``, which is ``~/.cache`` by default (XDG Base Directory Specification).
    """
    place = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (place if place.is_absolute() else Path.home() / ".cache") / "lit_grpo"
