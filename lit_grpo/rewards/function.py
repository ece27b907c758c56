"""A reward function, ready to score.

Any callable with one of two signatures, sync or ``async def``:

- on one rollout, ``def score(completion: str, ...) -> float | bool | None``; it may also take
  ``prompt: str``, ``num_tokens: int``, ``finish_reason: str``, ``max_tokens: int`` (the sampling limit);
- on the group of a prompt, ``def score(completions: list[str], ...) -> list[float | None]``; it may also take
  ``prompts``, ``num_tokens``, ``finish_reasons``, ``max_tokens``, each a list with one value a completion.

Both may take any column of the data under its name (on a group: as a list), or all of them by ``**columns``.
Where a column has the name of one of the values above, the value above is given. ``None`` means that the
reward does not apply to the rollout. A callable that takes ``**columns`` may say which columns it needs in an
attribute ``columns: tuple[str, ...]``.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.rewards.inputs import group_inputs, rollout_inputs
from lit_grpo.rewards.loading import first_line, load_object, near_names, split_path
from lit_grpo.rewards.signature import RewardSignature
from lit_grpo.rewards.spec import RewardSpec
from lit_grpo.rewards.values import read_value, read_values
from lit_grpo.types import RolloutGroup


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function: what to call, with what, and how much its value weighs."""

    name: str
    weight: float
    path: str
    call: Callable[..., Any]
    signature: RewardSignature
    bound: frozenset[str] = frozenset()

    @classmethod
    def load(cls, spec: RewardSpec) -> RewardFunction:
        """Import what ``spec`` names, give it its arguments and check its signature.

        Raises:
            ValueError: If it cannot be imported, built or called as a reward function.
        """
        loaded = load_object(spec.function)
        if not callable(loaded):
            raise ValueError(
                f"reward function {spec.function!r} is a {type(loaded).__name__}, which cannot be called; "
                "name a function or a class."
            )
        name = spec.name or split_path(spec.function)[1].split(".")[-1]
        if inspect.isclass(loaded):
            loaded, bound = _build(loaded, spec), frozenset[str]()
        else:
            bound = frozenset(spec.args)
        signature = RewardSignature.of(loaded, spec.function, bound)
        if bound:
            _check_bound(loaded, spec)
            loaded = functools.partial(loaded, **spec.args)
        return cls(name, spec.weight, spec.function, loaded, signature, bound)

    @classmethod
    def of(cls, call: Callable[..., Any], name: str, weight: float = 1.0) -> RewardFunction:
        """Make a reward function of a callable at hand.

        Raises:
            ValueError: If it cannot be called as a reward function.
        """
        return cls(name, weight, name, call, RewardSignature.of(call, name))

    @property
    def is_async(self) -> bool:
        """Whether a call returns a coroutine."""
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check that data with these ``columns`` has all that the function needs.

        Raises:
            ValueError: If a required parameter or declared column is missing.
        """
        columns = list(columns)
        listed = ", ".join(columns) or "none"
        for column in self.signature.declared:
            if column not in columns:
                raise ValueError(
                    f"reward {self.name!r} ({self.path}) needs the column {column!r}, which the data does "
                    f"not have (its columns: {listed}); name another one in its args, or add it to the data."
                )
        for parameter in self.signature.required:
            if parameter not in columns and parameter not in self.signature.inputs:
                raise ValueError(
                    f"reward {self.name!r} ({self.path}) requires the parameter {parameter!r}, which is "
                    f"neither one of {', '.join(self.signature.inputs)} nor a column of the data "
                    f"(its columns: {listed}); set it in args, rename it or give it a default."
                )

    def arguments(self, group: RolloutGroup) -> list[dict[str, Any]]:
        """The keyword arguments of each call that scores ``group``: one call for all, or one a rollout."""
        columns = group.prompt.columns
        names = self.signature.names
        if self.signature.takes_columns:
            names = (names | columns.keys()) - self.bound
        if self.signature.on_group:
            lists = {name: [value] * len(group.rollouts) for name, value in columns.items()}
            rows = iter([{**lists, **group_inputs(group)}])
        else:
            rows = ({**columns, **rollout_inputs(rollout)} for rollout in group.rollouts)
        return [{name: row[name] for name in row if name in names} for row in rows]

    def score(self, arguments: dict[str, Any], num_rollouts: int) -> list[float | Exception | None]:
        """Make one call and read what it returns: one value or error for each of its rollouts.

        Raises:
            ValueError: If what it returns cannot be read at all.
            Exception: Whatever the function raises.
        """
        return self._read(self.call(**arguments), num_rollouts)

    async def score_async(self, arguments: dict[str, Any], num_rollouts: int) -> list[float | Exception | None]:
        """The same as :meth:`score`, of an ``async`` function."""
        return self._read(await self.call(**arguments), num_rollouts)

    def _read(self, returned: Any, num_rollouts: int) -> list[float | Exception | None]:
        return read_values(returned, num_rollouts) if self.signature.on_group else [read_value(returned)]


def load_rewards(specs: Sequence[RewardSpec]) -> list[RewardFunction]:
    """Load the reward functions of a config.

    Raises:
        ValueError: If one cannot be loaded, or two have the same name.
    """
    functions = [RewardFunction.load(spec) for spec in specs]
    check_names(functions)
    return functions


def check_names(functions: Sequence[RewardFunction]) -> None:
    """Check that no two reward functions have the same name.

    Raises:
        ValueError: If two have.
    """
    for name, count in Counter(function.name for function in functions).items():
        if count > 1:
            paths = ", ".join(function.path for function in functions if function.name == name)
            raise ValueError(f"{count} rewards have the name {name!r} ({paths}); set a name for each.")


def _build(loaded: type, spec: RewardSpec) -> Callable[..., Any]:
    try:
        built = loaded(**spec.args)
    except ValueError as error:
        raise ValueError(f"reward function {spec.function!r}: {error}") from error
    except Exception as error:  # the user's class is built here, and may fail in any way
        raise ValueError(
            f"reward function {spec.function!r} cannot be built with args {spec.args} ({first_line(error)}); "
            "correct its args."
        ) from error
    if not callable(built):
        raise ValueError(
            f"reward function {spec.function!r} is a class whose objects cannot be called; add a __call__."
        )
    return built


def _check_bound(loaded: Callable[..., Any], spec: RewardSpec) -> None:
    if not inspect.isroutine(loaded):
        raise ValueError(
            f"reward function {spec.function!r} is already built and takes no args; name its class "
            f"{type(loaded).__name__} to give it some."
        )
    parameters = inspect.signature(loaded).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    known = [one.name for one in parameters]
    for name in spec.args:
        if name not in known:
            remedy = near_names(name, known) or f"its parameters are {', '.join(known)}."
            raise ValueError(f"reward function {spec.function!r} has no parameter {name!r} to bind; {remedy}")
