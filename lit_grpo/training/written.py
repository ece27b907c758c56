"""The config of a run from Python, from which the command line resumes it."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import yaml

from lit_grpo.data.module import SPLITS
from lit_grpo.data.sources import RowSource, naming
from lit_grpo.process.files import replace_file
from lit_grpo.process.terminal import shell

CLASSES = ("model.optimizer", "model.lr_scheduler")
"""Fields that name a class with its arguments."""
LINKED = ("model.sampling_seed", "data.policy", "data.seed")
"""Fields that the command line takes from other fields."""


class _NoText(ValueError):
    """A value has no form in a config; the message says why."""


def write_config(folder: Path, settings: Mapping[str, Mapping[str, Any] | None], seed: int) -> list[str]:
    """Write ``config.yaml`` of a run from Python, and the rows that were given as objects as ``.jsonl`` beside it.

    Args:
        folder: Folder of the run.
        settings: The fields of each group, as ``fit`` has them; None for a callback that the run is without.
        seed: Seed of the run, ``seed_everything``.

    Returns:
        The fields that a file cannot hold, each with the reason, such as ``model.rewards (score is defined in a
        notebook)``. The config lacks them.
    """
    config: dict[str, Any] = {"seed_everything": seed}
    left: list[str] = []
    for group, given in settings.items():
        if given is None:
            left.append(f"{group} (the run is without it)")
            continue
        for name, value in given.items():
            try:
                text = _text_of(f"{group}.{name}", value, folder, seed)
            except _NoText as why:
                left.append(f"{group}.{name} ({why})")
                continue
            if f"{group}.{name}" not in LINKED:
                config.setdefault(group, {})[name] = text
    head = f"# To resume: python -m lit_grpo fit --config {shell(str(folder / 'config.yaml'))} --ckpt_path last\n"
    replace_file(folder / "config.yaml", (head + yaml.safe_dump(config, sort_keys=False)).encode())
    return left


def _text_of(place: str, value: Any, folder: Path, seed: int) -> Any:
    """Return a field's value as a config has it.

    Raises:
        _NoText: It has no such form.
    """
    if place in LINKED:
        if isinstance(value, int) and value != seed:
            raise _NoText(f"it is {value}, and a config has one seed, {seed}")
        return None
    if place == "model.policy":
        return value if isinstance(value, str) else _origin(value)
    if place in CLASSES:
        return None if value is None else _class(value)
    group, _, name = place.partition(".")
    if group == "data" and name in SPLITS and isinstance(value, RowSource):
        return _rows_file(value, folder / f"{name}.jsonl")
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return a value as numbers, texts, lists and mappings; functions and classes become their paths."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, FunctionType | type):
        return _path(value)
    raise _NoText(f"an object of type {type(value).__name__}")


def _class(value: Any) -> dict[str, Any]:
    """Return a class, or a ``functools.partial`` of one with named arguments, as ``class_path`` and ``init_args``."""
    made, arguments = value, {}
    if isinstance(value, functools.partial) and not value.args:
        made, arguments = value.func, value.keywords
    if not isinstance(made, type) or ".py:" in (path := _path(made)):
        raise _NoText("a function; functools.partial of a class can be written")
    defaults = {
        name: one.default
        for name, one in inspect.signature(made).parameters.items()
        if one.default is None or isinstance(one.default, bool | int | float | str)
    }  # given too, for the command line keeps those of the class that it has by default
    return {"class_path": path.replace(":", "."), "init_args": _plain(defaults | arguments)}


def _path(named: Callable[..., Any]) -> str:
    """Return ``module:name`` or ``file.py:name`` of a function or class."""
    name, module = named.__qualname__, sys.modules.get(named.__module__)
    if "<" in name or module is None:
        raise _NoText(f"{name} is defined within a function or without a name")
    if named.__module__ != "__main__":
        return f"{named.__module__}:{name}"
    file = getattr(module, "__file__", None)
    if file is None:
        raise _NoText(f"{name} is defined in a notebook; put it into a file")
    path = Path(file).resolve()
    if not _trains_only_as_a_script(path):
        raise _NoText(
            f"{name} is defined in {path.name}, which would train again when it is imported; call lit_grpo.train under "
            'if __name__ == "__main__":'
        )
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{name}"


def _trains_only_as_a_script(file: Path) -> bool:
    """Return whether what the script executes now stands under a condition on ``__name__``."""
    frame = sys._getframe()
    while frame.f_back is not None and not (
        frame.f_globals["__name__"] == "__main__" and frame.f_code.co_name[0] == "<"
    ):
        frame = frame.f_back
    statements = ast.parse(file.read_text()).body
    now = [one for one in statements if one.lineno <= frame.f_lineno <= (one.end_lineno or one.lineno)]
    return bool(now) and isinstance(now[-1], ast.If) and "__name__" in ast.unparse(now[-1].test)


def _origin(policy: tuple[Any, Any] | Any) -> str:
    """Return where a loaded model and its tokenizer are from; a checkpoint has the weights as they became."""
    model, tokenizer = policy if isinstance(policy, tuple) else (policy, None)
    place = getattr(model, "name_or_path", "")
    if not place:
        raise _NoText("a model that was made, not loaded; give its folder")
    if tokenizer is not None and tokenizer.name_or_path != place:
        raise _NoText("a model with a tokenizer from another place; give a folder that holds both")
    return place


def _rows_file(source: RowSource, path: Path) -> str:
    """Write rows into a file, which must give the same rows again; return its path."""
    lines: list[str] = []
    with naming(f"data.{path.stem}"):
        rows = list(source.rows())
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(row))
            same = json.loads(lines[-1]) == row
        except (TypeError, ValueError):
            same = False
        if not same:
            raise _NoText(f"row {number} holds what JSON does not")
    replace_file(path, "".join(f"{line}\n" for line in lines).encode())
    return str(path)
