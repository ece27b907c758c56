"""When groups leave the buffer: release rules, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Leftovers = Literal["finish", "keep", "discard"]


@dataclass(frozen=True)
class ReleaseRule:
    """How many groups are released at a time, and what becomes of what is unfinished then.

    Args:
        num_groups: Whole groups that a release waits for and gives out; None for all that are open.
        oversubscription: Groups in work for each one that a release waits for, 1 or more.
        leftovers: What is done with requests that are unfinished at a release: there are none, because it waits for all
            (``finish``); they go on from their prefixes next time (``keep``), or from their beginnings (``discard``).
        max_age: Policy updates that may lie between the version that sampled the oldest token of a group and the one
            that learns from it.

    Raises:
        ValueError: The rule contradicts itself.
    """

    num_groups: int | None = None
    oversubscription: float = 1.0
    leftovers: Leftovers = "finish"
    max_age: int = 0

    def __post_init__(self) -> None:
        if self.num_groups is not None and self.num_groups < 1:
            raise ValueError(f"A release of {self.num_groups} groups can never be met; give num_groups of 1 or more.")
        if not self.oversubscription >= 1:
            raise ValueError(
                f"An oversubscription of {self.oversubscription} puts fewer groups in work than a release waits for, "
                "so it can never be met; give 1 or more."
            )
        if self.oversubscription > 1 and self.leftovers == "finish":
            raise ValueError(
                f"An oversubscription of {self.oversubscription} leaves requests unfinished; leftovers 'finish' allows "
                "none: take keep or discard."
            )
        if self.max_age < 0:
            raise ValueError(f"max_age must be at least 0, not {self.max_age}.")
        if self.leftovers == "keep" and not self.max_age:
            raise ValueError(
                "leftovers 'keep' goes on from tokens of an older policy, which max_age 0 never lets out; give a "
                "max_age of 1 or more, or discard them."
            )

    def check_open(self, num_open: int) -> None:
        """Check that a release can come about with the groups that are open.

        Raises:
            ValueError: It waits for more of them.
        """
        wanted = math.ceil((self.num_groups or 0) * self.oversubscription)
        if num_open < wanted:
            raise ValueError(
                f"A release of {self.num_groups} groups wants {wanted} in work, and {num_open} are open: open as many, "
                "or lower num_groups."
            )


SYNCHRONOUS = ReleaseRule()
"""All groups of a batch, whole, sampled by the policy that learns from them."""
