"""Functions that the policy may call, and what the chat template shows of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from lit_grpo.rewards.loading import error_text, load_object


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Args:
        name: By which it is called.
        function: What is called; a method of an environment without its object.
        schema: What the chat template shows of it, ``{"type": "function", "function": {...}}``.
        is_method: Whether the first argument of ``function`` is an environment.
    """

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    is_method: bool = False

    @property
    def is_async(self) -> bool:
        """Whether a call returns a coroutine."""
        return inspect.iscoroutinefunction(self.function)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schemas of its parameters, by name."""
        return self.schema["function"].get("parameters", {}).get("properties", {})

    @classmethod
    def of(cls, function: Callable[..., Any], is_method: bool = False) -> Tool:
        """Make a tool of a function with type hints and a Google docstring, as TRL and transformers do.

        Raises:
            ValueError: A hint or the description of an argument is missing.
        """
        from transformers.utils.chat_template_utils import get_json_schema

        name = getattr(function, "__qualname__", type(function).__name__)
        try:
            schema = get_json_schema(MethodType(function, object()) if is_method else function)
        except Exception as error:  # transformers has several kinds of its own
            raise ValueError(
                f"{name} cannot be a tool ({error_text(error)}); give each argument a type hint and a line under "
                "Args: in a Google docstring, or begin the name with _ where the policy is not to call it."
            ) from error
        return cls(schema["function"]["name"], function, schema, is_method)


def named(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Return tools by name.

    Raises:
        ValueError: Two have the same name.
    """
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in found:
            both = " and ".join(each.function.__qualname__ for each in (found[tool.name], tool))
            raise ValueError(f"Two tools have the name {tool.name!r} ({both}); rename one of them.")
        found[tool.name] = tool
    return found


def load_tools(given: Iterable[str | Callable[..., Any]]) -> list[Tool]:
    """Make tools of functions, or of their paths, as in ``my_tools.py:search``.

    Raises:
        ValueError: One cannot be imported, or be a tool.
    """
    functions = [load_object(each, "tool") if isinstance(each, str) else each for each in given]
    for function in functions:
        if not callable(function):
            raise ValueError(f"tools has {function!r}, which cannot be called; name a function.")
    return [Tool.of(function) for function in functions]
