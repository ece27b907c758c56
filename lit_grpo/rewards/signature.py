"""What a reward function takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from lit_grpo.rewards.inputs import GROUP_INPUTS, ROLLOUT_INPUTS


@dataclass(frozen=True)
class RewardSignature:
    """The parameters of a reward function that a rollout or a group is to fill.

    ``names`` are all of them, ``required`` those without a default. ``takes_columns`` says that it has
    ``**columns``, and ``declared`` are the columns it says it needs of those. ``on_group`` tells the two
    forms apart: ``completions`` of a group, or the ``completion`` of one rollout.
    """

    names: frozenset[str]
    required: tuple[str, ...]
    takes_columns: bool
    declared: tuple[str, ...]
    on_group: bool

    @classmethod
    def of(cls, call: Callable[..., Any], path: str, bound: Collection[str] = ()) -> RewardSignature:
        """Read the signature of ``call``, without the parameters in ``bound``, which have their values.

        Raises:
            ValueError: If it cannot be called with a rollout or a group.
        """
        parameters = _parameters(call, path)
        takes_columns = any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        free = [one for one in named if one.name not in bound]
        names = frozenset(one.name for one in free)
        if ("completion" in names) == ("completions" in names):
            listed = ", ".join(one.name for one in free) or "none"
            which = "both" if "completion" in names else "neither"
            raise ValueError(
                f"reward function {path!r} must take 'completion' (to score one rollout) or 'completions' "
                f"(to score a group), but has {which} among its parameters ({listed}); name one of them so."
            )
        required = tuple(one.name for one in free if one.default is one.empty)
        return cls(names, required, takes_columns, _declared(call, path), "completions" in names)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names that every rollout, or every group, has a value for."""
        return GROUP_INPUTS if self.on_group else ROLLOUT_INPUTS


def _parameters(call: Callable[..., Any], path: str) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward function {path!r}: its parameters cannot be read; wrap it in a function with named ones."
        ) from error
    for one in parameters:
        if one.kind is one.POSITIONAL_ONLY:
            raise ValueError(
                f"reward function {path!r}: parameter {one.name!r} is positional-only, but is given by name; "
                "wrap it in a function without '/'."
            )
    return parameters


def _declared(call: Callable[..., Any], path: str) -> tuple[str, ...]:
    columns = getattr(call, "columns", ())
    if not isinstance(columns, (tuple, list)) or not all(isinstance(column, str) for column in columns):
        raise ValueError(
            f"reward function {path!r}: its attribute 'columns' must be a tuple of names, not {columns!r}."
        )
    return tuple(columns)
