"""Which reward function to use, as written in a config."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RewardSpec:
    """A reward function by name.

    Args:
        function: Import path (``lit_grpo.rewards.exact_match``, ``my_package.my_module:score``) or file and
            name (``my_rewards.py:score``, relative to the working directory) of a function or a class.
        weight: Multiplies the function's value in the sum of the rewards; 0 only logs it.
        name: Under which the values are logged; by default the function's own name.
        args: Arguments of the class's ``__init__``, or keyword arguments bound to the function.
    """

    function: str
    weight: float = 1.0
    name: str | None = None
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(
                f"the weight of reward function {self.function!r} must be a finite number, not {self.weight}."
            )
        if self.name == "":
            raise ValueError(
                f"the name of reward function {self.function!r} is empty; leave it out for the default name."
            )
