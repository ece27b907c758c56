"""Settings as plain values: a dict is converted to the dataclass of the parameter's annotation."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_type_hints

import yaml

from lit_grpo.process.inputs import UNREADABLE_YAML

LONGEST_LIST = 32
"""Longer ones are data, and no settings."""
Init = TypeVar("Init", bound=Callable[..., None])
Row = TypeVar("Row")


def takes_dicts(init: Init) -> Init:
    """Let an ``__init__`` take a dict wherever a parameter is annotated with a dataclass."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def with_dataclasses(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        mappings = {name: value for name, value in given.arguments.items() if isinstance(value, Mapping)}
        if mappings.keys() - {"kwargs"}:
            annotations = get_type_hints(init)
            given.arguments |= {name: _convert(annotations.get(name), value, name) for name, value in mappings.items()}
        init(*given.args, **given.kwargs)

    return with_dataclasses  # pyrefly: ignore[bad-return]


def _convert(annotation: Any, value: Any, place: str) -> Any:
    """Return ``value``, or the dataclass of ``annotation`` that it describes."""
    options = (annotation, *get_args(annotation))
    kind = next((option for option in options if isinstance(option, type) and is_dataclass(option)), None)
    if kind is None or not isinstance(value, Mapping):
        return value
    known = [field.name for field in fields(kind)]
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name), known)
            remedy = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}."
            raise ValueError(f"{place} has no setting {name!r}; {remedy}")
    annotations = get_type_hints(kind)
    return kind(**{name: _convert(annotations[name], one, f"{place}.{name}") for name, one in value.items()})


def as_plain(value: Any) -> Any:
    """Return settings as numbers, texts, lists and dicts, to be shown: a function is its name, a model its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): as_plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple) and len(value) <= LONGEST_LIST:
        return [as_plain(one) for one in value]
    return getattr(value, "__qualname__", type(value).__qualname__)


def by_name(setting: str, spec: str | Mapping[str, Any], rows: Mapping[str, Row], kind: type[Row]) -> Row:
    """Return one of several rows of data, with some of its fields set.

    Args:
        setting: Name of the setting, for messages.
        spec: The name of a row, or the class path of a dataclass of ``kind``; after a colon fields and their values,
            as in ``april:batches_in_work=3,max_staleness=4``; or a mapping of one name to its fields.
        rows: The named rows, dataclasses.
        kind: Class of the rows.

    Raises:
        ValueError: There is no such row or field, or a value does not fit.
    """
    name, given = _told(setting, spec)
    try:
        row = cast(Any, rows[name]) if name in rows else _own(name, rows, kind)
        known = [field.name for field in fields(row)]
        for field in given:
            if field not in known:
                raise ValueError(f"it has no field {field!r}; it has {', '.join(known) or 'none'}.")
        values = {field: _value(field, value) for field, value in given.items()} if isinstance(spec, str) else given
        return replace(row, **values) if name in rows else row(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{setting} {spec if isinstance(spec, str) else name}: {error}") from None


def find_row(setting: str, name: str, rows: Mapping[str, Row], kind: type[Row]) -> Row:
    """Return a row of a table by its name, or a user's own row by its import path, as in ``my_file.ROW``.

    Args:
        setting: Name of the setting, for messages.
        name: Name of a row, or the import path of the user's own row.
        rows: Rows that lit_grpo has, by name.
        kind: Class of the rows.

    Raises:
        ValueError: There is no such row, or its module cannot be imported.
    """
    if name in rows:
        return rows[name]
    try:
        found = _imported(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{setting} {name} cannot be loaded ({error}); give one of {', '.join(rows)}, or the import path of "
            f"{_a(kind)} of your own, as in my_file.ROW."
        ) from None
    if not isinstance(found, kind):
        raise ValueError(
            f"{setting} must be one of {', '.join(rows)}, or the import path of {_a(kind)} of your own, as in "
            f"my_file.ROW, not {name!r}."
        )
    return found


def _a(kind: type[Any]) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


def _told(setting: str, spec: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the fields that are given with it, as text where the spec is text."""
    if isinstance(spec, str):
        name, _, told = spec.partition(":")
        return name, {part.partition("=")[0]: part.partition("=")[2] for part in filter(None, told.split(","))}
    if len(spec) != 1 or not isinstance(given := next(iter(spec.values())), Mapping | NoneType):
        raise ValueError(
            f"{setting} has {dict(spec)}; give a name, or one name with its fields, as in {{NAME: {{FIELD: VALUE}}}}."
        )
    return next(iter(spec)), given or {}


def _value(field: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except UNREADABLE_YAML:
        raise ValueError(f"{field} is set to {text!r:.60}, which is no value.") from None


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name) if module else None


def _own(path: str, rows: Mapping[str, Any], kind: type[Row]) -> Any:
    """A user's own kind, by its class path."""
    try:
        found = _imported(path)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"it cannot be loaded ({error}); give one of {', '.join(rows)}, or a class path.") from None
    if not (isinstance(found, type) and issubclass(found, kind) and is_dataclass(found)):
        raise ValueError(f"there is none; give one of {', '.join(rows)}, or the class path of {_a(kind)}.")
    return found
