"""The place of a checkpoint on the disk, which holds the old one or the new one at any time."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_grpo.process.inputs import check_replaceable
from lit_grpo.process.terminal import first_line
from lit_grpo.process.values import PLAIN, named_foreign

STATE = "state.pt"
"""The file in the folder of a checkpoint with everything but the shards."""


class CheckpointError(ValueError):
    """A checkpoint could not be written; the one before it, if there was one, is unchanged."""


def not_written(path: Path, error: BaseException) -> CheckpointError:
    """Say why ``path`` could not be written."""
    if isinstance(error, CheckpointError):
        return error
    cause = error if isinstance(error, OSError) else error.__context__
    reason = cause.strerror if isinstance(cause, OSError) else first_line(error)
    remedy = "make room or choose another run.dir"
    if isinstance(cause, FileNotFoundError | NotADirectoryError):
        remedy = "its folder was moved or deleted while the run went on"
    return CheckpointError(f"The checkpoint {path} could not be written ({reason}){_kept(path)}; {remedy}.")


def not_readable(path: Path, checkpoint: Mapping[str, Any], error: BaseException) -> CheckpointError:
    """Say which value of a checkpoint its reader would not give back, or why else it was not written."""
    is_disks = isinstance(error, OSError) or isinstance(error.__context__, OSError)
    named = None if is_disks else named_foreign(checkpoint)
    if named is None:
        return not_written(path, error)
    return CheckpointError(
        f"The checkpoint {path} could not be read back, because {named}{_kept(path)}; have the state() or state_dict() "
        f"that says so return {PLAIN}."
    )


def _kept(path: Path) -> str:
    return ", and the one before it is unchanged" if settled(path).exists() else ""


def aside_of(path: Path) -> Path:
    """Return the path at which a checkpoint is written before it is moved to its place."""
    return path.with_name(f".{path.name}.writing")


def settled(path: Path) -> Path:
    """Return where a checkpoint is: in its place, or next to it if a kill interrupted its replacement."""
    before = _before(path)
    return before if not path.exists() and before.exists() else path


def put_in_place(aside: Path, path: Path) -> None:
    """Move a written file or folder to its place, and remove the checkpoint that was there.

    A file replaces a file at once. No system lets a folder replace another: the old checkpoint is moved aside first,
    where :func:`settled` finds it until the new one is in its place.

    Raises:
        CheckpointError: What is there is no checkpoint: a link, a pipe, a device, or a folder of other files.
    """
    _check_replaceable(path)
    before = _before(path)
    if path.exists() and (path.is_dir() or aside.is_dir()):
        remove(before)
        path.rename(before)
    aside.replace(path)
    remove(before)


def _check_replaceable(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        if not (path / STATE).is_file() and any(path.iterdir()):
            raise CheckpointError(
                f"{path} is a folder without {STATE}, so it is no checkpoint and is not replaced; move it elsewhere."
            )
        return
    try:
        check_replaceable(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _before(path: Path) -> Path:
    return path.with_name(f".{path.name}.before")
