"""Settings as plain values: what a dict says becomes the dataclass that it is meant for."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

LONGEST_LIST = 32
"""Longer ones are data, and no settings."""
Init = TypeVar("Init", bound=Callable[..., None])


def takes_dicts(init: Init) -> Init:
    """Let an ``__init__`` take a dict wherever a parameter is annotated with a dataclass."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def with_dataclasses(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        mappings = {name: value for name, value in given.arguments.items() if isinstance(value, Mapping)}
        if mappings.keys() - {"kwargs"}:
            hints = get_type_hints(init)
            given.arguments |= {name: _convert(hints.get(name), value, name) for name, value in mappings.items()}
        init(*given.args, **given.kwargs)

    return with_dataclasses  # pyright: ignore[reportReturnType]


def _convert(hint: Any, value: Any, place: str) -> Any:
    """Return ``value``, or the dataclass of ``hint`` that it describes.

    Raises:
        ValueError: The dataclass has no field of a name.
    """
    kind = next((one for one in (hint, *get_args(hint)) if isinstance(one, type) and is_dataclass(one)), None)
    if kind is None or not isinstance(value, Mapping):
        return value
    known = [field.name for field in fields(kind)]
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name), known)
            remedy = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}."
            raise ValueError(f"{place} has no setting {name!r}; {remedy}")
    hints = get_type_hints(kind)
    return kind(**{name: _convert(hints[name], one, f"{place}.{name}") for name, one in value.items()})


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
