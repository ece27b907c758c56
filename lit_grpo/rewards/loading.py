"""From a path in a config to the object it names."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

REWARDS = {
    "exact_match": "lit_grpo.rewards.ExactMatch",
    "math_equivalence": "lit_grpo.rewards.MathEquivalence",
    "format_match": "lit_grpo.rewards.FormatMatch",
    "soft_overlong_penalty": "lit_grpo.rewards.SoftOverlongPenalty",
    "http_judge": "lit_grpo.rewards.HTTPJudge",
}
"""Short names of the reward functions that come with the project."""


def first_line(error: BaseException) -> str:
    """The error's type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def near_names(name: str, known: list[str]) -> str:
    """``"did you mean 'a' or 'b'?"`` for the known names near to a wrong one, else an empty string."""
    near = difflib.get_close_matches(name, known)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def split_path(path: str) -> tuple[str, str]:
    """Split ``module:name``, ``module.name``, ``file.py:name`` or a short name into where and what.

    Raises:
        ValueError: If one of the two is missing.
    """
    path = REWARDS.get(path, path)
    separator = ":" if ":" in path else "."
    source, _, name = path.rpartition(separator)
    if not source or not name or path.endswith(".py"):
        raise ValueError(
            f"reward function {path!r} names no function; write module:name, module.name or file.py:name, or one of "
            f"{', '.join(REWARDS)}."
        )
    return source, name


def load_object(path: str) -> Any:
    """Import the object that ``path`` names.

    Raises:
        ValueError: If the file is missing, the module does not import, or it holds no such name.
    """
    source, name = split_path(path)
    loaded = _load_file(path, Path(source)) if source.endswith(".py") else _load_module(path, source)
    for part in name.split("."):
        if not hasattr(loaded, part):
            known = [known for known in dir(loaded) if not known.startswith("_")]
            remedy = near_names(part, known) or "define it or correct the name."
            raise ValueError(f"reward function {path!r}: {source} has no {part!r}; {remedy}")
        loaded = getattr(loaded, part)
    return loaded


def _load_module(path: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # the user's module runs here, and may fail in any way
        raise _not_imported(path, error) from error


def _load_file(path: str, file: Path) -> ModuleType:
    if not file.is_file():
        where = "" if file.is_absolute() else f" in the working directory {Path.cwd()}"
        raise ValueError(f"reward function {path!r}: there is no file {file}{where}; correct the path.")
    # Functions of one file share one module, so that it runs once; a file that has changed runs anew.
    identity = f"{file.resolve()}:{file.stat().st_mtime_ns}"
    module_name = f"_lit_grpo_rewards_{file.stem}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None, file  # holds for every name that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's module runs here, and may fail in any way
        del sys.modules[module_name]
        raise _not_imported(path, error) from error
    return module


def _not_imported(path: str, error: Exception) -> ValueError:
    return ValueError(
        f"reward function {path!r}: its module does not import ({first_line(error)}); mend it, or correct the path."
    )
