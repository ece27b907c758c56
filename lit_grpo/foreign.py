"""The guard around others' code: its errors name their owner, and what it changes for the process is undone and told.

For example a plug-in ``mine.Fast`` whose ``on_step`` calls ``torch.set_float32_matmul_precision("high")``: the run goes
on with the precision that it had, and one warning says so. :func:`_states` lists what is looked at. Hooks of this
package and of Lightning are not guarded.
"""

from __future__ import annotations

import functools
import locale
import logging
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType, TracebackType
from typing import Any, NamedTuple, NoReturn

from lit_grpo.process.terminal import warn

OURS = ("lit_grpo.", "lightning.", "pytorch_lightning.")
"""Beginnings of the modules whose classes are not guarded."""
SETUP = "setup"
"""The hook in which code may change a setting of the process for the whole run."""
RAISED_BY = "Raised by "
"""The beginning of the note of an error that names its owner."""


class ForeignExit(RuntimeError):
    """Code of others has tried to end the process, or raised what is no ``Exception``."""


class State(NamedTuple):
    """Something that belongs to the whole process or to a thread.

    Args:
        name: Name of the state in messages.
        read: Function that returns the state's present value.
        write: Sets it to a value that was read.
        is_setting: Whether it may stay as code of others sets it in :data:`SETUP`.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    is_setting: bool = True


class Change(NamedTuple):
    """A state that has changed: its value before, and now."""

    state: State
    before: Any
    now: Any


# ---- what is looked at ----------------------------------------------------------------------------------


@functools.cache
def _states() -> tuple[tuple[State, ...], tuple[State, ...], tuple[State, ...]]:
    """Return the states of the process, of each thread, and of the main thread; torch is loaded with the first call."""
    import numpy as np
    import torch
    from torch.utils import _device as devices

    native, backends = torch._C, torch.backends
    of_device = torch._GLOBAL_DEVICE_CONTEXT
    get, set_to = native._get_fp32_precision_getter, native._set_fp32_precision_setter
    wholes = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
    parts = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]
    kinds = ("flash", "mem_efficient", "math", "cudnn")

    def precision() -> list[str]:
        """Return what parts follow from: a part, or a whole, that is not set is that of IEEE."""
        return [get(*each).replace("none", "ieee") for each in (*wholes, *parts)]

    def set_precision(before: list[str]) -> None:
        of = dict(zip((*wholes, *parts), before, strict=True))
        torch.set_float32_matmul_precision({"ieee": "highest", "tf32": "high"}.get(of["cuda", "matmul"], "medium"))
        for each in (*wholes, *parts):
            set_to(*each, of[each])

    def reductions() -> list[Any]:
        return [
            native._get_cublas_allow_fp16_reduced_precision_reduction(),
            native._get_cublas_allow_bf16_reduced_precision_reduction(),
        ]

    def set_reductions(before: list[Any]) -> None:
        matmul = backends.cuda.matmul
        matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = before

    def cudnn() -> list[bool]:
        return [native._get_cudnn_enabled(), native._get_cudnn_benchmark(), native._get_cudnn_deterministic()]

    def set_cudnn(before: list[bool]) -> None:
        backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic = before

    attentions = [getattr(native, f"_get_{kind}_sdp_enabled") for kind in kinds]

    def set_attentions(before: list[bool]) -> None:
        for kind, value in zip(kinds, before, strict=True):
            getattr(backends.cuda, f"enable_{kind}_sdp")(value)

    def set_mkldnn(before: bool) -> None:
        backends.mkldnn.enabled = before  # pyrefly: ignore[bad-assignment]

    def deterministic() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def set_deterministic(before: tuple[bool, bool]) -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def anomalies() -> tuple[bool, bool]:
        return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

    def autocast() -> list[Any]:
        depth = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        on, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        return [depth, torch.is_autocast_cache_enabled(), on("cpu"), dtype("cpu"), on("cuda"), dtype("cuda")]

    def set_autocast(before: list[Any]) -> None:
        depth, caches, *of_devices = before
        now = torch.autocast_increment_nesting()
        while now > depth:
            now = torch.autocast_decrement_nesting()
        while now < depth:
            now = torch.autocast_increment_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(caches)
        for device, on, dtype in (("cpu", *of_devices[:2]), ("cuda", *of_devices[2:])):
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)

    def modes() -> list[Any]:
        """Return the default device, and the modes that torch's functions run in; each device has one too."""
        depth = native._len_torch_function_stack()
        of_functions = [native._get_function_stack_at(place) for place in range(depth)]
        return [getattr(of_device, "device_context", None), devices.CURRENT_DEVICE, *of_functions]

    def set_modes(before: list[Any]) -> None:
        of_device.device_context, devices.CURRENT_DEVICE, *of_functions = before
        while native._len_torch_function_stack():
            native._pop_torch_function_stack()
        for mode in of_functions:
            native._push_on_torch_function_stack(mode)

    of_process = (
        State("torch.set_float32_matmul_precision or fp32_precision", precision, set_precision),
        State("the precision of reductions in torch.backends.cuda.matmul", reductions, set_reductions),
        State("torch.backends.cudnn", cudnn, set_cudnn),
        State("torch.backends.mkldnn.enabled", native._get_mkldnn_enabled, set_mkldnn),
        State("the kinds of attention in torch.backends.cuda", lambda: [each() for each in attentions], set_attentions),
        State("torch.use_deterministic_algorithms", deterministic, set_deterministic),
        State(
            "torch.autograd.set_detect_anomaly", anomalies, lambda before: torch.autograd.set_detect_anomaly(*before)
        ),
        State("the filters that make errors of warnings", _raising_filters, _keep_raising_filters, is_setting=False),
        State("sys.setrecursionlimit", sys.getrecursionlimit, sys.setrecursionlimit),
        State("logging.disable", lambda: logging.root.manager.disable, logging.disable),
        State(
            "locale.setlocale",
            lambda: locale.setlocale(locale.LC_NUMERIC),
            lambda before: locale.setlocale(locale.LC_NUMERIC, before),
        ),
    )
    of_thread = (
        State("torch.inference_mode", torch.is_inference_mode_enabled, _set_inference_mode, is_setting=False),
        State("torch.set_grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled, is_setting=False),
        State("torch.autocast", autocast, set_autocast, is_setting=False),
        State("torch.set_default_device or another mode of its functions", modes, set_modes, is_setting=False),
        State("torch.set_num_threads", torch.get_num_threads, torch.set_num_threads),
        State("numpy.seterr", np.geterr, lambda before: np.seterr(**before), is_setting=False),
    )
    of_main = (State("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype, is_setting=False),)
    return of_process, of_thread, of_main


def _raising_filters() -> list[Any]:
    return [each for each in warnings.filters if each[0] == "error"]


def _keep_raising_filters(before: list[Any]) -> None:
    """Remove the filters that were added; what others have done to the list meanwhile stays."""
    for each in _raising_filters():
        if each not in before:
            warnings.filters.remove(each)  # pyrefly: ignore[missing-attribute]
    getattr(warnings, "_filters_mutated", lambda: None)()


_MODES: list[Any] = []  # a mode ends where its object is freed


def _set_inference_mode(before: bool) -> None:
    import torch

    _MODES.append(torch.inference_mode(before))
    _MODES[-1].__enter__()


# ---- hooks of plug-ins, callbacks and loggers ------------------------------------------------------------


def is_foreign(kind: type[Any]) -> bool:
    return not kind.__module__.startswith(OURS)


class Guard:
    """Within it a hook of others runs, in the thread that asks it.

    Args:
        what: What the owner is, such as ``plug-in``.
        owner: Object whose hook runs.
        hook: Name of the hook, for messages.

    Raises:
        ForeignExit: The hook has raised what would end the process.
    """

    __slots__ = ("_before", "_hook", "_owner", "_states", "_what")

    def __init__(self, what: str, owner: object, hook: str) -> None:
        self._what, self._owner, self._hook = what, owner, hook

    def __enter__(self) -> None:
        of_process, of_thread, of_main = _states()
        is_main = threading.current_thread() is threading.main_thread()
        self._states = (*of_process, *of_thread, *(of_main if is_main else ()))
        self._before = [each.read() for each in self._states]
        _LOCAL.depth = getattr(_LOCAL, "depth", 0) + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        _LOCAL.depth -= 1
        now = [each.read() for each in self._states]
        if now != self._before:
            changes = [
                Change(*each) for each in zip(self._states, self._before, now, strict=True) if each[1] != each[2]
            ]
            _undo(OF_CALLS.without(changes), [self._name], is_setup=self._hook == SETUP)
        if error is not None:
            if not isinstance(error, Exception) and (kind is SystemExit or not isinstance(error, _PASSING)):
                said = f"{type(error).__name__}: {error}".removesuffix(": ")
                failure = ForeignExit(f"{said}, which would end the process; raise an error that is an Exception")
                failure.add_note(f"{RAISED_BY}{self._name}.")
                raise failure from error
            if owner_of(error) is None:
                error.add_note(f"{RAISED_BY}{self._name}.")

    @property
    def _name(self) -> str:
        kind = type(self._owner)
        return f"{self._what} {kind.__module__}.{kind.__qualname__}, hook {self._hook}"


_PASSING = (SystemExit, KeyboardInterrupt)  # a signal's, of a class of its own


def owner_of(error: BaseException | None) -> str | None:
    """Return the owner of the hook that has raised an error or its cause, as in ``plug-in mine.Fast, hook on_step``."""
    while error is not None:
        for note in getattr(error, "__notes__", ()):
            if note.startswith(RAISED_BY):
                return note.removeprefix(RAISED_BY).removesuffix(".")
        error = error.__cause__
    return None


def guard_hooks(part: Any, what: str, hooks: Sequence[str]) -> None:
    """Let every one of ``hooks`` that is code of others run within a :class:`Guard`.

    Such code is a method or property of the class of ``part``, or a function that was set on ``part`` itself, as on
    Lightning's ``LambdaCallback``.
    """
    kind = type(part)
    if is_foreign(kind) and not hasattr(kind, "_guarded_hooks"):
        part.__class__ = _guarded(kind, what, tuple(hooks))
    for hook in hooks:
        own = vars(part).get(hook)
        if callable(own) and callable(getattr(kind, hook, None)) and not _is_guarded_or_ours(own):
            vars(part)[hook] = MethodType(_within_guard(staticmethod(own), what, hook), part)


def _is_guarded_or_ours(function: Any) -> bool:
    return hasattr(function, "_is_guarded") or str(getattr(function, "__module__", "")).startswith(OURS)


@functools.cache
def _guarded(kind: type[Any], what: str, hooks: tuple[str, ...]) -> Any:
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    body: dict[str, Any] = {**named, "__slots__": (), "_guarded_hooks": True}
    for hook in hooks:
        definer = next((each for each in kind.__mro__ if hook in vars(each)), None)
        if definer is None or not is_foreign(definer):
            continue
        found = vars(definer)[hook]
        if isinstance(found, property) and found.fget is not None:
            body[hook] = found.getter(_within_guard(found.fget, what, hook))
        elif isinstance(found, functools.cached_property):
            body[hook] = functools.cached_property(_within_guard(found.func, what, hook))
        elif isinstance(found, FunctionType | staticmethod | classmethod | functools.partialmethod):
            body[hook] = _within_guard(found, what, hook)
    return type(kind.__name__, (kind,), body)


def _within_guard(method: Any, what: str, hook: str) -> Callable[..., Any]:
    """Return a method in the place of one of any kind."""

    @functools.wraps(method)
    def guarded(self: Any, *arguments: Any, **named: Any) -> Any:
        with Guard(what, self, hook):
            return method.__get__(self, type(self))(*arguments, **named)

    vars(guarded)["_is_guarded"] = True
    return guarded


# ---- calls of rewards, tools, environments and agents, many at a time -----------------------------------


class Flight:
    """Calls of others' code that are made at a time, in the whole process or in one thread.

    One call may change a state only as long as it lasts, which others see. So a change counts that is left when no call
    is being made any more; those that may have made it are the calls at whose end it was seen first.
    """

    def __init__(self, states: Callable[[], Sequence[State]]) -> None:
        self._states = states
        self._lock = threading.Lock()
        self._owners: Counter[str] = Counter()
        self._before: list[Any] = []
        self._suspects: list[str] = []

    def begin(self, owner: str) -> None:
        with self._lock:
            if not self._owners:
                self._before, self._suspects = [each.read() for each in self._states()], []
            self._owners[owner] += 1

    def end(self, owner: str, looks: bool = True) -> None:
        """A call has ended, or is abandoned: then nothing is looked at."""
        with self._lock:
            present = list(self._owners)
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]
            if not looks:
                return
            now = [each.read() for each in self._states()]
            if now == self._before:
                return
            self._suspects = self._suspects or present
            if not self._owners:
                triples = zip(self._states(), self._before, now, strict=True)
                _undo([Change(*each) for each in triples if each[1] != each[2]], self._suspects)

    def without(self, changes: list[Change]) -> list[Change]:
        """Return changes that a hook has made, each from what there was before the calls that are being made."""
        with self._lock:
            known = dict(zip(self._states(), self._before, strict=True)) if self._owners else {}
        changes = [each._replace(before=known.get(each.state, each.before)) for each in changes]
        return [each for each in changes if each.before != each.now]


class Visit:
    """One call of others' code in a thread or on a loop of users' coroutines.

    Args:
        owner: Whose function it is, as in ``reward 'length'``.
    """

    __slots__ = ("_is_over", "_owner")

    def __init__(self, owner: str) -> None:
        self._owner, self._is_over = owner, False

    def __enter__(self) -> None:
        if not hasattr(_LOCAL, "flight"):
            _LOCAL.flight = Flight(lambda: _states()[1])
        _LOCAL.depth = getattr(_LOCAL, "depth", 0) + 1
        OF_CALLS.begin(self._owner)
        _LOCAL.flight.begin(self._owner)

    def __exit__(self, *_: object) -> None:
        _LOCAL.depth -= 1
        _LOCAL.flight.end(self._owner)
        if not self._is_over:
            self._is_over = True
            OF_CALLS.end(self._owner)

    def abandon(self) -> None:
        if not self._is_over:
            self._is_over = True
            OF_CALLS.end(self._owner, looks=False)


_LOCAL = threading.local()
OF_CALLS = Flight(lambda: _states()[0])
"""The only one of the process."""


# ---- what is said, and the end of the process -------------------------------------------------------------

_TOLD: set[tuple[str, str]] = set()


def begin_run() -> None:
    """Tell what code of others changes from now on, and refuse what ends the process."""
    _TOLD.clear()
    refuse_exits()


def _undo(changes: Sequence[Change], owners: Sequence[str], is_setup: bool = False) -> None:
    """Put back what has changed, but for settings that are changed in a set-up, and say each once."""
    owner = " or ".join(owners)
    for state, before, _ in changes:
        if not (is_setup and state.is_setting):
            state.write(before)
    for state, before, now in changes:  # the filters of warnings are as they were
        if (owner, state.name) in _TOLD:
            continue
        _TOLD.add((owner, state.name))
        if is_setup and state.is_setting:
            done = "It stays so, because this was done in the set-up."
        elif state.is_setting:
            done = "The run puts it back each time; change it in setup or before the run if the run is to have it."
        else:
            done = "The run puts it back each time; undo it where it is done."
        warn(f"{owner}: it changes {state.name} for the whole process, from {before!r:.80} to {now!r:.80}. {done}")


_ends = os._exit
_process = 0


def refuse_exits() -> None:
    """Let ``os._exit`` within a call of others' code raise ``SystemExit`` in this process, from now on."""
    global _process
    os._exit, _process = _exit, os.getpid()


def _exit(status: int) -> NoReturn:
    if getattr(_LOCAL, "depth", 0) and os.getpid() == _process:
        raise SystemExit(f"os._exit({status})")
    _ends(status)
