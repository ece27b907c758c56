"""Functions that the policy may call, and what the chat template shows of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from lit_grpo.process.signals import check_signals
from lit_grpo.process.terminal import error_text
from lit_grpo.rewards.loading import load_object


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Args:
        name: Name by which the policy calls the tool.
        function: The function to call; a method of an environment takes the environment as first argument.
        schema: Schema of the tool for the chat template, ``{"type": "function", "function": {...}}``.
        is_method: Whether the first argument of ``function`` is an environment.
        is_async: Whether a call returns a coroutine.
    """

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    is_method: bool = False
    is_async: bool = False

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self.schema["function"].get("parameters", {}).get("properties", {})

    @classmethod
    def of(cls, function: Callable[..., Any], name: str = "", owner: str = "") -> Tool:
        """Make a tool of a function with type hints and a Google docstring, as TRL and transformers do.

        Args:
            function: The function, or a method that is bound to something.
            name: The name by which it is called; by default the function's own.
            owner: The name of the class, if the function is a method of an environment.

        Raises:
            ValueError: A hint or the description of an argument is missing, or the function cannot be called so.
        """
        from transformers.utils.chat_template_utils import get_json_schema

        inner = function.func if isinstance(function, functools.partial) else function
        name = name or getattr(inner, "__name__", type(inner).__name__)
        shown = f"{owner}.{name}" if owner else getattr(inner, "__qualname__", name)
        if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
            raise ValueError(f"{shown} cannot be a tool, because it yields its answer; return the answer in one piece.")
        try:
            schema = get_json_schema(_described(function, inner, name))
        except Exception as error:  # transformers has several kinds of its own
            raise ValueError(
                f"{shown} cannot be a tool ({error_text(error)}); give each argument a type hint and a line under "
                "Args: in a Google docstring, or begin the name with _ where the policy is not to call it."
            ) from error
        check_signals(function, f"the tool {shown}", "leave it out, because tool_timeout_s limits each call")
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        return cls(name, _method(name, shown) if owner else function, schema, bool(owner), is_async)


def _method(name: str, shown: str) -> Callable[..., Any]:
    """Return a function that calls the method ``name`` of its first argument, whatever kind of method it is."""

    def method(environment: Any, /, **arguments: Any) -> Any:
        return getattr(environment, name)(**arguments)

    method.__qualname__ = shown
    return method


def _described(function: Callable[..., Any], inner: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function with the name, the docstring and the remaining parameters of what is called."""

    def described() -> None: ...

    source = inner if inspect.isroutine(inner) else type(inner).__call__
    signature = inspect.signature(function)
    hints = get_type_hints(source)
    described.__name__, described.__doc__ = name, inspect.getdoc(source)
    described.__annotations__ = {each: hints[each] for each in (*signature.parameters, "return") if each in hints}
    vars(described)["__signature__"] = signature
    return described


def named(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Return tools by name."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in found:
            both = " and ".join(_full_name(each.function) for each in (found[tool.name], tool))
            raise ValueError(f"Two tools have the name {tool.name!r} ({both}); rename one of them.")
        found[tool.name] = tool
    return found


def _full_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def load_tools(given: Iterable[str | Callable[..., Any]]) -> list[Tool]:
    """Make tools of functions, or of their paths, as in ``my_tools.py:search``."""
    functions = [load_object(each, "tool") if isinstance(each, str) else each for each in given]
    for function in functions:
        if not callable(function):
            raise ValueError(f"tools has {function!r}, which cannot be called; name a function.")
    return [Tool.of(function) for function in functions]
