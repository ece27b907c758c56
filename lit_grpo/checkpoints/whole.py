"""Check that a checkpoint is undamaged: the checksums in its archives are right, and its weights are finite."""

from __future__ import annotations

import functools
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from lightning.__version__ import version as lightning_version
from packaging.version import InvalidVersion, Version

from lit_grpo.checkpoints.folder import (
    SHARDED,
    STATE,
    check_folder,
    check_one_save,
    read_state,
    read_written,
    replaced,
    written_tensors,
)
from lit_grpo.checkpoints.form import change_of, check_form
from lit_grpo.process.values import from_written

UNREADABLE = (
    *(pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError),
    struct.error,
)
"""Errors of torch for a file that is damaged or no checkpoint."""
_NO_ARCHIVE = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError, OSError, ValueError),
    *(OverflowError, struct.error, LookupError),
)


class DamagedError(ValueError):
    """A checkpoint is damaged, or its weights hold NaN or infinity."""


def check_whole(path: Path) -> None:
    """Refuse a checkpoint that is damaged, even if torch would load it, or whose weights hold NaN or infinity.

    The whole checkpoint is read once, with the shards of all ranks. A checkpoint that has not changed since it was
    checked is not read again.
    """
    refuse(path, fault_of(path))


def checked(path: Path) -> dict[str, Any]:
    """Return everything in a checkpoint except shards, once it is known to be whole and to have a policy."""
    check_whole(path)
    checkpoint = read_state(path)
    check_form(checkpoint, path)
    return checkpoint


def refuse(path: Path, fault: str | None) -> None:
    """Raise DamagedError for a fault that :func:`fault_of` has found, on this rank or another."""
    if fault is not None:
        raise DamagedError(f"{str(path)!r} {fault}; {_whole_beside(path)}.")


def fault_of(path: Path) -> str | None:
    """Return the fault of a checkpoint, as the rest of a sentence that begins with its name; ``None`` without a fault.

    Raises:
        ValueError: The folder is no checkpoint, or files are missing.
    """
    if path.is_dir():
        check_folder(path)
    files = [path] if path.is_file() else sorted(path.iterdir())
    return _fault(path, tuple((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files))


@functools.lru_cache(maxsize=64)
def _fault(path: Path, stamps: tuple[tuple[str, int, int], ...]) -> str | None:
    """Do the work of :func:`fault_of` once for files of these names, sizes and times (``stamps``)."""
    state = path / STATE if path.is_dir() else path
    with state.open("rb") as file:
        damage = _damage(file)
    try:
        checkpoint = read_written(path)
        from_written(checkpoint)
    except UNREADABLE as error:
        why = type(error).__name__ if damage is None else f"{type(error).__name__}; {damage}"
        return f"is no checkpoint, or a damaged one, or one that would run code ({why})"
    if damage is not None:
        return f"is damaged ({damage})"
    if not isinstance(checkpoint, Mapping):
        return None  # the code that reads it reports this
    if (fault := _version_fault(checkpoint.get("pytorch-lightning_version"))) is not None:
        return fault
    if (change := change_of(checkpoint)) is not None:
        return f"is not what was saved ({change})"
    if path.is_dir() and (fault := check_one_save(path)) is not None:
        return fault
    if path.is_dir():
        return _shards_fault(path)
    return next((_no_number(name) for name, tensor in _tensors(checkpoint) if not _is_finite(tensor)), None)


def _damage(file: IO[bytes]) -> str | None:
    """Say whether an archive is unreadable or a checksum in it is wrong; ``None`` if it is undamaged."""
    try:
        with zipfile.ZipFile(file) as archive:
            member = archive.testzip()
    except _NO_ARCHIVE as error:
        return f"its archive cannot be read: {error}"
    return None if member is None else f"the checksum of {member} in it does not match its bytes"


def _shards_fault(folder: Path) -> str | None:
    for name, place, file in written_tensors(folder):
        if (damage := _damage(file)) is not None:
            return f"is damaged ({name} in {place}: {damage})"
        file.seek(0)
        try:
            tensor = torch.load(file, map_location="cpu", weights_only=True)
        except UNREADABLE as error:
            return f"is damaged ({name} in {place} cannot be read: {type(error).__name__})"
        if not _is_finite(tensor):
            return _no_number(name)
    return None


def _version_fault(version: Any) -> str | None:
    if version is None:  # Lightning has not written the file
        return None
    try:
        theirs, ours = Version(str(version)), Version(lightning_version)
    except InvalidVersion:
        return f"is damaged (its pytorch-lightning_version is {version!r:.40}, which is no version)"
    if theirs.release[:2] > ours.release[:2]:
        return (
            f"was written with Lightning {theirs}, which this Lightning {ours} does not know; install "
            f"lightning>={theirs}, or take another checkpoint"
        )
    return None


def _tensors(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the weights and the optimizers, each by its name in a folder of shards."""
    found: dict[str, torch.Tensor] = {}
    for name in SHARDED:
        replaced(checkpoint.get(name), name, lambda place, tensor: found.setdefault(place, tensor))
    yield from found.items()


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor).all())


def _no_number(name: str) -> str:
    what = f"the weight {weight}" if (weight := name.removeprefix("state_dict.")) != name else name
    return f"holds NaN or infinity in {what}, so the run that wrote it had failed"


def _whole_beside(path: Path) -> str:
    """Say which checkpoint to take in place of a damaged one: the newest undamaged one in its folder."""
    versions: dict[Path, int] = {}
    for other in path.parent.glob("*.ckpt"):
        with suppress(*UNREADABLE):
            if other != path and fault_of(other) is None:
                versions[other] = int(read_state(other)["policy_version"])
    if not versions:
        return "give one that a run has left in its folder checkpoints/"
    newest = max(versions, key=lambda other: versions[other])
    return f"give {str(newest)!r}, which is undamaged and of update {versions[newest]}"
