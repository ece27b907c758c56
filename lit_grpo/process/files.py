"""Files that are replaced as a whole, and folders that are removed however their owner ends."""

from __future__ import annotations

import glob
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lit_grpo.process.inputs import check_replaceable

_LOCK = ".owner"  # locked as long as the folder's owner lives


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


class PrivateFolder:
    """A folder at ``path``, for this user alone, with a name that nobody can guess; it is removed with this object.

    Its owner holds a lock on a file in it, which the kernel releases however the owner ends. The next folder with the
    same prefix removes those whose owners were killed.

    Args:
        prefix: The beginning of the folder's name.
        parent: Folder in which the private folder is made; by default the one for temporary files.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        place = Path(parent or tempfile.gettempdir())
        _sweep(place, prefix)
        self.path, lock = _make(place, prefix)
        self.remove = weakref.finalize(self, _remove, self.path, lock)


def is_private(folder: Path) -> bool:
    """Return whether this is a folder (not a link to one) that this user has made and no other user can open."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077 and status.st_uid == os.getuid()


def _make(place: Path, prefix: str) -> tuple[Path, FileLock]:
    """Make a folder and lock it; make another if it was swept away before it was locked."""
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
    """Remove the folders of dead owners, if they are this user's; links and folders of others are left alone."""
    for path in place.glob(f"{glob.escape(prefix)}*"):
        if not is_private(path) or not (path / _LOCK).is_file():
            continue
        with suppress(Timeout, OSError):
            lock = FileLock(path / _LOCK, thread_local=False)
            lock.acquire(blocking=False)
            _remove(path, lock)


class FolderLostError(FileNotFoundError):
    """A folder that a program writes to was moved or deleted meanwhile."""


class HeldFolder:
    """A folder that is known again when it has been moved, and is not mistaken for another one in its place.

    ``status`` is what ``os.stat`` tells of it.

    Args:
        path: The folder, which exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # keeps its number from others
        self.status = os.fstat(self._descriptor)

    @property
    def is_in_place(self) -> bool:
        return self._is_at(self.path)

    def find(self) -> Path | None:
        """Return where the folder is now; None if it was deleted, or if this system does not say."""
        try:
            place = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        except OSError:
            return None
        return place if self._is_at(place) else None

    def error(self) -> FolderLostError:
        place = self.find()
        what = "was moved or deleted" if place is None else f"was moved to {place}"
        return FolderLostError(f"The run's folder {self.path} {what} while the run went on, so the run has ended.")

    def close(self) -> None:
        with suppress(OSError):  # a user's function has closed it
            os.close(self._descriptor)

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(self.status, path.stat())
        except OSError:
            return False


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
