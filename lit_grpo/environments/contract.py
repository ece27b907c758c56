"""The interface of environments: TRL's unchanged, with optional members.

What ``reset``, ``respond`` and tools return is a text; or, for a policy that sees images, a list of parts such as
``{"type": "text", "text": "The screen:"}`` and ``{"type": "image", "image": screenshot}``, an image of Pillow. TRL's
contract (``environment_factory``)::

    class Game:
        def reset(self, **columns) -> str | None:      # the text is added to the last user message
            self.number, self.tries = columns["number"], 0
            return "I think of a number below 100."

        def guess(self, number: int) -> str:           # any other public method is a tool, async ones too
            \"\"\"Guess the number.

Args:
                number: Your guess.
            \"\"\"
            self.tries += 1
            ...

        def get_reward(self) -> float | None: ...      # optional; None where it does not apply

and, all optional::

        done = False                                   # attribute or property: True ends the episode
        def respond(self, text: str) -> str | None     # the user's answer to a turn without a call; None ends it
        def turn_reward(self) -> float                 # what the last turn earned by itself
        def state(self) -> Any                         # plain values; with restore(state) an episode outlives a kill,
                                                       # and may be gone on with several times
        def restore(self, state: Any) -> None
        def close(self) -> None                        # after the episode has been scored
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from lit_grpo.environments.tools import Tool, load_tools, named
from lit_grpo.process.signals import check_signals
from lit_grpo.process.terminal import error_text
from lit_grpo.rewards.loading import load_object

if TYPE_CHECKING:
    from lit_grpo.types import Prompt

logger = logging.getLogger(__name__)
COLUMN = "environment"
"""The column of the data that names a row's environment, where there are several."""
OPTIONAL = ("get_reward", "respond", "turn_reward", "state", "restore", "close")
NOT_TOOLS = ("reset", *OPTIONAL)
Factory = str | Callable[[], Any]


class EnvironmentFailed(Exception):
    """An environment raises it to say that not the policy has failed, but what the environment stands on.

    The trajectory restarts with a fresh environment, or is left out of its group.
    """


@dataclass(frozen=True)
class Kind:
    """A kind of environment.

    Args:
        type: The class; None where there are only functions.
        make: Returns a fresh environment.
        tools: Tools that the policy may call, by name.
        columns: The columns that ``reset`` takes; None for all of them.
        required: The columns that ``reset`` takes without a default.
        methods: Names of the optional methods that the environment has.
    """

    type: type | None
    make: Callable[[], Any]
    tools: Mapping[str, Tool]
    columns: tuple[str, ...] | None = ()
    required: tuple[str, ...] = ()
    methods: frozenset[str] = frozenset()

    @functools.cached_property
    def name(self) -> str:
        return "tools" if self.type is None else self.type.__name__

    @property
    def begins(self) -> str:
        """The name of the function that takes a row's columns."""
        return f"{self.name}.reset"

    @property
    def gives_reward(self) -> bool:
        return "get_reward" in self.methods

    @property
    def can_be_restored(self) -> bool:
        """True if a trajectory can resume from a saved state; functions have no state."""
        return self.type is None or "state" in self.methods

    @property
    def responds(self) -> bool:
        return "respond" in self.methods

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [dict(tool.schema) for tool in self.tools.values()]

    def arguments(self, prompt: Prompt) -> dict[str, Any]:
        """Return the arguments of ``reset`` for a row: copies, which it may change as it likes."""
        return prompt.own_columns(self.columns)

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Check that a row has what ``reset`` requires.

        Raises:
            ValueError: A column is missing; the message goes on after the row's number.
        """
        for name in self.required:
            if name not in columns:
                listed = ", ".join(map(repr, columns)) or "none"
                raise ValueError(
                    f"has no column {name!r}, which {self.begins} requires (it has {listed}); add the column, or "
                    "give the parameter a default"
                )


def make_kinds(
    factory: Factory | Mapping[str, Factory] | None, tools: Sequence[str | Callable[..., Any]]
) -> dict[str | None, Kind]:
    """Return the kinds of environment by the values of the column ``environment``; a single one by None."""
    functions = load_tools(tools)
    if factory is None:
        if not functions:
            raise ValueError("it has neither a factory nor tools; give one, as in factory: my_env.py:Game.")
        return {None: Kind(None, lambda: None, named(functions))}
    if isinstance(factory, Mapping):
        if not factory:
            raise ValueError("factory is an empty mapping; give at least one environment by its name.")
        return {name: _kind(each, functions) for name, each in factory.items()}
    return {None: _kind(factory, functions)}


def _kind(factory: Factory, functions: Sequence[Tool]) -> Kind:
    make: Any = load_object(factory, "environment") if isinstance(factory, str) else factory
    kind = _type_of(make, factory)
    members = _methods(kind)
    if "reset" not in members:
        raise ValueError(f"environment {kind.__name__} has no method reset; add one, which begins an episode.")
    if "done" in members:
        raise ValueError(f"{kind.__name__}.done is a method, but must be an attribute or a property; add @property.")
    if ("state" in members) != ("restore" in members):
        raise ValueError(
            f"environment {kind.__name__} has only one of the methods state and restore; give it both, or none."
        )
    limits = "leave it out, because reset_timeout_s and tool_timeout_s limit each call"
    for each in (make, kind, *(members[name] for name in NOT_TOOLS if name in members)):
        check_signals(each, f"environment {kind.__name__}", limits)
    own = [
        Tool.of(member, name, kind.__name__)
        for name, member in members.items()
        if not name.startswith("_") and name not in NOT_TOOLS
    ]
    if not own and not functions and "respond" not in members:
        raise ValueError(
            f"environment {kind.__name__} has neither a tool (a public method) nor a method respond, which answers "
            "as the user; add one of them."
        )
    columns, required = columns_of(list(inspect.signature(members["reset"]).parameters.values()))
    return Kind(
        type=kind,
        make=make,
        tools=named([*functions, *own]),
        columns=columns,
        required=required,
        methods=frozenset(members.keys() & set(OPTIONAL)),
    )


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of a class by name, bound to an object or, as class methods are, to the class.

    Static and class methods, partial methods and decorated ones are among them. A callable object is none; it is named
    in a warning, because the policy cannot call it.

    Raises:
        ValueError: A method has no parameter for its environment, or a property returns a function.
    """
    methods: dict[str, Callable[..., Any]] = {}
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        is_public, shown = not name.startswith("_"), f"{kind.__name__}.{name}"
        if name.startswith("__") or inspect.isclass(member):
            continue
        if isinstance(member, property | functools.cached_property):
            getter = member.fget if isinstance(member, property) else member.func
            if is_public and _returns_function(getter):
                raise ValueError(
                    f"{shown} is a property that returns a function, and only methods are tools; make it a method, or "
                    "begin its name with _."
                )
        elif hasattr(type(member), "__get__"):
            bound = member.__get__(object(), kind)
            if callable(bound):
                if is_public and inspect.isfunction(member):
                    _check_takes_environment(member, shown)
                methods[name] = bound
        elif is_public and callable(member):
            logger.warning(
                "%s is a callable object and no method, so the policy cannot call it; make it a method, or begin its "
                "name with _.",
                shown,
            )
    return methods


def _returns_function(getter: Callable[..., Any] | None) -> bool:
    returns = getattr(getter, "__annotations__", {}).get("return")
    name = returns if isinstance(returns, str) else getattr(get_origin(returns) or returns, "__name__", "")
    return name.rpartition("Callable")[1] != ""


def _check_takes_environment(method: Callable[..., Any], shown: str) -> None:
    first = next(iter(inspect.signature(method).parameters.values()), None)
    if first is None or (first.name != "self" and first.annotation is not first.empty):
        what = "no parameter" if first is None else f"no self: its first parameter is {first.name!r}"
        raise ValueError(f"{shown} is a method and takes {what}; add self, or make it a staticmethod.")


def columns_of(parameters: Sequence[inspect.Parameter]) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Return the columns that parameters take, None for all, and those of them that have no default."""
    named_ones = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    required = tuple(one.name for one in named_ones if one.default is one.empty)
    return None if takes_all else tuple(one.name for one in named_ones), required


def _type_of(make: Any, factory: Factory) -> type:
    """Return the class that a factory makes objects of; where it does not say so, one is made."""
    if inspect.isclass(make):
        return make
    if not callable(make):
        raise ValueError(f"environment {factory!r} is a {type(make).__name__}; name a class, or a function.")
    hints = get_type_hints(make) if inspect.isfunction(make) else {}
    said = hints.get("return")
    if inspect.isclass(said) and said is not Any:
        return said
    try:
        return type(make())
    except Exception as error:  # the user's function runs here, and may fail in any way
        raise ValueError(
            f"environment {factory!r} cannot be created ({error_text(error)}); fix it, or annotate its return type."
        ) from error
