"""The settings of a run, read from the source code of their classes: importing torch and Lightning would take seconds.

Each class in ``GROUPS`` of :mod:`lit_grpo.cli.command_line` is a group of settings, which are the fields of a dataclass
or the arguments of an ``__init__``. A setting whose type is a class of the package is a group within its group.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from docstring_parser import parse

from lit_grpo.cli.parsing.names import DEFAULTS, FIELDS

COMMAND_LINE = "lit_grpo.cli.command_line"
LINKED = ("model.sampling_seed", "data.policy", "data.seed")
"""Arguments that the command line sets from other settings."""
MAIN_OF_TRAINER = {
    "trainer.accelerator": ("auto|cpu|gpu|...", "Type of device to train on."),
    "trainer.strategy": ("auto|ddp|fsdp2|...", "Strategy for training on several devices; fsdp2 shards the policy."),
    "trainer.devices": ("auto|int|[int,...]", "Number of devices; each one is a rank, with a process of its own."),
    "trainer.precision": (
        "32-true|bf16-mixed|...",
        "Compute precision: float32 by default; bf16-mixed is for GPUs with bfloat16.",
    ),
    "trainer.max_steps": ("int", "Optimizer steps of the whole run, including those before its checkpoint."),
    "trainer.val_check_interval": ("int", "Training iterations from one validation to the next."),
}
"""Types and texts of the Trainer's main settings; Lightning's own name much that does not apply here."""


class Setting(NamedTuple):
    """A setting as the help shows it.

    Args:
        name: Full name, such as ``model.sampling.top_p``.
        text: All sentences about the setting.
        default: Default as a config would have it.
        module: The module whose names the type uses.
        hint: Syntax of the type, or the type in short.
    """

    name: str
    text: str
    default: str = ""
    module: str = ""
    hint: Any = ""

    @property
    def kind(self) -> str:
        """The type in short, such as ``int|auto``; written only where it is shown, because it reads further files."""
        return self.hint if isinstance(self.hint, str) else type_name(self.module, self.hint)


class SettingGroup(NamedTuple):
    """The name of a group, its title, and its settings without those of the groups within it."""

    name: str
    title: str
    settings: list[Setting]


@cache
def declared() -> list[SettingGroup]:
    """Return the groups of a run's settings in the order of the help; the Trainer's is the last.

    Raises:
        ModuleNotFoundError: Lightning is not installed.
    """
    classes = [*_classes(COMMAND_LINE, "GROUPS"), ("trainer", "lightning.pytorch.trainer.trainer", "Trainer")]
    groups = [group for name, module, kind in classes for group in _groups(name, *_found(module, kind))]
    return [group for group in groups if group.settings]


def _classes(module: str, table: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, module and class of each row of a table of groups."""
    module, rows = _found(module, table)
    for key, value in zip(rows.keys, rows.values, strict=True):
        if key is None:  # **OTHER_TABLE
            yield from _classes(module, value.id)
        else:
            yield key.value, module, value.id


def _groups(name: str, module: str, source: ast.ClassDef, title: str = "") -> Iterator[SettingGroup]:
    """Yield a class's group of settings, then the groups within it."""
    group = SettingGroup(name, title or (ast.get_docstring(source) or "").partition("\n\n")[0], [])
    yield group
    changed = ast.literal_eval(_found(COMMAND_LINE, "TRAINER_DEFAULTS")[1]) if name == "trainer" else {}
    for field, hint, default, text in _fields(source):
        path = f"{name}.{field}"
        _, value = _found(module, hint.id) if isinstance(hint, ast.Name) else ("", hint)
        if isinstance(value, ast.ClassDef) and path not in LINKED:
            yield from _groups(path, *_found(module, hint.id), title=text)
        elif path in FIELDS:
            names = {class_path: short for short, class_path in FIELDS[path].items()}
            begins = names.get(DEFAULTS.get(path, {}).get("class_path", ""), "null")
            group.settings.append(Setting(path, text, begins, hint="|".join([*FIELDS[path], "CLASS"])))
        elif path not in LINKED:
            hint, text = MAIN_OF_TRAINER.get(path, (hint, text))
            begins = written(changed[field]) if field in changed else _default(module, default)
            group.settings.append(Setting(path, text, begins, module, hint))


def _fields(source: ast.ClassDef) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the name, type, default and text of each field of a dataclass or argument of an ``__init__``."""
    init = next((one for one in source.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if init is None:
        for field, below in zip(source.body, source.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(ast.Name(name), hint, default), ast.Expr(ast.Constant(text)):
                    yield name, hint, default, str(text)
        return
    described = parse(ast.get_docstring(init) or ast.get_docstring(source) or "")
    texts = {one.arg_name: one.description or "" for one in described.params}
    arguments = [*init.args.args[1:], *init.args.kwonlyargs]
    for argument, default in zip(arguments, [*init.args.defaults, *init.args.kw_defaults], strict=True):
        yield argument.arg, argument.annotation, default, texts.get(argument.arg, "")


def type_name(module: str, hint: Any) -> str:
    """Write a type in short: ``int|auto``, ``[int,...]``, ``true|false``.

    Args:
        module: The module whose names the type uses.
        hint: Syntax of the type.
    """
    match hint:
        case ast.BinOp(left, _, right):
            return _union(module, [left, right])
        case ast.Subscript(ast.Name("Union"), ast.Tuple(parts)):
            return _union(module, parts)
        case ast.Subscript(ast.Name("Literal"), inner):
            words = ast.literal_eval(inner)
            return "|".join(map(str, words if isinstance(words, tuple) else [words]))
        case ast.Subscript(ast.Name("dict")):
            return "{NAME: VALUE}"
        case ast.Subscript(ast.Name("Callable")):
            return "CLASS"
        case ast.Subscript(ast.Name(name), inner):
            first = type_name(module, inner.elts[0] if isinstance(inner, ast.Tuple) else inner)
            return {"Annotated": first, "Optional": f"{first}|null"}.get(name, f"[{first},...]")
        case ast.Name(name):
            where, value = _found(module, name)
            is_alias = value is not None and not isinstance(value, ast.ClassDef)
            return type_name(where, value) if is_alias else {"bool": "true|false"}.get(name, name)
        case ast.Constant(None):
            return "null"
    return ast.unparse(hint)


def _union(module: str, parts: Sequence[Any]) -> str:
    return "|".join(dict.fromkeys("|".join(type_name(module, part) for part in parts).split("|")))


def written(value: Any) -> str:
    """Write a default as a config would have it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _default(module: str, value: Any) -> str:
    return _default(*_found(module, value.id)) if isinstance(value, ast.Name) else written(ast.literal_eval(value))


@cache
def _found(module: str, name: str) -> tuple[str, Any]:
    """Return the module and the syntax of a class or value that a module defines or imports from its own package.

    The syntax of a name that it has from elsewhere is None.
    """
    body = _source(module).body
    for node in [*body, *(inner for outer in body if isinstance(outer, ast.If) for inner in outer.body)]:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in [
            ast.unparse(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ]:
            return module, node.value
        if isinstance(node, ast.ImportFrom) and name in [one.asname or one.name for one in node.names]:
            where = f"{module}.{node.module}" if node.level else node.module or ""
            is_own = where.partition(".")[0] == module.partition(".")[0]
            return _found(where, name) if is_own else (module, None)
    return module, None


@cache
def _source(module: str) -> ast.Module:
    """Return the syntax of a module's source code; in a checkout ``callbacks`` is beside the package."""
    top, *parts = module.split(".")
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {top!r}", name=top)
    folder = Path(spec.origin).parent
    paths = [one.joinpath(*parts) for one in ([folder, folder.parent] if top == "lit_grpo" else [folder])]
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py")]
    return ast.parse(next(file for file in files if file.is_file()).read_text(encoding="utf-8"))
