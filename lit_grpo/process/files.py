"""Files that are replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_grpo.process.inputs import check_replaceable
from lit_grpo.process.private_folders import PrivateFolder


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that its readers, and a kill, find the old content or the new one, never a part of it.

    Raises:
        ValueError: A link, a pipe, a device or a folder has this path.
        OSError: The place cannot be written to.
    """
    check_replaceable(path)
    aside = path.with_name(f".{path.name}.writing")
    aside.unlink(missing_ok=True)  # it may be a link to a file of the user
    with aside.open("xb") as file:
        file.write(data)
    aside.replace(path)


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes ``output`` at the end; an error or an exit leaves nothing of it.

    It stands in a hidden folder beside ``output``. What a killed program has left there is removed by the next program
    that makes ``output``.

    Args:
        output: A path that does not exist; its parents are made.

    Raises:
        OSError: The place cannot be written to, or another program has made ``output`` meanwhile.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = PrivateFolder(f".{output.name}.writing-", str(output.parent))
    try:
        folder = aside.path / output.name
        folder.mkdir()
        yield folder
        folder.rename(output)
    finally:
        aside.remove()


def cache_folder() -> Path:
    """Return the folder of this user for files that can be made again; it may not be there yet.

    It is ``lit_grpo`` in ``XDG_CACHE_HOME``, which is ``~/.cache`` by default (XDG Base Directory Specification).
    """
    place = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (place if place.is_absolute() else Path.home() / ".cache") / "lit_grpo"
