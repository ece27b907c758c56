"""Allowed values of fields, declared in their annotations and checked in one place.

For example::

    @dataclass(frozen=True)
    class Reference:
        offload: bool = False
        mixup_alpha: Annotated[float | None, Limit(gt=0, le=1, remedy="leave it out for a fixed one")] = None
        sync_steps: Count = 512
        place: Literal["loss", "reward"] = "loss"

        def __post_init__(self) -> None:
            check_fields(self, "reference.")

    Reference(sync_steps=0)
    ValueError: reference.sync_steps must be at least 1, not 0.
    Reference(place="prompt")
    ValueError: reference.place must be loss or reward, not 'prompt'.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Init = TypeVar("Init", bound=Callable[..., None])
LARGEST = 10**9
"""The largest number of a setting that does not say otherwise."""


@dataclass(frozen=True)
class Limit:
    """Bounds of a numeric field; NaN is never allowed.

    A setting whose upper bound is left out is at most ``LARGEST``: with more, counts take all memory, and products of
    weights are infinite.

    On a field that is text it says that nothing else is: a number or ``yes`` in a config is text in quotes alone.

    Args:
        ge: The smallest allowed number.
        gt: Bound that the number must exceed.
        le: The largest allowed number.
        lt: Bound below which the number must be.
        finite: Whether infinity is refused also where a number is no setting.
        infinite: Whether a setting may be infinite.
        remedy: End of the error message: the remedy or the reason.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    finite: bool = False
    infinite: bool = False
    remedy: str = ""

    def of_a_setting(self) -> Limit:
        """Return these bounds with those that every setting has."""
        has_least, has_most = (self.ge, self.gt) != (None, None), (self.le, self.lt) != (None, None)
        return replace(self, ge=self.ge if has_least else -LARGEST, le=self.le if has_most else LARGEST)

    def allows(self, value: Any, kind: Any) -> bool:
        """Return whether ``value`` is of ``kind``, ``int``, ``float`` or ``str``, and a number within the bounds."""
        if kind is str:
            return isinstance(value, str)
        return is_number(value, kind) and not (
            math.isnan(value)
            or (self.finite and math.isinf(value))
            or (self.ge is not None and value < self.ge)
            or (self.gt is not None and value <= self.gt)
            or (self.le is not None and value > self.le)
            or (self.lt is not None and value >= self.lt)
        )

    def text(self, value: Any, kind: Any) -> str:
        """Return what a value has to be that is not ``value``, such as ``above 0 and at most 1``."""
        if kind is str:
            return "text"
        bounds = [
            f"{word} {bound}"
            for word, bound in (("at least", self.ge), ("above", self.gt), ("at most", self.le))
            if bound is not None
        ]
        bounds += [f"below {self.lt}"] if self.lt is not None else []
        if self.ge is not None and self.le is not None:
            bounds = [f"from {self.ge} to {self.le}"]
        said = " and ".join(bounds)
        if is_number(value, kind) and not (self.finite and not math.isfinite(value)):
            return said
        words = ["a", *(["finite"] if self.finite else []), *(["whole"] if kind is int else []), "number"]
        return " ".join([*words, *(["of"] if said.startswith("at") else []), *([said] if said else [])])


def is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)


Count = Annotated[int, Limit(ge=1)]
"""A number of things, of which there is one at least."""
Completions = Annotated[int, Limit(ge=1, le=2**16)]
"""Number of completions that a generator decodes at a time, or samples of one prompt."""
Number = Annotated[int, Limit(ge=0)]
"""A number of things, of which there may be none."""
Share = Annotated[float, Limit(gt=0, le=1)]
"""A part of a whole that is not nothing."""
Positive = Annotated[float, Limit(gt=0)]
NotNegative = Annotated[float, Limit(ge=0)]
Text = Annotated[str, Limit(remedy="put it into quotes")]


def check_fields(settings: Any, place: str = "") -> None:
    """Check the fields of a dataclass against their annotations: limits, and the words of literals.

    Args:
        settings: The dataclass to check.
        place: Prefix of field names in messages, such as ``reference.``.
    """
    annotations = _annotations(type(settings))
    for field in fields(settings):
        check_value(f"{place}{field.name}", getattr(settings, field.name), annotations[field.name])


def check_order(settings: Any, first: str, second: str, place: str = "", strict: bool = False) -> None:
    """Check that one field is at most another, or with ``strict`` below it; one that is None is not compared."""
    low, high = getattr(settings, first), getattr(settings, second)
    if low is None or high is None or low < high or (low == high and not strict):
        return
    word = "below" if strict else "at most"
    raise ValueError(f"{place}{first} must be {word} {second}, {high}, not {low}.")


def checks_arguments(place: str = "") -> Callable[[Init], Init]:
    """Let an ``__init__`` check its arguments first, as :func:`check_fields` does those of a dataclass."""

    def decorated(init: Init) -> Init:
        signature = inspect.signature(init)

        @functools.wraps(init)
        def checked(*args: Any, **kwargs: Any) -> None:
            annotations = _annotations(init)
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                check_value(f"{place}{name}", value, annotations.get(name))
            init(*args, **kwargs)

        return checked  # pyrefly: ignore[bad-return]

    return decorated


def check_value(name: str, value: Any, annotation: Any, is_setting: bool = True) -> None:
    """Check a value against an annotation; one without a limit or literal takes all.

    Args:
        name: What the value is, for the message.
        value: Value to check, of any type.
        annotation: Type of the setting, with its :class:`Limit` or literals if it has any.
        is_setting: Whether ``LARGEST`` bounds it; not if it is computed.
    """
    words: list[str] = []
    remedies: list[str] = []
    for option, limit in _options(annotation):
        if limit is not None:
            if limit.allows(value, option):
                bounds = limit.of_a_setting()
                if (
                    option is str
                    or not is_setting
                    or bounds.allows(value, option)
                    or (limit.infinite and math.isinf(value))
                ):
                    return
                limit = bounds
            words.append(limit.text(value, option))
            remedies += [limit.remedy] if limit.remedy else []
        elif get_origin(option) is Literal:
            choices = get_args(option)
            if any(value == choice and type(value) is type(choice) for choice in choices):
                return
            words.append(_listed([str(choice) for choice in choices]))
        elif option is not NoneType or value is None:
            return
    if words:
        raise ValueError("; ".join([f"{name} must be {', or '.join(words)}, not {value!r}", *remedies]) + ".")


def _options(annotation: Any, limit: Limit | None = None) -> Iterator[tuple[Any, Limit | None]]:
    """Yield the members of a union, numbers and text with their limit."""
    if get_origin(annotation) is Annotated:
        annotation, *said = get_args(annotation)
        limit = next((each for each in said if isinstance(each, Limit)), limit)
    if get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from _options(option, limit)
    else:
        yield annotation, limit if annotation in (int, float, str) else None


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


@functools.cache
def _annotations(holder: Any) -> dict[str, Any]:
    return get_type_hints(holder, include_extras=True)
