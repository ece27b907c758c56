"""The place of a checkpoint on the disk, where the old one or the new one is at any time."""

from __future__ import annotations

import shutil
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint could not be written; the one before it is still there."""


def not_written(path: Path, error: BaseException) -> CheckpointError:
    """Say why ``path`` could not be written."""
    cause = error if isinstance(error, OSError) else error.__context__
    reason = cause.strerror if isinstance(cause, OSError) else (str(error).splitlines() or [type(error).__name__])[0]
    return CheckpointError(
        f"The checkpoint {path} could not be written ({reason}), and what was there has been left as it was; "
        "make room or choose another run.dir."
    )


def aside_of(path: Path) -> Path:
    """Where a checkpoint is written before it takes its place."""
    return path.with_name(f".{path.name}.writing")


def settled(path: Path) -> Path:
    """Return where the checkpoint of a place is: there, or beside it where a kill came while it was replaced."""
    before = _before(path)
    return before if not path.exists() and before.exists() else path


def put_in_place(aside: Path, path: Path) -> None:
    """Put a file or a folder that has been written in the place of the checkpoint that was there, if there was one.

    A file takes a file's place at once. No system lets a folder take another's: the one that was there goes aside
    first, where :func:`settled` finds it until the new one is in its place.
    """
    before = _before(path)
    if path.exists() and (path.is_dir() or aside.is_dir()):
        remove(before)
        path.rename(before)
    aside.replace(path)
    remove(before)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _before(path: Path) -> Path:
    return path.with_name(f".{path.name}.before")
