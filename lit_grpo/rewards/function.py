"""A reward function: its arguments, its values, and its calls."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, cast

from lit_grpo.limits import Limit, check_fields
from lit_grpo.process.processes import ProcessCall
from lit_grpo.process.signals import check_signals
from lit_grpo.process.terminal import error_text, warn
from lit_grpo.rewards.inputs import GROUP_INPUTS, OF_EPISODES, ROLLOUT_INPUTS, SHARED
from lit_grpo.rewards.loading import REWARDS, load_object, near_names, split_path
from lit_grpo.types import Episode, Prompt, own_copy

if TYPE_CHECKING:
    import torch


MOST_NAMED = 10
"""The most rows that a warning names."""


class RewardError(RuntimeError):
    """A reward function failed on a rollout; the original exception is its cause."""


LARGEST_REWARD = 1e9
"""The largest value of a reward function; with the largest weight its square is still finite in float32."""


@dataclass(frozen=True)
class RewardSpec:
    """A reward function with its weight and name."""

    function: str | Callable[..., Any]
    """An import path (``my_package.my_module:score``) or a file and a name (``my_rewards.py:score``, relative to the
    working directory) of a function or class; or ``exact_match``, ``math_equivalence``, ``format_match``,
    ``soft_overlong_penalty``, ``relative_judge``, ``rubric_judge``, ``http_judge`` or ``reward_model``. From Python
    also the function, object or class itself.
    """
    weight: Annotated[float, Limit(finite=True)] = 1.0
    """The factor of the function's value in the sum of the rewards. With 0 the value is only logged."""
    name: str | None = None
    """The name in the logs; by default the function's own."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class's ``__init__``, or keyword arguments of the function."""
    datasets: list[str] | None = None
    """Data sets whose rows it scores, by the names in the rows' column ``dataset``. By default it scores all rows."""
    retries: Annotated[int | None, Limit(ge=0, le=10)] = None
    """Max number of repetitions of a call that raises, or that returns an error for a completion, at most 10. The
    attempt with the fewest errors counts. ``reward_timeout_s`` limits all attempts together, and with ``process`` each
    attempt. The default is 3 for judges, and 0 for other functions.
    """
    retry_pause_s: Annotated[float, Limit(ge=0, le=60)] = 1.0
    """Seconds before the first retry, at most 60. The pause doubles before each further retry. If the exception has an
    attribute ``retry_after_s``, the pause is at least that long; with infinity the call is not repeated.
    """
    process: bool = False
    """Call the function in separate processes, one for each call at a time. A function that exits, crashes or never
    returns then fails its own rollouts only. Arguments and values must be picklable.
    """

    def __post_init__(self) -> None:
        check_fields(self, f"reward function {self.path!r}: ")
        if not isinstance(self.function, str) and not callable(self.function):
            raise ValueError(
                f"the reward {self.function!r} is no function, path or RewardSpec; give one of these, or a mapping "
                'such as {"function": score, "weight": 0.1}.'
            )
        if self.name == "":
            raise ValueError(f"the name of reward function {self.path!r} is empty; leave it out for the default name.")

    @property
    def path(self) -> str:
        return self.function if isinstance(self.function, str) else _name_of(self.function)

    @property
    def default_name(self) -> str:
        is_path = isinstance(self.function, str) and self.function not in REWARDS
        return split_path(self.path)[1].split(".")[-1] if is_path else self.path


def _name_of(call: Callable[..., Any]) -> str:
    call = call.func if isinstance(call, functools.partial) else call
    return getattr(call, "__name__", type(call).__name__)


def read_value(value: Any) -> float | None:
    """Return a value as a float. ``None`` stays ``None``: the function does not apply to the completion.

    A value is a number up to ``LARGEST_REWARD`` on either side of 0, a bool, NumPy scalar or 0-d tensor.

    Raises:
        ValueError: It is anything else.
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
    if abs(number) > LARGEST_REWARD:
        raise ValueError(f"it returned {number}; return a number from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}")
    return number


def read_values(values: Any, num_rollouts: int) -> list[float | Exception | None]:
    """Return the values of a group; in place of each value that is no number stands the error.

    A function may return an exception for a completion that it cannot score; the others then keep their values.

    Raises:
        ValueError: ``values`` is not a list or array of ``num_rollouts`` values.
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
        return value if isinstance(value, Exception) else read_value(value)
    except ValueError as error:
        return error


class StatefulReward:
    """Base of reward functions that check rows, prepare for a run, or count what they do.

    A subclass has a ``__call__`` with the parameters of a reward function, and overrides what it needs of these.

    Attributes:
        columns: Names of the columns that it needs among ``**columns``.
        retries: The default of ``RewardSpec.retries``.
        limits_itself: Whether each call ends by itself, so that ``reward_timeout_s`` need not end it.
    """

    columns: tuple[str, ...] = ()
    retries: int = 0
    limits_itself: bool = False

    def check(self, columns: Mapping[str, Any]) -> None:
        """Check the columns of a row, before the run.

        Raises:
            ValueError: It cannot score completions of this row.
        """

    def doubt(self, columns: Mapping[str, Any]) -> str | None:
        """Return why completions of a row cannot earn its reward, as far as its columns show it; None if they can.

        It is asked before the run, and a warning names the rows.
        """
        return None

    def begin(self, device: torch.device, folder: Path) -> None:
        """Prepare for the first rollout.

        Args:
            device: Device that the policy is trained on, for a reward model.
            folder: Folder of the run, where files may be written.
        """

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call, by name; an update logs it as ``rewards/NAME/...``."""
        return {}

    @property
    def keeps_something(self) -> bool:
        """True if it prepares or counts, so that it must be called in this process."""
        of, base = type(self), StatefulReward
        return of.begin is not base.begin or of.take_counts is not base.take_counts


Reward = RewardSpec | str | Mapping[str, Any] | Callable[..., Any]
"""The forms of a reward function in a config or from Python."""


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward function: what to call, with which arguments, and the weight of its value.

    There are two forms. One scores a rollout, the other (``on_group``) the whole group of a prompt. Where there are
    environments, ``episode``, or ``episodes`` or ``environments``, will do for ``completion`` or ``completions``:

    .. code-block:: text

        row     {"prompt": "2 + 3 =", "answer": 5}          completions "5", "6"

        def score(completion, answer)      two calls        score("5", 5) -> 1.0    score("6", 5) -> 0.0
        def score(completions, answer)     one call         score(["5", "6"], [5, 5]) -> [1.0, 0.0]

    Args:
        name: The name in the logs.
        weight: The factor of its value in the sum of the rewards.
        path: Import path of the function, for messages.
        call: The function, with its ``args`` bound.
        names: The parameters that are filled from a rollout or group.
        required: Names of parameters in ``names`` without a default.
        takes_columns: Whether it has ``**columns``, and so gets all columns of the data.
        declared: The columns that it needs among ``**columns``, as its attribute ``columns`` says.
        on_group: Whether it scores a group.
        bound: The parameters that ``args`` have filled.
        retries: Max number of repetitions of a call that raises.
        retry_pause_s: Seconds before the first retry.
        datasets: Data sets whose rows it scores; all if empty.
        state: The function as a :class:`StatefulReward`, also where a process calls it; None if it is none.
    """

    name: str
    weight: float
    path: str
    call: Callable[..., Any]
    names: frozenset[str]
    required: tuple[str, ...]
    takes_columns: bool
    declared: tuple[str, ...]
    on_group: bool
    bound: frozenset[str]
    retries: int = 0
    retry_pause_s: float = 1.0
    datasets: frozenset[str] = frozenset()
    state: StatefulReward | None = None

    @classmethod
    def load(cls, spec: RewardSpec, timeout_s: float | None = None) -> RewardFunction:
        """Import what ``spec`` names, give it its arguments and check its signature.

        Args:
            spec: The reward function by name.
            timeout_s: The most seconds that a process of the function may take for one call.
        """
        is_path, named = isinstance(spec.function, str), f"reward function {spec.path!r}"
        loaded = load_object(spec.function) if isinstance(spec.function, str) else spec.function
        if not callable(loaded):
            raise ValueError(
                f"{named} is a {type(loaded).__name__}, which cannot be called; name a function or a class."
            )
        call, args = (_build(loaded, spec), {}) if inspect.isclass(loaded) else (loaded, spec.args)
        function = cls.of(call, spec.name or spec.default_name, spec.weight, spec.path, args)
        if not spec.process:
            remedy = "set process: true for the reward" if is_path else "give it as a path, with process: true"
            check_signals(call, named, f"leave it out, or {remedy}")
        elif not isinstance(spec.function, str):
            raise ValueError(
                f"{named} is given itself, but a process of its own has to import it; give its path (file.py:name or "
                "module:name), or leave process out."
            )
        elif isinstance(call, StatefulReward) and call.keeps_something:
            raise ValueError(
                f"{named} has a state, which a process of its own would not share with the run; leave process out."
            )
        else:
            load = functools.partial(_load_call, spec.function, spec.args)
            try:
                call = ProcessCall(load, timeout_s, recorded=("log_metric", "log_extra", "log_feedback"))
            except Exception as error:  # pickling runs code of the values' classes, which may fail in any way
                raise ValueError(
                    f"{named} cannot be called in a process with args {spec.args} ({error_text(error)}); give args "
                    "that can be pickled, or leave process out."
                ) from error
            function = replace(function, call=call)
        retries = function.retries if spec.retries is None else spec.retries
        datasets = frozenset(spec.datasets or ())
        return replace(function, retries=retries, retry_pause_s=spec.retry_pause_s, datasets=datasets)

    @classmethod
    def of(
        cls,
        call: Callable[..., Any],
        name: str,
        weight: float = 1.0,
        path: str | None = None,
        args: Mapping[str, Any] = MappingProxyType({}),
    ) -> RewardFunction:
        """Make a reward function of a callable, with some of its parameters bound to ``args``."""
        path = path or name
        parameters = _parameters(call, path)
        takes_columns = any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        free = [one for one in named if one.name not in args]
        names = frozenset(one.name for one in free)
        of_one, of_group = ({"completion"}, {"completions"}) if names & {"completion", "completions"} else OF_EPISODES
        one, group = next(iter(names & of_one), None), next(iter(sorted(names & of_group)), None)
        if one is not None and group is not None:
            raise ValueError(
                f"reward function {path!r} takes {one!r}, which is of one rollout, and {group!r}, which is of a whole "
                f"group; leave {group!r} out, or leave {one!r} out and take {one + 's'!r}, which has it for each."
            )
        if one is None and group is None:
            listed = ", ".join(one.name for one in free) or "none"
            if "solution_str" in names:
                raise ValueError(
                    f"reward function {path!r} has verl's parameters ({listed}); wrap it in a function of completion, "
                    "which is solution_str, and of columns of the data, as docs/migration.md shows."
                )
            raise ValueError(
                f"reward function {path!r} must take 'completion' (to score one rollout) or 'completions' (to score a "
                f"group), but has neither among its parameters ({listed}); name one of them so."
            )
        required = tuple(one.name for one in free if one.default is one.empty)
        declared = _declared(call, path)
        given: object = call
        state = given if isinstance(given, StatefulReward) else None
        if args:
            _check_bound(call, path, args, [one.name for one in parameters], takes_columns)
            call = functools.partial(call, **args)
        return cls(
            name=name,
            weight=weight,
            path=path,
            call=call,
            names=names,
            required=required,
            takes_columns=takes_columns,
            declared=declared,
            on_group=group is not None,
            bound=frozenset(args),
            retries=state.retries if state is not None else 0,
            state=state,
        )

    @property
    def inputs(self) -> tuple[str, ...]:
        return GROUP_INPUTS if self.on_group else ROLLOUT_INPUTS

    @property
    def limits_itself(self) -> bool:
        """True if each call ends by itself: in a process with a time limit, whose start does not count."""
        return isinstance(self.call, ProcessCall) or (self.state is not None and self.state.limits_itself)

    @property
    def may_log(self) -> bool:
        """True if it gets ``log_metric``, by which it may log metrics of its own."""
        return "log_metric" in self.names or (self.takes_columns and self.on_group)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)

    @property
    def needs(self) -> list[str]:
        return [*self.declared, *(name for name in self.required if name not in self.inputs)]

    def applies_to(self, prompt: Prompt) -> bool:
        return prompt.is_of(self.datasets)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check that the data has every column that the function requires."""
        columns = list(columns)
        listed = ", ".join(columns) or "none"
        for column in self.declared:
            if column not in columns:
                raise ValueError(
                    f"reward {self.name!r} ({self.path}) needs the column {column!r}, which the data does "
                    f"not have (its columns: {listed}); name another one in its args, or add it to the data."
                )
        for parameter in self.required:
            if parameter not in columns and parameter not in self.inputs:
                raise ValueError(
                    f"reward {self.name!r} ({self.path}) requires the parameter {parameter!r}, which is "
                    f"neither one of {', '.join(self.inputs)} nor a column of the data "
                    f"(its columns: {listed}); set it in args, rename it or give it a default."
                )

    def check_row(self, prompt: Prompt) -> None:
        """Check that a prompt has the columns that the function requires, and content in them that it can use."""
        if lacking := [name for name in self.needs if name not in prompt.columns]:
            raise ValueError(
                f"reward {self.name!r} ({self.path}) needs the column {lacking[0]!r}, which row {prompt.prompt_id} "
                "(rows count from 0) lacks; add it there, give the parameter a default, or set model.on_reward_error "
                "to none."
            )
        if self.state is not None:
            try:
                self.state.check(prompt.columns)
            except ValueError as error:
                raise ValueError(
                    f"reward {self.name!r} ({self.path}) cannot score row {prompt.prompt_id} (rows count from 0): "
                    f"{error}"
                ) from error

    def score(self, arguments: dict[str, Any], num_rollouts: int) -> list[float | Exception | None]:
        """Make one call; return a value or an error for each of its rollouts.

        Each attempt gets copies of the row's columns and of messages, so that what it changes is seen by nobody else. A
        call that returns errors for some rollouts is repeated too; the attempt with the fewest of them counts.

        Raises:
            ValueError: The function did not return one value for each rollout, or an argument cannot be copied.
            Exception: Any error of the function.
        """
        attempts = _Attempts(self._pauses_s)
        while True:
            try:
                attempts.end(self._read(self.call(**self._own(arguments)), num_rollouts))
            except Exception as error:  # a user's function runs here, and may fail in any way
                attempts.fail(error)
            if attempts.are_over:
                return attempts.best
            time.sleep(attempts.pause_s)

    async def score_async(self, arguments: dict[str, Any], num_rollouts: int) -> list[float | Exception | None]:
        """Do what :meth:`score` does, for an ``async`` function."""
        attempts = _Attempts(self._pauses_s)
        while True:
            try:
                attempts.end(self._read(await self.call(**self._own(arguments)), num_rollouts))
            except Exception as error:  # a user's function runs here, and may fail in any way
                attempts.fail(error)
            if attempts.are_over:
                return attempts.best
            await asyncio.sleep(attempts.pause_s)

    def _own(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return arguments in which nothing but environments and what is of the run is anybody else's too."""

        def own(name: str, value: Any) -> Any:
            if name == "completion_ids":
                return list(value)
            if isinstance(value, Episode):
                return value._replace(messages=own_copy(value.messages, f"argument {name!r}"))
            return own_copy(value, f"argument {name!r}")

        def own_list(name: str, values: Sequence[Any]) -> list[Any]:
            return [own(name, value) for value in values]  # one by one: a list has the same column for each rollout

        of_call = own_list if self.on_group else own
        shared = {name for name, value in arguments.items() if name in SHARED or value is None}
        return {name: value if name in shared else of_call(name, value) for name, value in arguments.items()}

    @property
    def _pauses_s(self) -> list[float]:
        return [self.retry_pause_s * 2**number for number in range(self.retries)]

    def _read(self, returned: Any, num_rollouts: int) -> list[float | Exception | None]:
        return read_values(returned, num_rollouts) if self.on_group else [read_value(returned)]


class _Attempts:
    """The attempts of one call: the values so far, and the pause before the next attempt."""

    def __init__(self, pauses_s: Sequence[float]) -> None:
        self._pauses_s, self._errors = list(pauses_s), math.inf
        self.best: list[float | Exception | None] = []
        self.pause_s = 0.0
        self.are_over = False

    def end(self, values: list[float | Exception | None]) -> None:
        """Take the values of an attempt; the attempts are over if all are there."""
        errors = [value for value in values if isinstance(value, Exception)]
        if len(errors) < self._errors:
            self.best, self._errors = values, len(errors)
        self._plan(errors)

    def fail(self, error: Exception) -> None:
        """Take the error of an attempt; raise it after the last one, if no attempt brought values."""
        self._plan([error])
        if self.are_over and not self.best:
            raise error

    def _plan(self, errors: Sequence[Exception]) -> None:
        """Pause before the next attempt for as long as the errors ask, unless none is left or could help."""
        wanted = max((getattr(error, "retry_after_s", 0.0) for error in errors), default=0.0)
        self.are_over = not errors or not self._pauses_s or wanted == math.inf
        self.pause_s = 0.0 if self.are_over else max(self._pauses_s.pop(0), wanted)


def listed(rewards: Reward | Sequence[Reward] | None) -> list[Reward]:
    """Return reward functions as a list; a single one becomes a list of one."""
    if rewards is None:
        return []
    if isinstance(rewards, str | Mapping | RewardSpec) or callable(rewards):
        return [rewards]
    return list(rewards)


def load_rewards(specs: Reward | Sequence[Reward] | None, timeout_s: float | None = None) -> list[RewardFunction]:
    """Load the reward functions of a config; ``timeout_s`` is as in :meth:`RewardFunction.load`."""
    functions = [_load(spec, timeout_s) for spec in listed(specs)]
    check_names(functions)
    return functions


def _load(reward: Reward, timeout_s: float | None) -> RewardFunction:
    if isinstance(reward, Mapping):
        reward = RewardSpec(**_checked(with_function(reward)))
    return RewardFunction.load(reward if isinstance(reward, RewardSpec) else RewardSpec(reward), timeout_s)


_NAMES_ELSEWHERE = {
    **dict.fromkeys(("reward_funcs", "reward_func", "reward_function", "func", "fn", "reward"), "function"),
    **dict.fromkeys(("reward_weights", "reward_weight", "weights"), "weight"),
    **dict.fromkeys(("kwargs", "reward_kwargs", "params", "init_args"), "args"),
    **dict.fromkeys(("class_path",), "function"),
}
"""Fields of rewards in other trainers, and ours."""


def _checked(reward: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a reward."""
    known = [each.name for each in fields(RewardSpec)]
    for name in reward:
        if name not in known:
            ours = _NAMES_ELSEWHERE.get(name)
            remedy = f"write {ours!r}." if ours else near_names(str(name), known) or f"it has {', '.join(known)}."
            raise ValueError(f"the reward {dict(reward)} has no field {name!r}; {remedy}")
    if "function" not in reward:
        raise ValueError(f"the reward {dict(reward)} has no function; add 'function' with a function or its path.")
    return dict(reward)


def with_function(reward: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a :class:`RewardSpec`, where ``path`` may stand for ``function``."""
    given = dict(reward)
    if "path" in given and "function" not in given:
        given["function"] = given.pop("path")
    return given


def check_names(functions: Sequence[RewardFunction]) -> None:
    for name, count in Counter(function.name for function in functions).items():
        if count > 1:
            paths = ", ".join(function.path for function in functions if function.name == name)
            raise ValueError(f"{count} rewards have the name {name!r} ({paths}); set a name for each.")


def _load_call(path: str, args: dict[str, Any]) -> Callable[..., Any]:
    loaded: Any = load_object(path)
    if inspect.isclass(loaded):
        return cast("Callable[..., Any]", loaded(**args))
    return functools.partial(loaded, **args)


def _build(loaded: type, spec: RewardSpec) -> Callable[..., Any]:
    try:
        built = loaded(**spec.args)
    except ValueError as error:
        raise ValueError(f"reward function {spec.path!r}: {error}") from error
    except Exception as error:  # the user's class is built here, and may fail in any way
        raise ValueError(
            f"reward function {spec.path!r} cannot be built with args {spec.args} ({error_text(error)}); "
            "correct its args."
        ) from error
    if not callable(built):
        raise ValueError(f"reward function {spec.path!r} is a class whose objects cannot be called; add a __call__.")
    return built


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
                f"reward function {path!r}: parameter {one.name!r} is positional-only, and arguments are given by "
                "name; wrap it in a function without '/'."
            )
    return parameters


def _declared(call: Callable[..., Any], path: str) -> tuple[str, ...]:
    columns = getattr(call, "columns", ())
    if not isinstance(columns, (tuple, list)) or not all(isinstance(column, str) for column in columns):
        raise ValueError(
            f"reward function {path!r}: its attribute 'columns' must be a tuple of names, not {columns!r}."
        )
    return tuple(columns)


def _check_bound(
    call: Callable[..., Any], path: str, args: Mapping[str, Any], known: list[str], takes_columns: bool
) -> None:
    if not inspect.isroutine(call):
        raise ValueError(
            f"reward function {path!r} is already built and takes no args; name its class "
            f"{type(call).__name__} to give it some."
        )
    for name in () if takes_columns else args:
        if name not in known:
            remedy = near_names(name, known) or f"its parameters are {', '.join(known)}."
            raise ValueError(f"reward function {path!r} has no parameter {name!r} to bind; {remedy}")


def check_prompts(prompts: Mapping[str, Sequence[Prompt]], functions: Sequence[RewardFunction]) -> None:
    """Check that reward functions can score every prompt that is to be scored (:meth:`RewardFunction.check_row`)."""
    for prompt in (prompt for split, rows in prompts.items() if split != "predict" for prompt in rows):
        for function in functions:
            if function.applies_to(prompt):
                function.check_row(prompt)


def warn_of_doubts(prompts: Mapping[str, Sequence[Prompt]], functions: Sequence[RewardFunction]) -> None:
    """Warn of rows that no completion can win, as far as their own columns show it (:meth:`StatefulReward.doubt`)."""
    for function in (function for function in functions if function.state is not None):
        for split, rows in prompts.items():
            scored = [prompt for prompt in rows if split != "predict" and function.applies_to(prompt)]
            doubts = {each.prompt_id: why for each in scored if (why := _doubt(function, each)) is not None}
            if doubts:
                named = ", ".join([*doubts][:MOST_NAMED]) + (" ..." if len(doubts) > MOST_NAMED else "")
                first, why = next(iter(doubts.items()))
                warn(
                    f"{len(doubts)} of {len(scored)} rows of {split} cannot be won by reward {function.name!r} as they "
                    f"are ({named}): of {first}, {why}.",
                    stacklevel=2,
                )


def _doubt(function: RewardFunction, prompt: Prompt) -> str | None:
    assert function.state is not None
    try:
        return function.state.doubt(prompt.columns)
    except (KeyError, ValueError):  # what check_row says, whose failure may be no error
        return None
