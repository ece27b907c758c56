"""Signals: which end a process with its parent, and which users' functions set, as only a main thread may."""

from __future__ import annotations

import ctypes
import dis
import inspect
import signal
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

_CALLS = ("signal", "alarm", "setitimer")
_GUARDS = ("main_thread", "current_thread", "ValueError")  # code with these looks itself whether signals work
_MOST_LAYERS = 16
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Have this process receive a signal when the thread that has started it ends; on Linux, and nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def exit_on_signals() -> None:
    """Have SIGTERM and SIGHUP end this program as ``sys.exit`` does, so that what it has begun is cleaned up.

    The exit code is that of a shell: 128 plus the number of the signal.
    """

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def check_signals(function: Any, what: str, remedy: str) -> None:
    """Refuse a function that sets signals, because users' functions run in threads.

    Raises:
        ValueError: The function sets a signal or alarm; the message begins with ``what`` and ends with ``remedy``.
    """
    if (where := sets_signals(function)) is not None:
        raise ValueError(
            f"{what} sets a signal or an alarm in {where}, which Python allows in the main thread only, and it is "
            f"called in other threads; {remedy}."
        )


def sets_signals(function: Any) -> str | None:
    """Return the name of the user's function that sets a signal or alarm when ``function`` is called; None for none.

    For example ``limit``, if the tool ``search`` calls ``limit``, and ``limit`` calls ``signal.alarm(5)``. The code is
    read and not called; functions of installed packages are left out.
    """
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if inspect.isclass(one) and id(one) not in seen and _is_users(one):
            seen.add(id(one))
            waiting += [vars(one)[name] for name in ("__init__", "__enter__", "__call__") if name in vars(one)]
        elif (called := _function(one)) is not None and id(called) not in seen and _is_users(called):
            seen.add(id(called))
            for code in _codes(called.__code__):
                values = _values(called, code)
                if _sets(code, values):
                    return called.__name__
                waiting += [value for value in values if inspect.isfunction(value) or inspect.isclass(value)]
    return None


def _is_users(one: type | FunctionType) -> bool:
    is_installed = inspect.isfunction(one) and "site-packages" in one.__code__.co_filename
    return not is_installed and str(one.__module__).partition(".")[0] not in sys.stdlib_module_names


def _function(value: Any) -> FunctionType | None:
    """Return the Python function that a function, method, partial function or callable object calls in the end."""
    for _ in range(_MOST_LAYERS):
        if inspect.isfunction(value) and not hasattr(value, "__wrapped__"):
            return value
        names = ("__wrapped__", "__func__", "func")
        inner = next((each for name in names if (each := getattr(value, name, None)) is not None), None)
        value = type(value).__call__ if inner is None and callable(value) else inner
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _codes(constant)


def _values(function: FunctionType, code: CodeType) -> list[Any]:
    """Return what the names in some code of a function stand for, as far as they are globals or from outside."""
    loads = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_DEREF")}
    known = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            known[name] = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
    return [known[name] for name in loads if name in known]


def _sets(code: CodeType, values: list[Any]) -> bool:
    instructions = list(dis.get_instructions(code))
    if any(each.argval in _GUARDS for each in instructions):
        return False
    if any(value is getattr(signal, name) for value in values for name in _CALLS):
        return True
    module = any(value is signal for value in values)
    module |= any(each.opname == "IMPORT_NAME" and each.argval == "signal" for each in instructions)
    attributes = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
    return module and any(each.opname in attributes and each.argval in _CALLS for each in instructions)
