"""Which values a field may have, as its annotation says."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from lit_grpo.limits import (
    Count,
    Limit,
    NotNegative,
    Number,
    Positive,
    Share,
    Text,
    check_fields,
    check_order,
    check_value,
    checks_arguments,
)

ONE_WORD: Any = Literal["auto"]
SIZE: Any = Literal[0, 1, 2]


@pytest.mark.parametrize(
    ("hint", "taken"),
    [
        (Count, [1, 7]),
        (Number, [0, 7]),
        (Count | None, [None, 1]),
        (Share, [1, 1e-9, 1.0]),
        (NotNegative, [0, 0.0, 1e9]),
        (Annotated[float, Limit(gt=0, infinite=True)], [1e-9, math.inf]),
        (Annotated[int, Limit(ge=1, le=2**53)], [2**53]),
        (Annotated[float | None, Limit(gt=0)], [None, 0.5]),
        (Positive | ONE_WORD, ["auto", 0.1]),
        (SIZE, [0, 1, 2]),
        (Text, ["", "3"]),
        (int, ["what has no limit is not checked", -1]),
        (None, [object()]),
    ],
)
def test_what_fits_is_taken(hint: Any, taken: list[Any]) -> None:
    for value in taken:
        check_value("field", value, hint)


@pytest.mark.parametrize(
    ("hint", "value", "sentence"),
    [
        (Count, 0, "field must be at least 1, not 0."),
        (Count, 1.5, "field must be a whole number of at least 1, not 1.5."),
        (Count, True, "field must be a whole number of at least 1, not True."),
        (Count, "many", "field must be a whole number of at least 1, not 'many'."),
        (Count | None, 0, "field must be at least 1, not 0."),
        (Share, 0, "field must be above 0 and at most 1, not 0."),
        (Share, math.nan, "field must be above 0 and at most 1, not nan."),
        (Share, None, "field must be a number above 0 and at most 1, not None."),
        (Annotated[int, Limit(ge=3, le=7)], 8, "field must be from 3 to 7, not 8."),
        (Annotated[float, Limit(ge=0, lt=1)], 1.0, "field must be at least 0 and below 1, not 1.0."),
        (Annotated[float, Limit(gt=0, finite=True)], math.inf, "field must be a finite number above 0, not inf."),
        (Annotated[float, Limit(finite=True)], math.nan, "field must be a finite number, not nan."),
        (NotNegative, math.inf, "field must be from 0 to 1000000000, not inf."),
        (NotNegative, 1e308, "field must be from 0 to 1000000000, not 1e+308."),
        (Annotated[float, Limit()], -1e308, "field must be from -1000000000 to 1000000000, not -1e+308."),
        (
            Annotated[float, Limit(gt=0, infinite=True)],
            1e30,
            "field must be above 0 and at most 1000000000, not 1e+30.",
        ),
        (Count, 10**18, "field must be from 1 to 1000000000, not 1000000000000000000."),
        (Annotated[int, Limit(ge=2, remedy="give more")], 1, "field must be at least 2, not 1; give more."),
        (Positive | ONE_WORD, 0, "field must be above 0, or auto, not 0."),
        (Positive | ONE_WORD, "much", "field must be a number above 0, or auto, not 'much'."),
        (SIZE, 3, "field must be 0, 1 or 2, not 3."),
        (SIZE, True, "field must be 0, 1 or 2, not True."),
        (Text, 3, "field must be text, not 3; put it into quotes."),
    ],
)
def test_what_does_not_fit_is_told_in_a_sentence(hint: Any, value: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_value("field", value, hint)
    assert str(caught.value) == sentence


@dataclass(frozen=True)
class Settings:
    steps: Count = 1
    place: Literal["loss", "reward"] = "loss"
    low: float | None = None
    high: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "mine.")
        check_order(self, "low", "high", "mine.")


@dataclass(frozen=True)
class Derived(Settings):
    steps: Annotated[int, Limit(ge=8)] = 8
    share: Share = 0.5


def test_a_dataclass_checks_its_own_fields_and_those_that_it_has_from_another() -> None:
    Settings(low=1.0)
    with pytest.raises(ValueError, match=r"^mine\.place must be loss or reward, not 'prompt'\.$"):
        Settings(place="prompt")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match=r"^mine\.steps must be at least 8, not 7\.$"):
        Derived(steps=7)
    with pytest.raises(ValueError, match=r"^mine\.place must be"):
        Derived(place="prompt")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match=r"^mine\.low must be at most high, 1\.0, not 2\.0\.$"):
        Settings(low=2.0)


class Part:
    @checks_arguments("part.")
    def __init__(self, name: str, size: Count = 1, **others: Any) -> None:
        self.made = (name, size, others)


def test_a_class_checks_its_arguments_before_it_is_made() -> None:
    assert Part("a", 2, more=0).made == ("a", 2, {"more": 0})
    for make in (lambda: Part("a", 0), lambda: Part("a", size=0)):
        with pytest.raises(ValueError, match=r"^part\.size must be at least 1, not 0\.$"):
            make()


def test_one_field_may_have_to_be_below_another() -> None:
    check_order(Settings(low=0.5), "low", "high", strict=True)
    with pytest.raises(ValueError, match=r"^low must be below high, 1\.0, not 1\.0\.$"):
        check_order(Settings(low=1.0), "low", "high", strict=True)


ROOT = Path(__file__).parents[1]
UNCHECKED = {"Column", "Completion", "LearnerSettings", "ReleaseRule"}
"""Made of values that have been checked before, and not by users."""


def limited_classes() -> Iterator[Any]:
    """All classes of the package in files that know limits, and that can be made."""
    for path in sorted((ROOT / "lit_grpo").rglob("*.py")):
        if "lit_grpo.limits import" in path.read_text():
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for each in vars(importlib.import_module(name)).values():
                if inspect.isclass(each) and each.__module__ == name and not inspect.isabstract(each):
                    yield each


def excluded(annotation: Any) -> Any:
    """A value that an annotation excludes; None where it takes all."""
    if get_origin(annotation) is Literal:
        return "no such word"
    if get_origin(annotation) is Annotated:
        kind, *said = get_args(annotation)
        for limit in said:
            if isinstance(limit, Limit):
                bounds = ((limit.ge, -1), (limit.gt, 0), (limit.le, 1), (limit.lt, 0))
                return next((bound + step for bound, step in bounds if bound is not None), None)
        return excluded(kind)
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    if bool in options:  # which is not checked
        return None
    return next((value for value in map(excluded, options) if value is not None), None)


def too_large(annotation: Any) -> Any:
    """A number that no setting has; None where the annotation says no bounds, or allows infinity."""
    if get_origin(annotation) is Annotated:
        kind, *said = get_args(annotation)
        bounded = [one for one in said if isinstance(one, Limit) and not one.infinite]
        return (10**19 if kind is int else 1e308) if bounded and kind in (int, float, float | None) else None
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return next((value for value in map(too_large, options) if value is not None), None)


@pytest.mark.parametrize("wrong", [excluded, too_large])
def test_every_field_refuses_what_its_annotation_excludes(wrong: Callable[[Any], Any]) -> None:
    checked = 0
    for each in limited_classes():
        try:
            arguments = inspect.signature(each).parameters
            hints = get_type_hints(
                each if hasattr(each, "__dataclass_fields__") else each.__init__, include_extras=True
            )
        except (NameError, TypeError, ValueError):  # of exceptions, and names that type checkers alone import
            continue
        given = {
            name: object()
            for name, its in arguments.items()
            if its.default is its.empty and its.kind != its.VAR_KEYWORD
        }
        for name in arguments if each.__name__ not in UNCHECKED else ():
            if (value := wrong(hints.get(name))) is not None:
                with pytest.raises(ValueError, match=rf"{name} must be .*, not {re.escape(repr(value))}"):
                    each(**given | {name: value})
                checked += 1
    assert checked > 100
