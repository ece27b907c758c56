"""From a path in a config to the object that it names."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_grpo.process.terminal import error_text

REWARDS = {
    "exact_match": "lit_grpo.rewards.ExactMatch",
    "math_equivalence": "lit_grpo.rewards.MathEquivalence",
    "format_match": "lit_grpo.rewards.FormatMatch",
    "soft_overlong_penalty": "lit_grpo.rewards.SoftOverlongPenalty",
    "relative_judge": "lit_grpo.rewards.RelativeJudge",
    "rubric_judge": "lit_grpo.rewards.RubricJudge",
    "http_judge": "lit_grpo.rewards.HTTPJudge",
    "reward_model": "lit_grpo.rewards.RewardModel",
}
"""Short names of the reward functions that come with the project."""


def near_names(name: str, known: list[str]) -> str:
    """Return ``"did you mean 'a' or 'b'?"`` for known names that are near to a wrong one, else an empty string."""
    near = difflib.get_close_matches(name, known)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def split_path(path: str, what: str = "reward function") -> tuple[str, str]:
    """Split ``module:name``, ``module.name``, ``file.py:name`` or a short name into the module or file, and the name.

    Args:
        path: Path of a function or class, such as ``file.py:name``.
        what: Kind of the object in messages; only reward functions have short names.
    """
    path = REWARDS.get(path, path)
    separator = ":" if ":" in path else "."
    source, _, name = path.rpartition(separator)
    if not source or not name or path.endswith(".py"):
        names = f", or one of {', '.join(REWARDS)}" if what == "reward function" else ""
        raise ValueError(f"{what} {path!r} names no function; write module:name, module.name or file.py:name{names}.")
    return source, name


def load_object(path: str, what: str = "reward function") -> Any:
    """Import the object that ``path`` names.

    Args:
        path: Path of the object, in a form that :func:`split_path` accepts.
        what: Kind of the object in messages.
    """
    source, name = split_path(path, what)
    named = f"{what} {path!r}"
    loaded = _load_file(named, Path(source)) if source.endswith(".py") else _load_module(named, source)
    for part in name.split("."):
        if not hasattr(loaded, part):
            known = [known for known in dir(loaded) if not known.startswith("_")]
            remedy = near_names(part, known) or "define it or correct the name."
            raise ValueError(f"{named}: {source} has no {part!r}; {remedy}")
        loaded = getattr(loaded, part)
    return loaded


def _load_module(named: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # the user's module runs here, and may fail in any way
        raise _not_imported(named, error) from error


def _load_file(named: str, file: Path) -> ModuleType:
    if not file.is_file():
        where = "" if file.is_absolute() else f" in the working directory {Path.cwd()}"
        raise ValueError(f"{named}: there is no file {file}{where}; correct the path.")
    # Functions of one file share one module, so that the file runs once; a file that has changed runs again.
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
        raise _not_imported(named, error) from error
    return module


def _not_imported(named: str, error: Exception) -> ValueError:
    return ValueError(f"{named}: its module cannot be imported ({error_text(error)}); mend it, or correct the path.")
