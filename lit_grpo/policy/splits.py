"""What the embedded tasks draw alike: two splits, and sizes of which each larger one is rarer."""

from __future__ import annotations

import random
from typing import Literal

Split = Literal["train", "validation"]
_VALIDATION_ONE_IN = 5


def split_of(number: int) -> Split:
    """The split of whatever has this hash."""
    return "train" if number % _VALIDATION_ONE_IN else "validation"


def geometric(rng: random.Random, least: int, most: int, more: float) -> int:
    """Draw a number from ``least`` on, which goes on to the next with the chance ``more``, and is cut at ``most``."""
    number = least
    while number < most and rng.random() < more:
        number += 1
    return number
