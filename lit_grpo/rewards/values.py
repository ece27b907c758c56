"""Reading what a reward function returned."""

from __future__ import annotations

import math
import numbers
from typing import Any


def read_value(value: Any) -> float | None:
    """Read one value: a finite number (also a bool, NumPy scalar or 0-d tensor), or ``None``: does not apply.

    Raises:
        ValueError: If it is anything else.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise ValueError(f"it returned {value!r:.80}, which is not a number; return a float or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}; return a finite number, or None where it does not apply")
    return number


def read_values(values: Any, num_rollouts: int) -> list[float | Exception | None]:
    """Read the values of a group; a value that cannot be read is an error in its place alone.

    Raises:
        ValueError: If ``values`` is not a list (or an array) of ``num_rollouts`` values.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"it returned a {type(values).__name__}; return a list with one value a completion")
    if len(values) != num_rollouts:
        raise ValueError(f"it returned {len(values)} values for {num_rollouts} completions; return one each")
    return [_value_or_error(value) for value in values]


def _value_or_error(value: Any) -> float | Exception | None:
    try:
        return read_value(value)
    except ValueError as error:
        return error
