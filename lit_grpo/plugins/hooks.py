"""The one checked call of a hook: :data:`HOOKS` declares what each returns, and :func:`ask` reads it.

For example::

    HOOKS["first_round"] = Counts("prompts", Count)

    ask(plugin, "first_round", records, 8)
    ValueError: Mine.first_round returns [8]; return a list of one number for each of 2 prompts.

A plug-in that is limited to data sets is given their rows alone: :data:`LIMITS` says what its hooks are called with.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar, get_type_hints

from lit_grpo.foreign import OURS, Guard
from lit_grpo.limits import Count, Limit, Number, check_value
from lit_grpo.plugins.columns import COLUMNS, LATE, is_list, shown
from lit_grpo.plugins.plugin import (
    DECISIONS,
    TRAITS,
    Answer,
    Decision,
    Listener,
    Plugin,
    Resume,
    RunNumbers,
    overriding,
)
from lit_grpo.types import Completion, Prompt, Request

if TYPE_CHECKING:
    from lit_grpo.compatibility import Requirement

Copied = TypeVar("Copied", bound=Plugin)
_NUMBERS = get_type_hints(RunNumbers, include_extras=True)
_MOVED = {
    **{trait: f"put {trait!r} into traits" for trait in TRAITS},
    **{number: f"give RunNumbers({number}=...) in numbers" for number in _NUMBERS},
    "longest_rewrite": "return that prompt from rewrite if it is called with longest=True",
    "next_prompt_state": "return that state from prompt_state, which is called after each batch with records and state",
}


class Call(NamedTuple):
    """A call of a hook."""

    plugin: Listener
    hook: str
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{type(self.plugin).__name__}.{self.hook}"


class Form:
    """Form of a hook's return value: here, anything."""

    def read(self, call: Call, value: Any) -> Any:
        """Return what a call has returned, in the form that the run goes on with.

        Raises:
            ValueError: It has another form; the message names plug-in, hook and row.
        """
        return value


def ask(plugin: Listener, hook: str, *arguments: Any) -> Any:
    """Ask a hook of a listener or plug-in, and read what it returns.

    Args:
        plugin: Any, whether it overrides the hook or not.
        hook: A name of :data:`HOOKS`.
        arguments: Arguments of the hook, in their order.

    Returns:
        What the hook's docstring says: tensors of the dtype that :data:`HOOKS` declares, on the host and without a
        gradient; numbers of Python; an empty mapping for None where figures are returned.

    Raises:
        ValueError: The hook returned something else; the message names plug-in, hook and row.
    """
    what = "plug-in" if isinstance(plugin, Plugin) else "callback"
    datasets = getattr(plugin, "datasets", None)
    if datasets and hook in LIMITS:
        limited = LIMITS[hook](datasets, arguments)
        if isinstance(limited, Otherwise):
            return limited.value
        arguments = limited
    with Guard(what, plugin, hook) if not type(plugin).__module__.startswith(OURS) else nullcontext():
        member = getattr(plugin, hook)
        value = member if isinstance(getattr(Plugin, hook), property) else member(*arguments)
    found = read(plugin, hook, value, *arguments)
    return [replace(function, datasets=datasets) for function in found] if datasets and hook == "rewards" else found


def fresh(plugin: Copied) -> Copied:
    """Return a copy of a plug-in that remembers nothing yet, for one run."""
    begun = copy.copy(plugin)
    ask(begun, "setup")
    return begun


def decided_by(plugin: Plugin) -> list[Decision]:
    """Return what a plug-in decides by the hooks that it overrides and the columns that it writes."""
    columns = [COLUMNS[name] for name in COLUMNS if name in plugin.writes and COLUMNS[name].decides]
    return [
        *(decision for decision in DECISIONS if overriding([plugin], *decision.hooks)),
        *([Decision("in how many parts a gradient is measured")] if ask(plugin, "numbers").num_parts > 1 else []),
        *(Decision(its.decides, (), its.needs, its.by_rows, its.replaces) for its in columns),
    ]


def check_decisions(plugins: Sequence[tuple[str, Plugin]]) -> None:
    """Refuse plug-ins of which two decide the same, by their roles, their columns, or hooks of :data:`DECISIONS`.

    Two may decide the same for different data sets, where it is decided row by row.

    Args:
        plugins: Each with its name.

    Raises:
        ValueError: Two decide the same.
    """
    decided = [decided_by(plugin) for _, plugin in plugins]
    by_rows = {decision.what for its in decided for decision in its if decision.by_rows}
    roles = [
        (name, plugin, [plugin.role, *(each.what for each in its)])
        for (name, plugin), its in zip(plugins, decided, strict=True)
    ]
    for (name, plugin, of_plugin), (other, another, of_other) in itertools.combinations(roles, 2):
        apart = plugin.datasets and another.datasets and not plugin.datasets & another.datasets
        for role in filter(None, of_plugin):
            if role in of_other and not (apart and role in by_rows):
                limits = ", or limit each to other data sets" if role in by_rows and not apart else ""
                both = f"{name} and {other}"
                raise ValueError(f"rollout.plugins has {both}, which both decide {role}; take one of them{limits}.")


def requirement_of(plugin: Plugin, name: str) -> Requirement:
    """Return what a plug-in needs of a run and takes away from others, and what follows from the hooks it overrides."""
    declared, decided = ask(plugin, "requirement", name), decided_by(plugin)
    replaced = frozenset(decision.replaces for decision in decided if decision.replaces)
    return replace(declared, needs=declared.needs.union(*(each.needs for each in decided)), decides=replaced)


def read(plugin: Listener, hook: str, value: Any, *arguments: Any) -> Any:
    """Read what a hook has returned, as :func:`ask` does."""
    return HOOKS[hook].read(Call(plugin, hook, arguments), value)


# ---- plug-ins that act on some of the data sets of a run ------------------------------------------------


class Otherwise(NamedTuple):
    """The value of a hook that is not called, since it is asked of a row of another data set."""

    value: Any


Limited = tuple[Any, ...] | Otherwise


def _of_batch(datasets: frozenset[str], arguments: tuple[Any, ...]) -> Limited:
    batch, *others = arguments
    return (replace(batch, groups=[each for each in batch.groups if each.prompt.is_of(datasets)]), *others)


def _of_row(datasets: frozenset[str], arguments: tuple[Any, ...]) -> Limited:
    row = arguments[0]
    prompt: Prompt = row.prompt if hasattr(row, "prompt") else row.request.prompt
    return arguments if prompt.is_of(datasets) else Otherwise(None)


def _of_prompt(datasets: frozenset[str], arguments: tuple[Any, ...]) -> Limited:
    return arguments if arguments[0].is_of(datasets) else Otherwise(arguments[0])


def _of_requests(datasets: frozenset[str], arguments: tuple[Any, ...]) -> Limited:
    return ([request for request in arguments[0] if request.prompt.is_of(datasets)],)


LIMITS: Mapping[str, Callable[[frozenset[str], tuple[Any, ...]], Limited]] = {
    **dict.fromkeys(("add_members", "on_update_end"), _of_batch),
    **dict.fromkeys(("on_turn", "on_completion", "on_drop", "on_group"), _of_row),
    "rewrite": _of_prompt,
    "on_requests": _of_requests,
}
"""What a hook of a plug-in that is limited to data sets is called with; the update's batches and steps limit theirs."""
WHOLE_RUN = {
    **dict.fromkeys(("prompt_chance", "prompt_state"), "chooses among all prompts"),
    **dict.fromkeys(("first_round", "next_round", "shared_round"), "spends the completions of all prompts"),
    "batch_size": "decides how many prompts a batch has",
    "observes": "looks at hidden states of all completions",
    "likeliest": "looks at the distributions of all tokens",
    "on_step": "acts on all requests of a rollout",  # unless it leads those that it is asked for, by on_turn
}
"""Hooks that cannot be limited to data sets: what a plug-in that overrides one does, after its name."""


def restricted(name: str, plugin: Copied, datasets: Iterable[str]) -> Copied:
    """Return a copy of a plug-in that acts on the rows of some data sets alone.

    Args:
        name: What messages call it.
        plugin: Any plug-in whose hooks see rollouts or prompts.
        datasets: Names of data sets, at least one.

    Raises:
        ValueError: What it does concerns the whole run.
    """
    leads = bool(overriding([plugin], "on_turn"))
    concerns = [
        WHOLE_RUN[hook] for hook in WHOLE_RUN if overriding([plugin], hook) and not (leads and hook == "on_step")
    ]
    concerns += [COLUMNS[column].whole_run for column in COLUMNS if column in plugin.writes]
    if "added_loss" in plugin.writes and "candidates" not in plugin.writes:  # which say whose tokens have one
        concerns.append("adds a loss to the tokens of all data sets")
    if ask(plugin, "numbers").num_parts > 1:
        concerns.append("measures the gradient of all prompts")
    why = next(filter(None, concerns), None)
    if why is None and not (overriding([plugin], *LIMITS, "rewards") or plugin.writes):
        why = "does nothing by rows"
    if why is not None:
        raise ValueError(f"rollout.plugins {name} {why}, which cannot be limited to data sets; leave datasets out.")
    limited = copy.copy(plugin)
    vars(limited)["datasets"] = frozenset(datasets)
    return limited


# ---- before a run: does a class override what there is? ------------------------------------------------

INERT = frozenset({"requirement", "check", "setup", "state_dict", "load_state_dict", "close"})
"""Hooks by which alone a plug-in does nothing in a run."""
NEAR, BEGINNING = 0.88, 8
"""A name is taken for a misspelled hook from this similarity on (``difflib``, without case and underscores), or if a
hook's name begins with it and it has so many letters.
"""


def check_overrides(name: str, plugin: Plugin) -> None:
    """Refuse a plug-in that overrides nothing, or whose methods are not what the run calls.

    Args:
        name: What messages call it.
        plugin: Plug-in to check, an object of any subclass.

    Raises:
        ValueError: It overrides no hook that acts in a run; a public method or attribute has nearly the name of a hook
            that it does not override, or begins with ``on_`` as hooks do; or an override cannot be called as the hook.
    """
    kind, known = type(plugin), [*HOOKS, *(each for each in vars(Plugin) if each in Plugin.__annotations__)]
    settings = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
    plain = {_plain(each): each for each in known}
    overridden = [hook for hook in HOOKS if getattr(kind, hook) is not getattr(Plugin, hook)]
    for owner in kind.__mro__[: kind.__mro__.index(Plugin)]:
        for own in vars(owner):
            if own[0] == "_" or own in known or own in settings:
                continue
            if own in _MOVED:
                raise ValueError(f"{name} has {own}, which nothing reads there; {_MOVED[own]}.")
            may_be = HOOKS if callable(vars(owner)[own]) else known  # a method is no misspelled attribute
            open_to = [each for each in plain if plain[each] in may_be and plain[each] not in overridden]
            near = difflib.get_close_matches(_plain(own), open_to, 1, NEAR)
            near = near or [each for each in open_to if len(_plain(own)) >= BEGINNING and each.startswith(_plain(own))]
            if near or own.startswith("on_"):
                meant = f"did you mean {plain[near[0]]}?" if near else f"there are {', '.join(_listening())}."
                raise ValueError(
                    f"{name} has {own}, which is no hook, so nothing calls it; {meant} A method that only the plug-in "
                    "calls may begin with _."
                )
    for hook in overridden:
        _check_override(name, plugin, hook)
    _check_words(name, plugin, "writes", COLUMNS, "column")
    _check_words(name, plugin, "traits", TRAITS, "trait")
    _check_writes(name, plugin, overridden)
    ask(plugin, "numbers")
    if not plugin.role and not {*overridden} - INERT:
        raise ValueError(
            f"{name} overrides no hook of lit_grpo.plugins.Plugin, so it does nothing in a run; override one, such as "
            "on_batch, or leave it out."
        )


def check_traits(callback: Listener) -> None:
    """Refuse a callback that listens to rollouts with a word that is no trait, or with a flag of its own for one.

    Raises:
        ValueError: It has one.
    """
    name = f"callback {type(callback).__name__}"
    for flag in ("forks", "lock_step"):
        if getattr(callback, flag, None) is True:
            raise ValueError(f"{name} has {flag}, which nothing reads there; {_MOVED[flag]}.")
    _check_words(name, callback, "traits", TRAITS, "trait")


def _check_words(name: str, listener: Listener, where: str, known: Mapping[str, Any], what: str) -> None:
    """Check that the words that an attribute declares exist."""
    words = getattr(listener, where)
    if not isinstance(words, frozenset | set):
        raise ValueError(f"{name} has {shown(words)} as {where}; give a frozenset of names of {what}s.")
    for word in sorted(words - known.keys(), key=str):
        near = difflib.get_close_matches(str(word), known, 1)
        meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
        raise ValueError(f"{name} has {word!r} in {where}, which is no {what}; {meant}")


def _check_writes(name: str, plugin: Plugin, overridden: Sequence[str]) -> None:
    """Check that hooks of the columns that a plug-in declares are overridden, and are called at one time."""
    for column in sorted(plugin.writes):
        if COLUMNS[column].hook not in overridden:
            raise ValueError(
                f"{name} has {column!r} in writes, which is written in {COLUMNS[column].hook}, and does not override "
                "that; override it, or leave the column out of writes."
            )
    late = sorted(plugin.writes.intersection(LATE))
    early = sorted(column for column in plugin.writes.difference(LATE) if COLUMNS[column].hook == "on_minibatch")
    if late and early:
        raise ValueError(
            f"{name} has {early[0]!r} and {late[0]!r} in writes, and the second is written later, when it is known "
            "which rows go through the policy; make two plug-ins of it."
        )


def _check_override(name: str, plugin: Plugin, hook: str) -> None:
    """Check that an override is a property where the hook is one, and else takes the hook's arguments."""
    expected, found = getattr(Plugin, hook), inspect.getattr_static(type(plugin), hook)
    if isinstance(expected, property):
        if callable(found):
            raise ValueError(f"{name} has {hook} as a method, and it is read as a value; put @property above it.")
        return
    if not callable(getattr(type(plugin), hook)):
        raise ValueError(f"{name} has {hook} as a value, and it is called as a method; define it with def.")
    method = getattr(plugin, hook)
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        raise ValueError(
            f"{name}.{hook} is async or yields, and its value is used at once; define it with def and return."
        )
    wanted, own = ", ".join(inspect.signature(expected).parameters), inspect.signature(getattr(type(plugin), hook))
    try:
        inspect.signature(method).bind(*wanted.split(", ")[1:])
    except (TypeError, ValueError):
        said = f"{name}.{hook} takes {own}, and it is called with ({wanted})"
        raise ValueError(f"{said}; give it these parameters.") from None


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _listening() -> list[str]:
    return [hook for hook in HOOKS if hook.startswith("on_")]


# ---- forms ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nothing(Form):
    """Nothing: the hook is told something, or changes what it is given."""

    def read(self, call: Call, value: Any) -> None:
        if value is not None:
            raise ValueError(f"{call} returns {shown(value)}, which nothing reads; return nothing.")


@dataclass(frozen=True)
class Single(Form):
    """A number, or None where the annotation says so, within the limits of an annotation."""

    annotation: Any

    def read(self, call: Call, value: Any) -> Any:
        value = _number(value)
        check_value(str(call), value, self.annotation, is_setting=False)
        return value


@dataclass(frozen=True)
class OfRun(Form):
    """Numbers of a run, each within its limits."""

    def read(self, call: Call, value: Any) -> RunNumbers:
        if not isinstance(value, RunNumbers):
            raise ValueError(f"{call} returns {shown(value)}; return lit_grpo.plugins.RunNumbers.")
        read = RunNumbers(*map(_number, value))
        for name, annotation in _NUMBERS.items():
            check_value(f"{call}: {name}", getattr(read, name), annotation, is_setting=False)
        return read


@dataclass(frozen=True)
class Chance(Form):
    """A prompt's chance: from 0 to 1, or any number where prompts are compared by it."""

    def read(self, call: Call, value: Any) -> float:
        value, bounds = _number(value), Limit()
        if ask(call.plugin, "numbers").prompt_candidates == 1:
            bounds = Limit(ge=0, le=1)
        check_value(
            f"{call} of prompt {call.arguments[0].prompt_id!r}", value, Annotated[float, bounds], is_setting=False
        )
        return value


@dataclass(frozen=True)
class Figures(Form):
    """Numbers by name, NaN for one that is not known; None for none."""

    def read(self, call: Call, value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{call} returns {shown(value)}; return numbers by name, or nothing.")
        read = {name: _number(one) for name, one in value.items()}
        for name, one in read.items():
            if not (isinstance(name, str) and isinstance(one, Real)):
                raise ValueError(f"{call} gives {name!r} the value {shown(one)}; give one number by a name.")
        return read


@dataclass(frozen=True)
class Counts(Form):
    """A number for each item of the first argument."""

    of: str
    annotation: Any

    def read(self, call: Call, value: Any) -> list[Any]:
        number = len(call.arguments[0])
        if not is_list(value) or len(value) != number:
            raise ValueError(
                f"{call} returns {shown(value)}; return a list of one number for each of {number} {self.of}."
            )
        return [Single(self.annotation).read(call, one) for one in value]


@dataclass(frozen=True)
class Instance(Form):
    """An object of a class; of :data:`Answer` and what it holds the parts too.

    Args:
        path: Import path of the class, such as ``lit_grpo.plugins.Answer``.
        optional: Whether None may stand for it.
        many: Whether it is a sequence of them.
    """

    path: str
    optional: bool = False
    many: bool = False

    def read(self, call: Call, value: Any) -> Any:
        if value is None and self.optional:
            return None
        kind = _of_path(self.path)
        items: Any = value if self.many and is_list(value) else [value]
        for one in items:
            if not isinstance(one, kind) or (self.many and not is_list(value)):
                kind_of, none = "a sequence of" if self.many else "a", " or None" if self.optional else ""
                raise ValueError(f"{call} returns {shown(value)}; return {kind_of} {self.path}{none}.")
        if isinstance(value, Answer):
            self._check_answer(call, value)
        return value

    _PARTS: ClassVar[Mapping[str, Any]] = {
        "submit": Request,
        "fork": tuple,
        "open": Request,
        "drop": tuple,
        "hold": tuple,
        "resume": Resume,
        "finish": Completion,
    }

    def _check_answer(self, call: Call, answer: Answer) -> None:
        for name, kind in self._PARTS.items():
            part, named = getattr(answer, name), "keys of requests" if kind is tuple else f"{kind.__name__}s"
            if not (is_list(part) or isinstance(part, Mapping)) or not all(isinstance(one, kind) for one in part):
                raise ValueError(f"{call} returns an Answer with {name} {shown(part)}; give a sequence of {named}.")


@dataclass(frozen=True)
class Rewritten(Form):
    """The prompt that it was given, with other text."""

    def read(self, call: Call, value: Any) -> Prompt:
        given: Prompt = call.arguments[0]
        if not isinstance(value, Prompt) or (value.prompt_id, value.visit) != (given.prompt_id, given.visit):
            raise ValueError(
                f"{call} returns {shown(value)} for prompt {given.prompt_id!r}; return a Prompt of the same prompt_id "
                "and visit, such as the one that it is given."
            )
        return value


@dataclass(frozen=True)
class Asked(Form):
    """Requests of the first argument."""

    def read(self, call: Call, value: Any) -> Sequence[Request]:
        keys = {request.key for request in call.arguments[0]}
        if not is_list(value) or not all(isinstance(one, Request) and one.key in keys for one in value):
            raise ValueError(
                f"{call} returns {shown(value)}; return those of the requests it is given that wait, or ()."
            )
        return value


def _number(value: Any) -> Any:
    """Return the number that an array or tensor of one number holds; anything else as it is."""
    return value.item() if getattr(value, "shape", None) in ((), (1,)) else value


def _of_path(path: str) -> type[Any]:
    """Return a class by its path; what imports torch is there if anything can return it."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


# ---- the table ------------------------------------------------------------------------------------------

ANSWER = Instance("lit_grpo.plugins.Answer", optional=True)
HOOKS: Mapping[str, Form] = {
    # before a run, checkpoints, and the end
    "requirement": Instance("lit_grpo.compatibility.Requirement"),
    "check": Nothing(),
    "setup": Nothing(),
    "numbers": OfRun(),
    "rewards": Instance("lit_grpo.rewards.function.RewardFunction", many=True),
    "on_policy_start": Nothing(),
    "on_train_start": Nothing(),
    "findings": Instance("lit_grpo.findings.rewards.Finding", many=True),
    "state_dict": Instance("builtins.dict"),
    "load_state_dict": Nothing(),
    "close": Nothing(),
    # a rollout
    "observes": Instance("lit_grpo.plugins.ObservationPoint", optional=True),
    "likeliest": Single(Number),
    "waits_in_time": Instance("builtins.bool"),
    "on_rollout_start": Nothing(),
    "on_requests": Asked(),
    "on_step": ANSWER,
    "on_turn": ANSWER,
    "on_completion": ANSWER,
    "on_drop": Nothing(),
    "on_group": ANSWER,
    "on_idle": ANSWER,
    "on_rollout_end": Nothing(),
    # prompts, and how many completions each gets
    "prompt_state": Figures(),
    "prompt_chance": Chance(),
    "rewrite": Rewritten(),
    "first_round": Counts("prompts", Count),
    "next_round": Single(Annotated[int, Limit()]),
    "shared_round": Counts("prompts", Number),
    "batch_size": Single(Count),
    # a batch
    "on_batch_start": Nothing(),
    "add_members": Nothing(),
    "metrics": Figures(),
    "on_update_end": Figures(),
    "validate": Figures(),
    # the update
    "on_batch": Nothing(),
    "on_minibatch": Nothing(),
    "loss": Nothing(),
    "on_gradient": Nothing(),
    "on_optimizer_step": Nothing(),
}
"""The form of what each hook returns."""
