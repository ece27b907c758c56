"""The one checked read of what a hook returns: :data:`HOOKS` declares the form of each, and :func:`ask` reads it.

For example::

    HOOKS["token_weights"] = ByToken(Numbers("weights", "float32", Limit(ge=0, finite=True)), rows=0)

    ask(plugin, "token_weights", rollouts, version)
    ValueError: Mine.token_weights gives sample (0,) of prompt 'train/0' weights with -1 at place 3; give one finite
    number of at least 0 for each of its 8 tokens that are trained on.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar

from lit_grpo.foreign import OURS, Guard
from lit_grpo.limits import Count, Limit, NotNegative, Number, check_value
from lit_grpo.plugins.plugin import Answer, Listener, Plugin, Resume, decided_by
from lit_grpo.types import Completion, Prompt, Request, Rollout

if TYPE_CHECKING:
    import torch

    from lit_grpo.compatibility import Requirement

Copied = TypeVar("Copied", bound=Plugin)
FINITE = Limit(finite=True)
Finite = Annotated[float, FINITE]
LOGPROB = Limit(le=1e-3, finite=True, remedy="a log-prob is not above 0")
"""Bounds of a log-prob; a little above 0 is rounding."""


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
        arguments: Of the hook, in their order.

    Returns:
        What the hook's docstring says: tensors of the dtype that :data:`HOOKS` declares, on the host and without a
        gradient; numbers of Python; an empty mapping for None where figures are returned.

    Raises:
        ValueError: The hook returned something else; the message names plug-in, hook and row.
    """
    what = "plug-in" if isinstance(plugin, Plugin) else "callback"
    with Guard(what, plugin, hook) if not type(plugin).__module__.startswith(OURS) else nullcontext():
        member = getattr(plugin, hook)
        value = member if isinstance(getattr(Plugin, hook), property) else member(*arguments)
    return read(plugin, hook, value, *arguments)


def read(plugin: Listener, hook: str, value: Any, *arguments: Any) -> Any:
    """Read what a hook has returned, as :func:`ask` does."""
    return HOOKS[hook].read(Call(plugin, hook, arguments), value)


def fresh(plugin: Copied) -> Copied:
    """Return a copy of a plug-in that remembers nothing yet, for one run."""
    begun = copy.copy(plugin)
    ask(begun, "setup")
    return begun


def requirement_of(plugin: Plugin, name: str) -> Requirement:
    """Return what a plug-in needs of a run and takes away from others, and what follows from the hooks it overrides."""
    declared, decided = ask(plugin, "requirement", name), decided_by(plugin)
    replaced = frozenset(decision.replaces for decision in decided if decision.replaces)
    return replace(declared, needs=declared.needs.union(*(each.needs for each in decided)), decides=replaced)


# ---- before a run: does a class override what there is? ------------------------------------------------

INERT = frozenset({"requirement", "check", "setup", "state_dict", "load_state_dict", "close"})
"""Hooks by which alone a plug-in does nothing in a run."""
NEAR, BEGINNING = 0.88, 8
"""A name is taken for a misspelt hook from this similarity on (``difflib``, without case and underscores), or if a
hook's name begins with it and it has so many letters.
"""


def check_overrides(name: str, plugin: Plugin) -> None:
    """Refuse a plug-in that overrides nothing, or whose methods are not what the run calls.

    Args:
        name: What messages call it.
        plugin: Any.

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
            open_to = [each for each in plain if plain[each] not in overridden]
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
    if not plugin.role and not {*overridden} - INERT:
        raise ValueError(
            f"{name} overrides no hook of lit_grpo.plugins.Plugin, so it does nothing in a run; override one, such as "
            "shape_advantages, or leave it out."
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
            raise ValueError(f"{call} returns {_shown(value)}, which nothing reads; return nothing.")


@dataclass(frozen=True)
class Single(Form):
    """A number, or None where the annotation says so, within the limits of an annotation."""

    annotation: Any

    def read(self, call: Call, value: Any) -> Any:
        value = _number(value)
        check_value(str(call), value, self.annotation, is_setting=False)
        return value


@dataclass(frozen=True)
class Chance(Form):
    """A prompt's chance: from 0 to 1, or any number where prompts are compared by it."""

    def read(self, call: Call, value: Any) -> float:
        value, bounds = _number(value), Limit()
        if ask(call.plugin, "prompt_candidates") == 1:
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
            raise ValueError(f"{call} returns {_shown(value)}; return numbers by name, or nothing.")
        read = {name: _number(one) for name, one in value.items()}
        for name, one in read.items():
            if not (isinstance(name, str) and isinstance(one, Real)):
                raise ValueError(f"{call} gives {name!r} the value {_shown(one)}; give one number by a name.")
        return read


@dataclass(frozen=True)
class Counts(Form):
    """A number for each item of the first argument."""

    of: str
    annotation: Any

    def read(self, call: Call, value: Any) -> list[Any]:
        number = len(call.arguments[0])
        if not _is_list(value) or len(value) != number:
            raise ValueError(
                f"{call} returns {_shown(value)}; return a list of one number for each of {number} {self.of}."
            )
        return [Single(self.annotation).read(call, one) for one in value]


@dataclass(frozen=True)
class Instance(Form):
    """An object of a class; of :data:`Answer` and what it holds the parts too.

    Args:
        path: Of the class.
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
        items: Any = value if self.many and _is_list(value) else [value]
        for one in items:
            if not isinstance(one, kind) or (self.many and not _is_list(value)):
                kind_of, none = "a sequence of" if self.many else "a", " or None" if self.optional else ""
                raise ValueError(f"{call} returns {_shown(value)}; return {kind_of} {self.path}{none}.")
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
            if not (_is_list(part) or isinstance(part, Mapping)) or not all(isinstance(one, kind) for one in part):
                raise ValueError(f"{call} returns an Answer with {name} {_shown(part)}; give a sequence of {named}.")


@dataclass(frozen=True)
class Rewritten(Form):
    """The prompt that it was given, with other text."""

    def read(self, call: Call, value: Any) -> Prompt:
        given: Prompt = call.arguments[0]
        if not isinstance(value, Prompt) or (value.prompt_id, value.visit) != (given.prompt_id, given.visit):
            raise ValueError(
                f"{call} returns {_shown(value)} for prompt {given.prompt_id!r}; return a Prompt of the same prompt_id "
                "and visit, such as the one that it is given."
            )
        return value


@dataclass(frozen=True)
class Asked(Form):
    """Requests of the first argument."""

    def read(self, call: Call, value: Any) -> Sequence[Request]:
        keys = {request.key for request in call.arguments[0]}
        if not _is_list(value) or not all(isinstance(one, Request) and one.key in keys for one in value):
            raise ValueError(
                f"{call} returns {_shown(value)}; return those of the requests it is given that wait, or ()."
            )
        return value


@dataclass(frozen=True)
class Numbers:
    """A tensor of one number for each of something.

    Args:
        what: A noun for messages.
        dtype: Of the tensor.
        limit: Bounds of each number.
        nan: Whether NaN is allowed.
    """

    what: str
    dtype: str
    limit: Limit = FINITE
    nan: bool = False

    def read(
        self, call: Call, value: Any, shape: tuple[int, ...], whom: str, each: str, stays: bool = False
    ) -> torch.Tensor:
        """Return the tensor, on the host and without a gradient, or with ``stays`` on its device and with it.

        Args:
            call: For messages.
            value: A tensor, an array, or a list.
            shape: That it must have.
            whom: What the numbers are of, for messages.
            each: What has one number, for messages.
            stays: Whether the tensor is part of the computation of a loss.

        Raises:
            ValueError: The shape, the dtype or a number is another one.
        """
        import torch

        bounds = self.limit.text("", float) if self.dtype != "bool" else "a boolean"
        said, wanted = f"{call} gives {whom} {self.what}", f"give {bounds} for each of {each}"
        try:
            numbers = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"{said} as {_shown(value)}; {wanted}.") from None
        kinds = {
            "bool": numbers.dtype == torch.bool,
            "int64": not (numbers.is_floating_point() or numbers.is_complex()),
        }
        if tuple(numbers.shape) != shape:
            raise ValueError(f"{said} of shape {tuple(numbers.shape)}; {wanted}: the shape {shape}.")
        if numbers.numel() and not kinds.get(self.dtype, not numbers.is_complex()):
            raise ValueError(f"{said} of {numbers.dtype}; {wanted}.")
        numbers = (
            numbers.to(dtype=getattr(torch, self.dtype))
            if stays
            else numbers.detach().to("cpu", getattr(torch, self.dtype))
        )
        if self.dtype != "bool" and (wrong := self._wrong(numbers)).any():
            place = wrong.nonzero()[0].tolist()
            where = place[0] if len(place) == 1 else tuple(place)
            raise ValueError(f"{said} with {numbers[tuple(place)].item():g} at place {where}; {wanted}.")
        return numbers

    def _wrong(self, numbers: torch.Tensor) -> torch.Tensor:
        wrong = numbers.isinf() if self.limit.finite else numbers.new_zeros(numbers.shape).bool()
        if not self.nan:
            wrong = wrong | numbers.isnan()
        for bound, sign in ((self.limit.ge, 1), (self.limit.le, -1)):
            if bound is not None:
                wrong = wrong | (sign * (numbers - bound) < 0)
        return wrong


@dataclass(frozen=True)
class ByRollout(Form):
    """One number for each rollout of a batch, shape R.

    Args:
        numbers: Their dtype and range.
        rows: The place of the argument that has an item for each rollout; by default the batch has them.
        or_rewards: Whether rewards of the batch may stand for the booleans.
    """

    numbers: Numbers
    rows: int | None = None
    or_rewards: bool = False

    def read(self, call: Call, value: Any) -> Any:
        number = len(call.arguments[0].rollouts if self.rows is None else call.arguments[self.rows])
        each, rewards = f"{number} rollouts", getattr(value, "rewards_R", None) if self.or_rewards else None
        if rewards is not None:
            Numbers("rewards", "float32", Limit(), nan=True).read(call, rewards, (number,), "the batch", each)
            return value
        return self.numbers.read(call, value, (number,), "the batch", each)


@dataclass(frozen=True)
class ByToken(Form):
    """Numbers for the tokens of rollouts: for each rollout in their order, or by the keys of their completions.

    Args:
        numbers: Their dtype and range.
        rows: The place of the argument that has the rollouts; None for a batch, which is the first.
        by_key: Whether rollouts are named by key; each has to be there.
        of_all: Whether all tokens have a number; by default those that are trained on.
    """

    numbers: Numbers
    rows: int | None = None
    by_key: bool = True
    of_all: bool = False

    def read(self, call: Call, value: Any) -> Any:
        if value is None:
            return None
        rollouts = _rollouts(call, self.rows)
        if not self.by_key:
            values = _for_each(call, value, rollouts)
            return [
                one if one is None else self.of(call, one, each) for one, each in zip(values, rollouts, strict=True)
            ]
        values = _by_key(call, value)
        missing = next((each for each in rollouts if each.completion.request.key not in values), None)
        if missing is not None:
            raise ValueError(
                f"{call} gives {_row(missing)} no {self.numbers.what}; give each completion one tensor, by its key."
            )
        return {
            each.completion.request.key: self.of(call, values[each.completion.request.key], each) for each in rollouts
        }

    def of(self, call: Call, value: Any, rollout: Rollout) -> torch.Tensor:
        """Return the numbers of one rollout."""
        return _of_tokens(self.numbers, call, value, rollout, self.of_all)


@dataclass(frozen=True)
class OldLogprobs(Form):
    """Log-probs by completion; NaN, or none, where the pass that trains on a token computes them."""

    numbers: Numbers = Numbers("log-probs", "float32", LOGPROB, nan=True)

    def read(self, call: Call, value: Any) -> dict[Any, torch.Tensor] | None:
        import torch

        if value is None:
            return None
        batch, several_steps = call.arguments
        values, read = _by_key(call, value), dict[Any, torch.Tensor]()
        for rollout in batch.rollouts:
            completion = rollout.completion
            known = values.get(completion.request.key, [math.nan] * completion.num_trained)
            logprobs_T = read[completion.request.key] = _of_tokens(self.numbers, call, known, rollout)
            stale_T = logprobs_T.isnan() & (
                (completion.versions_T[completion.trained_T] != batch.version) | several_steps
            )
            if rollout.kept and not rollout.learnt and stale_T.any():
                why = (
                    "there are several steps on the batch"
                    if several_steps
                    else f"the policy is version {batch.version}"
                )
                place = int(stale_T.nonzero()[0])
                raise ValueError(
                    f"{call} gives {_row(rollout)} no log-prob (NaN) at place {place} of its tokens that are trained "
                    f"on, and {why}, so that no pass computes it; give the log-prob."
                )
        return read


@dataclass(frozen=True)
class Credit(Form):
    """For each rollout advantages of its turns, a sequence, or of its tokens, a tensor or an array."""

    numbers: Numbers = Numbers("advantages", "float32")

    def read(self, call: Call, value: Any) -> list[torch.Tensor | None] | None:
        if value is None:
            return None
        read: list[Any] = []
        rollouts = call.arguments[0].rollouts
        for one, rollout in zip(_for_each(call, value, rollouts), rollouts, strict=True):
            if one is None or math.isnan(rollout.advantage):
                read.append(None)
            elif hasattr(one, "shape"):
                read.append(_of_tokens(self.numbers, call, one, rollout))
            else:
                turns = len(rollout.completion.turns)
                of_turns = self.numbers.read(call, one, (turns,), _row(rollout), f"its {turns} turns")
                read.append(
                    self.numbers.read(
                        call,
                        rollout.completion.of_turns(of_turns.tolist()),
                        (rollout.completion.num_trained,),
                        _row(rollout),
                        "its tokens",
                    )
                )
        return read


@dataclass(frozen=True)
class Shaped(Form):
    """An advantage for each rollout of each group; NaN stays where the second argument has it."""

    numbers: Numbers = Numbers("advantages", "float64", Limit(finite=True), nan=True)

    def read(self, call: Call, value: Any) -> list[list[float]]:
        batch, before = call.arguments
        if not _is_list(value) or len(value) != len(batch.groups):
            raise ValueError(f"{call} returns {_shown(value)}; return a list for each of {len(batch.groups)} groups.")
        read: list[list[float]] = []
        for group, old, new in zip(batch.groups, before, value, strict=True):
            whom, each = f"prompt {group.prompt.prompt_id!r}", f"its {len(old)} rollouts"
            numbers = self.numbers.read(call, new, (len(old),), whom, each).tolist()
            if any(math.isnan(number) and not math.isnan(was) for number, was in zip(numbers, old, strict=True)):
                raise ValueError(
                    f"{call} gives {whom} the advantages {numbers}; give a finite number for each of {each}."
                )
            read.append([math.nan if math.isnan(was) else number for number, was in zip(numbers, old, strict=True)])
        return read


@dataclass(frozen=True)
class Candidates(Form):
    """By completion ids and values of K tokens at each place, perhaps with a value of all other tokens after these.

    A completion may be missing.
    """

    ids: Numbers = Numbers("ids", "int64", Limit(ge=0))
    values: Numbers = Numbers("values", "float32", Limit(), nan=True)

    def read(self, call: Call, value: Any) -> dict[Any, tuple[torch.Tensor, torch.Tensor]] | None:
        if value is None:
            return None
        read, shapes = dict[Any, Any](), list[tuple[int, int]]()
        for rollout in call.arguments[0].rollouts:
            key, number = rollout.completion.request.key, rollout.completion.num_trained
            if (pair := _by_key(call, value).get(key)) is None:
                continue
            if not _is_list(pair) or len(pair) != 2 or len(getattr(pair[0], "shape", ())) != 2:
                raise ValueError(
                    f"{call} gives {_row(rollout)} {_shown(pair)}; give two tensors, ids and values of K tokens."
                )
            width = pair[0].shape[1]
            shapes.append((width, width + (tuple(getattr(pair[1], "shape", ())) == (number, width + 1))))
            read[key] = tuple(
                form.read(call, one, (number, columns), _row(rollout), "K tokens at each place")
                for form, one, columns in zip((self.ids, self.values), pair, shapes[0], strict=True)
            )
        return read


@dataclass(frozen=True)
class Examples(Form):
    """Rollouts of which no token has an advantage, with weights in the channel ``ce``."""

    numbers: Numbers = Numbers("ce_weights", "float32")

    def read(self, call: Call, value: Any) -> Sequence[Rollout]:
        examples = Instance("lit_grpo.types.Rollout", many=True).read(call, value)
        for example in examples:
            if example.completion.num_trained:
                raise ValueError(
                    f"{call} gives {_row(example)} tokens that are trained on by advantages; mark all as observed."
                )
            if example.ce_weights is None:
                raise ValueError(
                    f"{call} gives {_row(example)} no ce_weights, so nothing is imitated; give one for each token."
                )
            _of_tokens(self.numbers, call, example.ce_weights, example, of_all=True)
        return examples


@dataclass(frozen=True)
class Chunked(Form):
    """Chunks of a completion, one after another from its first token to its last, none above ``largest_chunk``."""

    def read(self, call: Call, value: Any) -> Sequence[Any]:
        chunks = Instance("lit_grpo.update.plugin.Chunk", many=True).read(call, value)
        completion: Completion = call.arguments[0]
        number, largest = completion.num_tokens, ask(call.plugin, "largest_chunk")
        begins = [0, *(chunk.end for chunk in chunks)]
        joins = all(chunk.begin == begin < chunk.end for chunk, begin in zip(chunks, begins, strict=False))
        weighs = all(math.isfinite(chunk.weight) and chunk.weight >= 0 for chunk in chunks)
        fits = largest is None or all(chunk.end - chunk.begin <= largest for chunk in chunks)
        if chunks and not (joins and weighs and fits and begins[-1] == number):
            prompt_id, _, path = completion.request.key
            raise ValueError(
                f"{call} cuts sample {path} of prompt {prompt_id!r} into {[tuple(chunk) for chunk in chunks]}; give "
                f"chunks without a gap from 0 to {number}, its number of tokens, of at most {largest} tokens "
                "(largest_chunk), with weights of 0 or more."
            )
        return chunks


@dataclass(frozen=True)
class InLoss(Form):
    """A number for each token of a micro-batch, shape N, on its device.

    Args:
        numbers: Their range.
        has_gradient: Whether the gradient of it is part of the loss's; else it is cut off.
        first: Whether the tokens are the first argument itself, and not its ``logprobs_N``.
    """

    numbers: Numbers
    has_gradient: bool = False
    first: bool = False

    def read(self, call: Call, value: Any) -> torch.Tensor:
        logprobs_N = call.arguments[0] if self.first else call.arguments[0].logprobs_N
        read_N = _in_loss(self.numbers, call, value, logprobs_N, self.numbers.what)
        if not self.has_gradient:
            return read_N.detach()
        if logprobs_N.requires_grad and not read_N.requires_grad and read_N.any():
            raise ValueError(f"{call} gives tokens a {self.numbers.what} without a gradient; compute it from tokens.")
        return read_N


@dataclass(frozen=True)
class TokenFigures(Form):
    """Values of a micro-batch's tokens by name, each of shape N."""

    def read(self, call: Call, value: Any) -> dict[str, torch.Tensor]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{call} returns {_shown(value)}; return values of tokens by name, or nothing.")
        logprobs_N, numbers = call.arguments[0].logprobs_N, Numbers("values", "float32", Limit(), nan=True)
        return {name: _in_loss(numbers, call, one, logprobs_N, repr(name)).detach() for name, one in value.items()}


def _in_loss(numbers: Numbers, call: Call, value: Any, logprobs_N: torch.Tensor, whom: str) -> torch.Tensor:
    shape, each = tuple(logprobs_N.shape), f"{len(logprobs_N)} tokens of a micro-batch, as tokens.logprobs_N has them"
    if getattr(value, "device", None) != logprobs_N.device:
        raise ValueError(
            f"{call} gives {whom} {_shown(value)}; give a tensor on {logprobs_N.device}, one number for each of {each}."
        )
    return numbers.read(call, value, shape, whom, each, stays=True)


# ---- rows, and what is shown of a value -------------------------------------------------------------------


def _rollouts(call: Call, place: int | None) -> Sequence[Rollout]:
    return call.arguments[0].rollouts if place is None else call.arguments[place]


def _row(rollout: Rollout) -> str:
    return f"sample {rollout.completion.request.path} of prompt {rollout.prompt.prompt_id!r}"


def _of_tokens(numbers: Numbers, call: Call, value: Any, rollout: Rollout, of_all: bool = False) -> torch.Tensor:
    completion = rollout.completion
    number, which = (completion.num_tokens, "") if of_all else (completion.num_trained, " that are trained on")
    each = f"its {number} tokens{which}" + (", observed tokens among them" if of_all else "")
    return numbers.read(call, value, (number,), _row(rollout), each)


def _for_each(call: Call, value: Any, rollouts: Sequence[Rollout]) -> Sequence[Any]:
    if not _is_list(value) or len(value) != len(rollouts):
        raise ValueError(
            f"{call} returns {_shown(value)}; return a list with an entry, or None, for each of {len(rollouts)} "
            "rollouts."
        )
    return value


def _by_key(call: Call, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{call} returns {_shown(value)}; return a mapping of completion.request.key to a tensor, or None."
        )
    return value


def _is_list(value: Any) -> bool:
    """Return whether a value has a length and an order: no text, no mapping."""
    return (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and not isinstance(value, str | bytes | Mapping)
        and getattr(value, "shape", True) != ()
    )


def _number(value: Any) -> Any:
    """Return the number that an array or tensor of one number holds; anything else as it is."""
    return value.item() if getattr(value, "shape", None) in ((), (1,)) else value


def _shown(value: Any) -> str:
    if getattr(value, "shape", None) and hasattr(value, "dtype"):
        return f"numbers of shape {tuple(value.shape)}"
    text = repr(value)
    length = f" ({len(value)} entries)" if _is_list(value) else ""
    return (text if len(text) <= 80 else f"{text[:77]}...") + length


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
    "rewards": Instance("lit_grpo.rewards.function.RewardFunction", many=True),
    "on_policy_start": Nothing(),
    "on_train_start": Nothing(),
    "findings": Instance("lit_grpo.findings.rewards.Finding", many=True),
    "state_dict": Instance("builtins.dict"),
    "load_state_dict": Nothing(),
    "close": Nothing(),
    # a rollout
    "observes": Instance("lit_grpo.plugins.ObservationPoint", optional=True),
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
    "prompt_candidates": Single(Count),
    "num_recent": Single(Number | None),
    "prompt_state": Figures(),
    "prompt_chance": Chance(),
    "next_prompt_state": Figures(),
    "rewrite": Rewritten(),
    "longest_rewrite": Rewritten(),
    "first_round": Counts("prompts", Count),
    "next_round": Single(Annotated[int, Limit()]),
    "shared_round": Counts("prompts", Number),
    "batch_size": Single(Count),
    "first_rollout": Single(NotNegative),
    "num_parts": Single(Count),
    # a batch
    "on_batch_start": Nothing(),
    "add_members": Nothing(),
    "metrics": Figures(),
    "on_update_end": Figures(),
    "validate": Figures(),
    # the update of a batch
    "choose_rollouts": ByRollout(Numbers("choice", "bool"), or_rewards=True),
    "shape_advantages": Shaped(),
    "choose_from_batch": ByRollout(Numbers("choice", "bool"), rows=1),
    "credit": Credit(),
    "ce_weights": ByToken(Numbers("ce_weights", "float32"), by_key=False, of_all=True),
    "candidate_tokens": Candidates(),
    "old_logprobs": OldLogprobs(),
    # an optimizer step
    "examples": Examples(),
    "token_mask": ByToken(Numbers("mask", "bool"), rows=1),
    "token_weights": ByToken(Numbers("weights", "float32", Limit(ge=0, finite=True)), rows=0),
    "largest_chunk": Single(Count | None),
    "chunks": Chunked(),
    "loss_term": Instance("lit_grpo.update.plugin.Term", optional=True),
    "proximal_logprobs": InLoss(Numbers("log-probs", "float32", LOGPROB), first=True),
    "token_loss": InLoss(Numbers("loss", "float32"), has_gradient=True),
    "token_metrics": TokenFigures(),
    "entropy_coefficient": Single(Finite),
    "step_scale": Single(Annotated[float, Limit(ge=0, finite=True)]),
    "on_optimizer_step": Nothing(),
}
"""The form of what each hook returns."""
