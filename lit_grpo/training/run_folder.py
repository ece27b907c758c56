"""The folder of a run: its name, its lock, and an earlier run in its place."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.process.files import replace_file
from lit_grpo.process.origins import versions

_MOST_TRIES = 1000
"""The number of times that a lock is tried for whose file other runs, which are refused, remove meanwhile."""
_PART = re.compile(r"\w[\w.+=,@%-]*")
"""A part of a run's name: commands that name a run need no quotes."""


@dataclass(frozen=True)
class RunConfig:
    """Name and place of a run, and whether W&B logs it."""

    name: str = "grpo"
    """Name of the run. Its folder ``DIR/NAME`` holds config, metrics.csv, checkpoints, samples and the policy. A name
    may have several parts (``exp1/seed0``), but no run may lie in the folder of another.
    """
    dir: str = "runs"
    """Folder of all runs."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Log to Weights & Biases too: ``online``, ``offline`` (without account or network) or ``disabled``."""
    wandb_project: str = "lit_grpo"
    """Name of the W&B project."""

    def __post_init__(self) -> None:
        if not all(_PART.fullmatch(part) for part in self.name.split("/")):
            raise ValueError(
                f"run.name is {self.name!r}; give a name below run.dir, such as exp1 or exp1/seed0, of letters, digits "
                "and _ . + - = , @ %, whose parts begin with a letter, a digit or _."
            )
        object.__setattr__(self, "dir", str(Path(self.dir).expanduser()))

    @property
    def folder(self) -> Path:
        return Path(self.dir) / self.name

    def name_of(self, folder: Path) -> str:
        return folder.relative_to(self.dir).as_posix()


def is_first_rank() -> bool:
    """Return whether this process is the first rank; before the ranks have met, as its environment says."""
    return getattr(rank_zero_only, "rank", 0) == 0


class RunFolder:
    """The folder of a run. One living run has it at a time: the one that holds the lock ``DIR/.NAME.lock``.

    A run first claims its folder, which makes and moves nothing, and opens it after all settings are checked:

    .. code-block:: text

        before                      claim("runs/demo") takes       open() makes
        no runs/demo                runs/.demo.lock                runs/demo
        runs/demo, ended            runs/.demo.lock                runs/demo; the earlier run is now runs/demo-1
        runs/demo, still going on   runs/.demo-1.lock              runs/demo-1
        runs/demo, to be resumed    runs/.demo.lock                nothing: the run continues in runs/demo
    """

    def __init__(self) -> None:
        self.path = Path()
        self._resumes = self._is_open = False
        self._lock: FileLock | None = None
        self._made: list[Path] = []  # folders above it, the innermost first

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the folder; of a run that was refused before it was opened nothing stays."""
        if self._lock is not None and not self._is_open:
            with suppress(OSError):
                Path(self._lock.lock_file).unlink()
                for folder in self._made:
                    folder.rmdir()
        if self._lock is not None:
            with suppress(OSError):  # a user's function has closed its descriptor, which releases it
                self._lock.release()
        self._lock = None

    def claim(self, path: Path, resumes: bool) -> None:
        """Reserve ``path``; if a living run has it, reserve the next free of ``path-1``, ``path-2``, ...

        Raises:
            ValueError: The run to be resumed still goes on, the place is not writable, the folder is a link, or the
                folder lies in that of another run or holds one.
        """
        with _writing(path):
            if path.is_symlink():  # the lock of a link differs from the lock of its target
                raise ValueError(
                    f"The run folder {str(path)!r} is a link to {path.resolve()}; name that with run.dir and run.name."
                )
            self._made = list(itertools.takewhile(lambda one: not one.exists(), path.parents))
            self._lock = _lock(path)
            if self._lock is None and resumes:
                raise ValueError(
                    f"The run in {str(path)!r} still goes on, so it cannot be resumed there; stop it first, or go on "
                    "in another folder with run.name."
                )
            if self._lock is None:
                path, self._lock = _next_free(path)
        self.path, self._resumes = path, resumes
        _check_nesting(path)  # after locking, so that of two runs that start together one sees the other

    def check_inputs(self, settings: Mapping[str, Any]) -> None:
        """Refuse inputs that lie in the folder of an earlier run, which :meth:`open` would move aside.

        Args:
            settings: What a run reads, by name, in mappings and lists; texts that are paths are looked at.

        Raises:
            ValueError: An input is there.
        """
        if self._resumes or not (self.path / "metrics.csv").exists():
            return
        for name, text in _texts(settings):
            inside = False
            with suppress(OSError, ValueError):  # of a text that is no path
                path = Path(text.partition(":")[0])  # a function of a file stands after a colon
                inside = self.path.resolve() in path.resolve().parents and path.exists()
            if inside:
                raise ValueError(
                    f"{name} is {text!r}, in the folder of an earlier run, which this run would move aside; give this "
                    "run another run.name."
                )

    def open(self) -> Path | None:
        """Make the folder; first move the folder of an earlier run aside, unless this run resumes it.

        Returns:
            The new path of the earlier run's folder; None if there was none.

        Raises:
            ValueError: The folder cannot be written to.
        """
        moved, self._is_open = None, True
        with _writing(self.path):
            if not self._resumes and (self.path / "metrics.csv").exists():
                moved, lock = _next_free(self.path)
                self.path.rename(moved)
                lock.release()
            self.path.mkdir(parents=True, exist_ok=True)
            replace_file(self.path / "versions.json", (json.dumps(versions(), indent=1) + "\n").encode())
        return moved


def _texts(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in settings, each with its name."""
    for name, value in settings.items():
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Mapping):
                yield from _texts(one, f"{before}{name}.")
            elif isinstance(one, str | Path):
                yield f"{before}{name}", str(one)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"The run folder {str(path)!r} is not writable ({error.strerror}); choose another with run.dir."
        ) from error


def _lock(path: Path) -> FileLock | None:
    """Take the lock of a folder; return None if a living run has it."""
    file = path.with_name(f".{path.name}.lock")
    for is_last in (*[False] * _MOST_TRIES, True):
        lock = FileLock(file)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout:
            return None
        except FileNotFoundError:  # a run that was refused has removed the folder meanwhile
            if is_last:
                raise
            continue
        held = os.fstat(cast(int, lock._context.lock_file_fd))
        with suppress(FileNotFoundError):  # a run that was refused has removed the file meanwhile
            if os.path.samestat(held, file.stat()):
                return lock
        lock.release()
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(file))


def _check_nesting(path: Path) -> None:
    """Refuse a folder that lies in the folder of another run, or holds other runs, which would be moved with it."""
    for parent in (each.resolve() for each in path.parents):
        if _has_run(parent) or is_taken(parent):
            raise ValueError(
                f"The run folder {str(path)!r} lies in the folder of another run, {parent}; choose another run.name."
            )
    inner = next(path.rglob(".*.lock"), None)
    if inner is not None:
        name = inner.with_name(inner.name[1:].removesuffix(".lock")).relative_to(path)
        raise ValueError(f"The run folder {str(path)!r} holds other runs, such as {name}; choose another run.name.")


def _has_run(folder: Path) -> bool:
    return (folder / "versions.json").is_file() and (folder / "metrics.csv").is_file()


def is_taken(path: Path) -> bool:
    """Return whether a living run has a folder; false if its lock belongs to another user and cannot be read."""
    place = path.resolve()
    if not place.name or not place.with_name(f".{place.name}.lock").exists():
        return False
    try:
        lock = _lock(place)
    except OSError:  # the lock belongs to another user
        return False
    if lock is not None:
        lock.release()
    return lock is None


def _next_free(path: Path) -> tuple[Path, FileLock]:
    """Return the first of NAME-1, NAME-2, ... that neither exists nor is claimed, and its lock."""
    for number in itertools.count(1):
        free = path.with_name(f"{path.name}-{number}")
        lock = None if free.exists() else _lock(free)
        if lock is not None and not free.exists():
            return free, lock
        if lock is not None:  # another run made the folder meanwhile
            lock.release()
    raise AssertionError("numbers do not end")
