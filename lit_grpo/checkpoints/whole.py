"""Whether a checkpoint is what was written: by the checksums in its archives, and by weights that are numbers."""

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

from lit_grpo.checkpoints.folder import STATE, check_folder, read_state, written_tensors

UNREADABLE = (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, LookupError, TypeError, struct.error)
"""What torch raises of a file that is damaged or of another kind."""
_NO_ARCHIVE = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError, OSError, ValueError),
    *(OverflowError, struct.error, LookupError),
)


class DamagedError(ValueError):
    """A checkpoint is not what was written, or its weights are no numbers."""


def check_whole(path: Path) -> None:
    """Refuse a checkpoint that is damaged, of which torch itself loads most, or whose weights are no numbers.

    All of it is read once, of a folder the shards of all ranks too; a checkpoint that has been read through and has
    not changed since is not read again.

    Args:
        path: A file, or a folder of shards.

    Raises:
        DamagedError: It is one of these, or a later Lightning has written it; the sentence names the newest whole
            checkpoint beside it.
        ValueError: It is a folder that is no checkpoint, or one that lacks files.
    """
    refuse(path, fault_of(path))


def refuse(path: Path, fault: str | None) -> None:
    """Refuse a checkpoint for what :func:`fault_of` has found, on this rank or another.

    Raises:
        DamagedError: It has found something; the sentence names the newest whole checkpoint beside it.
    """
    if fault is not None:
        raise DamagedError(f"{str(path)!r} {fault}; {_whole_beside(path)}.")


def fault_of(path: Path) -> str | None:
    """What is wrong with a checkpoint, as what follows its name in a sentence; ``None`` where nothing is.

    Raises:
        ValueError: It is a folder that is no checkpoint, or one that lacks files.
    """
    if path.is_dir():
        check_folder(path)
    files = [path] if path.is_file() else sorted(path.iterdir())
    return _fault(path, tuple((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files))


@functools.lru_cache(maxsize=64)
def _fault(path: Path, stamps: tuple[tuple[str, int, int], ...]) -> str | None:
    """Look a checkpoint through; ``stamps`` are the names, sizes and times of its files, which tell of a change."""
    state = path / STATE if path.is_dir() else path
    with state.open("rb") as file:
        damage = _damage(file)
    try:
        checkpoint = read_state(path)
    except UNREADABLE as error:
        why = type(error).__name__ if damage is None else f"{type(error).__name__}; {damage}"
        return f"is no checkpoint, or a damaged one, or one that would run code ({why})"
    if damage is not None:
        return f"is damaged ({damage})"
    if not isinstance(checkpoint, Mapping):
        return None  # whoever reads it says what it is not
    if (fault := _version_fault(checkpoint.get("pytorch-lightning_version"))) is not None:
        return fault
    if path.is_dir():
        return _shards_fault(path)
    return next((_no_number(name) for name, tensor in _tensors(checkpoint) if not _is_finite(tensor)), None)


def _damage(file: IO[bytes]) -> str | None:
    """What the checksums of an archive show, in words."""
    try:
        with zipfile.ZipFile(file) as archive:
            member = archive.testzip()
    except _NO_ARCHIVE as error:
        return f"its archive cannot be read: {error}"
    return None if member is None else f"the checksum of {member} in it is not that of its bytes"


def _shards_fault(folder: Path) -> str | None:
    for name, place, file in written_tensors(folder):
        if (damage := _damage(file)) is not None:
            return f"is damaged ({name} in {place}: {damage})"
        file.seek(0)
        try:
            tensor = torch.load(file, map_location="cpu", weights_only=True)
        except UNREADABLE as error:
            return f"is damaged ({name} in {place} cannot be read: {type(error).__name__})"
        if name.startswith("state_dict.") and not _is_finite(tensor):
            return _no_number(name.removeprefix("state_dict."))
    return None


def _version_fault(version: Any) -> str | None:
    if version is None:  # of a file that Lightning has not written
        return None
    try:
        theirs, ours = Version(str(version)), Version(lightning_version)
    except InvalidVersion:
        return f"is damaged (its pytorch-lightning_version is {version!r:.40}, which is none)"
    if theirs.release[:2] > ours.release[:2]:
        return (
            f"was written with Lightning {theirs}, which this Lightning {ours} does not know; install "
            f"lightning>={theirs}, or take another checkpoint"
        )
    return None


def _tensors(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    weights = checkpoint.get("state_dict")
    for name, value in weights.items() if isinstance(weights, Mapping) else ():
        if isinstance(value, torch.Tensor):
            yield name, value


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor).all())


def _no_number(name: str) -> str:
    return f"holds NaN or infinity in the weight {name}, so the run that wrote it had failed"


def _whole_beside(path: Path) -> str:
    """Name the newest whole checkpoint in a damaged one's folder."""
    versions: dict[Path, int] = {}
    for other in path.parent.glob("*.ckpt"):
        with suppress(*UNREADABLE):
            if other != path and fault_of(other) is None:
                versions[other] = read_state(other)["policy_version"]
    if not versions:
        return "give one that a run has left in its folder checkpoints/"
    newest = max(versions, key=lambda other: versions[other])
    return f"beside it {str(newest)!r} is whole, of update {versions[newest]}: give that"
