"""Weights in a file of shared memory: all of them, or only the elements that changed (safetensors)."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file

_INDEX, _VALUE = "|index", "|value"
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


@contextmanager
def weights_folder(parent: str | None = None) -> Iterator[Path]:
    """Make a private folder for weights on their way, in ``parent`` or else in shared memory where there is some."""
    parent = parent or (str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None)
    folder = PrivateFolder(WEIGHTS_PREFIX, parent)
    try:
        yield folder.path
    finally:
        folder.remove()


def write_full(
    tensors: Iterable[tuple[str, torch.Tensor]], path: Path, held: dict[str, torch.Tensor] | None = None
) -> int:
    """Write whole tensors; return their bytes. Where ``held`` is given, it keeps a copy of them."""
    host = {name: tensor.cpu().contiguous() for name, tensor in tensors}
    save_file(host, path)
    if held is not None:
        held.update({name: tensor.clone() for name, tensor in host.items()})
    return sum(tensor.nbytes for tensor in host.values())


def write_patch(
    tensors: Iterable[tuple[str, torch.Tensor]], held: Mapping[str, torch.Tensor], path: Path
) -> tuple[int, float]:
    """Write the elements that differ from those ``held`` on the host, and bring ``held`` up to date.

    The elements are compared as bits, so that what the receiver rebuilds is the same to the last of them
    (SparseRL-Sync's observation: an update of a small learning rate changes few elements in bfloat16).

    Returns:
        The bytes written, and the share of elements that changed.
    """
    patch: dict[str, torch.Tensor] = {}
    changed = total = 0
    for name, tensor in tensors:
        new_n, old_n = tensor.cpu().reshape(-1), held[name].view(-1)
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[new_n.element_size()]
        index_k = (new_n.view(integers) != old_n.view(integers)).nonzero().squeeze(1)
        total, changed = total + len(new_n), changed + len(index_k)
        if len(index_k):
            patch[name + _INDEX] = index_k.to(torch.int32 if len(new_n) < 2**31 else torch.int64)
            patch[name + _VALUE] = old_n[index_k] = new_n[index_k]
    save_file(patch, path)
    return sum(tensor.nbytes for tensor in patch.values()), changed / max(total, 1)


def rebuild(file: Any, held: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole tensors that an open file stands for: its own, or those ``held`` with its changes made."""
    names = list(file.keys())
    patched = {name.removesuffix(_INDEX) for name in names if name.endswith(_INDEX)}
    if not patched and names:
        for name in names:
            yield name, file.get_tensor(name)
        return
    for name, tensor in held.items():
        if name in patched:
            tensor.view(-1)[file.get_tensor(name + _INDEX).long()] = file.get_tensor(name + _VALUE)
        yield name, tensor
