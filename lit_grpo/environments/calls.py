"""Tool calls in what a policy has written: formats as rows of a table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lit_grpo.environments.tools import Tool


class Call(NamedTuple):
    """A call that can be made."""

    name: str
    arguments: dict[str, Any]


class BrokenCall(NamedTuple):
    """What was meant as a call, and cannot be read: its text, and why."""

    text: str
    why: str


class Turn(NamedTuple):
    """What an assistant's turn says: its text without calls, its reasoning, and its calls in their order."""

    content: str
    reasoning: str = ""
    calls: Sequence[Call | BrokenCall] = ()

    @property
    def message(self) -> dict[str, Any]:
        """As a message of a conversation; a broken call stays in its content."""
        broken = "".join(call.text for call in self.calls if isinstance(call, BrokenCall))
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
            if isinstance(call, Call)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.content + broken}
        message |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        return message | ({"tool_calls": calls} if calls else {})


class CallFormat(NamedTuple):
    """How calls are written.

    Args:
        pattern: Finds them in a text; group 1 is what ``read`` gets.
        read: Reads one, or raises a ValueError that says what is wrong.
        mark: A text in chat templates that use the format.
    """

    pattern: re.Pattern[str]
    read: Callable[[str, Mapping[str, Tool]], Call]
    mark: str


def _json_call(text: str, tools: Mapping[str, Tool], key: str = "arguments") -> Call:
    try:
        said = json.loads(text, strict=False)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        raise ValueError(f'it is not {{"name": NAME, "{key}": {{...}}}}')
    arguments = said.get(key, said.get("arguments", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"its {key} are no JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"its {key} are {json.dumps(arguments)[:40]}, not an object")
    return Call(said["name"], arguments)


def _llama_call(text: str, tools: Mapping[str, Tool]) -> Call:
    return _json_call(text, tools, key="parameters")


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def _xml_call(text: str, tools: Mapping[str, Tool]) -> Call:
    found = _FUNCTION.fullmatch(text)
    if found is None:
        raise ValueError("it is not <function=NAME><parameter=NAME>VALUE</parameter>...</function>")
    name, body = found.groups()
    schemas = tools[name].parameters if name in tools else {}
    return Call(name, {key: _typed(value, schemas.get(key, {})) for key, value in _PARAMETER.findall(body)})


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """Return a text as its schema says; where it cannot be, as it is."""
    if schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_OBJECT = re.compile(
    r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*\Z|\A\s*(?:<\|python_tag\|>)?\s*(\{\s*\"name\".*)\Z", re.DOTALL
)
CallFormatName = Literal["qwen", "hermes", "llama", "json"]
FORMATS: Mapping[str, CallFormat] = {
    "qwen": CallFormat(_TAGGED, _xml_call, "<function="),
    "hermes": CallFormat(_TAGGED, _json_call, "<tool_call>"),
    "llama": CallFormat(_OBJECT, _llama_call, '"parameters": '),
    "json": CallFormat(_OBJECT, _json_call, ""),
}
"""``<tool_call>`` with XML (Qwen3-Coder, Qwen3.5) or JSON in it (Hermes, Qwen2.5, Qwen3), or a bare JSON object."""


def format_of(chat_template: str) -> str:
    """Return the format that a chat template writes calls in."""
    return next(name for name, each in FORMATS.items() if each.mark in chat_template)


def read_turn(text: str, form: CallFormat, tools: Mapping[str, Tool]) -> Turn:
    """Read a turn; calls within its reasoning are none."""
    reasoning, closed, content = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return Turn("", text.partition("<think>")[2].strip())
    reasoning = reasoning.partition("<think>")[2].strip() if "<think>" in reasoning else reasoning.strip()
    calls: list[Call | BrokenCall] = []
    for found in form.pattern.finditer(content):
        written = next(group for group in found.groups() if group is not None)
        try:
            calls.append(form.read(written, tools))
        except ValueError as error:
            calls.append(BrokenCall(found[0], str(error)))
    return Turn(form.pattern.sub("", content).strip() if calls else content.strip(), reasoning, tuple(calls))
