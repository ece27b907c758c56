"""Weights in files of shared memory (safetensors), in folders that no other user can look into."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save_file

_SHARED_MEMORY = Path("/dev/shm")
_LOCK = ".owner"  # locked as long as the folder's owner lives
WEIGHTS_PREFIX = "lit_grpo_weights_"


class PrivateFolder:
    """A folder of a name that nobody can guess, for this process alone; it goes with this object.

    Its owner holds a lock on a file in it, which the kernel lets go of however the owner ends. Folders of owners that
    are dead, which a kill has left behind, are removed when the next one of the same kind is made.

    Args:
        prefix: What the folder's name begins with.
        parent: Where it is made; by default among temporary files.

    Attributes:
        path: Where it is.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        place = Path(parent or tempfile.gettempdir())
        _sweep(place, prefix)
        self.path, lock = _make(place, prefix)
        self.remove = weakref.finalize(self, _remove, self.path, lock)


def is_private(folder: Path) -> bool:
    """Whether this is a folder, and no link to one, that no other user can look into or has made."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077 and status.st_uid == os.getuid()


def _make(place: Path, prefix: str) -> tuple[Path, FileLock]:
    """Make a folder and lock it; another one, where it has been swept away before it was locked."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))  # with mode 0700
        lock = FileLock(path / _LOCK, thread_local=False)
        with suppress(Timeout, FileNotFoundError):
            lock.acquire(blocking=False)
            if path.exists():
                return path, lock


def _remove(path: Path, lock: FileLock) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.release()


def _sweep(place: Path, prefix: str) -> None:
    """Remove what dead owners of this user have left; what others have put there is neither read nor followed."""
    for path in place.glob(f"{prefix}*"):
        if not is_private(path) or not (path / _LOCK).is_file():
            continue
        with suppress(Timeout, OSError):
            lock = FileLock(path / _LOCK, thread_local=False)
            lock.acquire(blocking=False)
            _remove(path, lock)


def shared_memory() -> str | None:
    """Where shared memory is; ``None`` where there is none."""
    return str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None


@contextmanager
def weights_folder(parent: str | None = None) -> Iterator[Path]:
    """Make a private folder for weights on their way, in ``parent`` or else in shared memory where there is some."""
    folder = PrivateFolder(WEIGHTS_PREFIX, parent or shared_memory())
    try:
        yield folder.path
    finally:
        folder.remove()


def write(tensors: Iterable[tuple[str, torch.Tensor]], path: Path) -> None:
    """Write tensors to a safetensors file."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors}, path)


def read(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        for name in list(file.keys()):
            yield name, file.get_tensor(name)
