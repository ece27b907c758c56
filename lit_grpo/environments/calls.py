"""Tool calls in what a policy has written: formats as rows of a table.

A turn is never read halfway. What looks like a call and cannot be read whole, such as two functions of which only one
is closed, is a :class:`MalformedCall`, which the policy is told of and which no tool gets.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lit_grpo.environments.tools import Tool


class ToolCall(NamedTuple):
    """A tool call that could be parsed: the name of the tool, and its arguments."""

    name: str
    arguments: dict[str, Any]


class MalformedCall(NamedTuple):
    """A malformed tool call: its text, and why it cannot be parsed."""

    text: str
    why: str


class Turn(NamedTuple):
    """A parsed turn of the assistant: its text without calls, its reasoning, and its calls in order."""

    content: str
    reasoning: str = ""
    calls: Sequence[ToolCall | MalformedCall] = ()

    @property
    def message(self) -> dict[str, Any]:
        """As a message of a conversation; a broken call stays in its content."""
        broken = "".join(call.text for call in self.calls if isinstance(call, MalformedCall))
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
            if isinstance(call, ToolCall)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.content + broken}
        message |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        return message | ({"tool_calls": calls} if calls else {})


class CallFormat(NamedTuple):
    """A format of tool calls.

    Args:
        opening: Finds where a call begins.
        closing: The text that ends the call; without it a call goes on to the end of the turn.
        read: Reads the calls between the two, or raises a ValueError that says what is wrong.
        marks: Texts that stand in calls alone. One that is left over in a turn makes a broken call.
    """

    opening: re.Pattern[str]
    closing: str | None
    read: Callable[[str, Mapping[str, Tool]], list[ToolCall]]
    marks: Sequence[str]


# ---- what stands between the opening and the closing --------------------------------------------------


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of pairs."""
    named = dict(pairs)
    if len(named) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return named


_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_once)


def _decoded(text: str, place: int, what: str) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, place)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{what} no JSON ({error})") from None


def _json_calls(text: str, tools: Mapping[str, Tool], key: str = "arguments") -> list[ToolCall]:
    """Read JSON objects, one for each call, with nothing but white space or semicolons between them."""
    calls: list[ToolCall] = []
    place = len(text) - len(text.lstrip())
    while place < len(text) or not calls:
        said, place = _decoded(text, place, "it is")
        calls.append(_json_call(said, key))
        place += len(text[place:]) - len(text[place:].lstrip("; \t\r\n"))
    return calls


def _json_call(said: Any, key: str) -> ToolCall:
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        raise ValueError(f'it is not {{"name": NAME, "{key}": {{...}}}}')
    given = said.keys() - {"name", "id", "type"}
    if given - {key, "arguments"} or len(given) > 1:
        raise ValueError(f'it has {", ".join(map(repr, sorted(given)))} beside its name, and may have "{key}" alone')
    arguments = said[given.pop()] if given else {}
    if isinstance(arguments, str):
        written = arguments.strip()
        arguments, end = _decoded(written, 0, f"its {key} are")
        if written[end:]:
            raise ValueError(f"its {key} are no JSON ({written[end:][:40]!r} follows them)")
    if not isinstance(arguments, dict):
        raise ValueError(f"its {key} are {json.dumps(arguments)[:40]}, not an object")
    return ToolCall(said["name"], arguments)


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>\s*")
_PARAMETER = re.compile(
    # a value that holds such a tag may have swallowed what follows it
    r"<parameter=([^>\s]+)\s*>\n?((?:(?!</?(?:function|parameter|tool_call)\b).)*?)\n?</parameter>\s*",
    re.DOTALL,
)
_END_OF_FUNCTION = re.compile(r"</function>\s*")


def _xml_calls(text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
    """Read functions one after another, each of which is a call."""
    calls: list[ToolCall] = []
    place = 0
    while place < len(text) or not calls:
        found = _FUNCTION.match(text, place)
        schemas = tools[found[1]].parameters if found and found[1] in tools else {}
        values: list[tuple[str, Any]] = []
        place = found.end() if found else 0
        while found and (parameter := _PARAMETER.match(text, place)):
            values.append((parameter[1], _typed(parameter[2], schemas.get(parameter[1], {}))))
            place = parameter.end()
        end = _END_OF_FUNCTION.match(text, place)
        if not found or not end:
            raise ValueError("it is not <function=NAME><parameter=NAME>VALUE</parameter>...</function>")
        calls.append(ToolCall(found[1], _once(values)))
        place = end.end()
    return calls


_OF_PYTHON: Mapping[str, Any] = {"True": True, "False": False, "None": None}


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a JSON schema names, those of its alternatives among them."""
    named = schema.get("type", [])
    alternatives = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    own = {named} if isinstance(named, str) else {*named}
    return own.union(*map(_types, alternatives))


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """Return a text as its schema says; where it cannot be, as it is."""
    types = _types(schema)
    if not types or "string" in types:
        return value
    try:  # a template may write values as Python prints them
        return _OF_PYTHON[value] if value in _OF_PYTHON else json.loads(value)
    except (ValueError, RecursionError):
        return value


def _python_calls(text: str, tools: Mapping[str, Tool]) -> list[ToolCall]:
    """Read a list of Python's calls, such as ``[look(city="Paris", days=3)]``; nothing of it is run."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is no list of calls as Python writes them ({error})") from None
    calls: list[ToolCall] = []
    for each in tree.elts if isinstance(tree, ast.List) else ():
        if not isinstance(each, ast.Call) or not isinstance(each.func, ast.Name | ast.Attribute) or each.args:
            raise ValueError("it is not [NAME(NAME=VALUE, ...), ...]")
        values = [(argument.arg or "", _value(argument.value)) for argument in each.keywords]
        if "" in dict(values):
            raise ValueError("it is not [NAME(NAME=VALUE, ...), ...]")
        calls.append(ToolCall(ast.unparse(each.func), _once(values)))
    if not calls:
        raise ValueError("it is not [NAME(NAME=VALUE, ...), ...]")
    return calls


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id="true" | "false" | "null" as name):  # mappings are written as JSON
            return json.loads(name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return _once([(str(name), _value(value)) for name, value in zip(names, values, strict=True)])
        case _:
            pass
    raise ValueError(f"{ast.unparse(node)[:40]} is no plain value")


# ---- formats -------------------------------------------------------------------------------------------

_TAGGED = re.compile("<tool_call>")
_OBJECT = re.compile(r'\A\s*(?:<\|python_tag\|>)?\s*(?=\{.*\}\s*\Z|\{\s*"name")', re.DOTALL)
_LIST = re.compile(r"<\|tool_call_start\|>")
_TAGS = ("<tool_call>", "</tool_call>")
FORMATS: Mapping[str, CallFormat] = {
    "qwen": CallFormat(_TAGGED, "</tool_call>", _xml_calls, (*_TAGS, "<function=", "</function>")),
    "hermes": CallFormat(_TAGGED, "</tool_call>", _json_calls, _TAGS),
    "json": CallFormat(_OBJECT, None, _json_calls, ("<|python_tag|>", *_TAGS)),
    "llama": CallFormat(
        _OBJECT, None, functools.partial(_json_calls, key="parameters"), ("<|python_tag|>", "<function=")
    ),
    "python": CallFormat(_LIST, "<|tool_call_end|>", _python_calls, ("<|tool_call_start|>", "<|tool_call_end|>")),
}
"""``<tool_call>`` with XML (Qwen3-Coder, Qwen3.5, Nemotron 3) or JSON in it (Hermes, Qwen2.5, Qwen3), a bare JSON
object (Llama 3 with ``parameters``), or a list of calls as Python writes them (LFM2)."""


def _response_template(
    anchor: str, content: Mapping[str, str], reasoning: Mapping[str, str], calls: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a response template of transformers; ``anchor`` is a pattern of how an assistant's turn begins."""
    made = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    joined = {"repeats": True, "join": "\n"}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": anchor,
        "fields": {
            "reasoning_content": {**reasoning, **joined},
            "tool_calls": {"content": "json", "repeats": True, "transform": made, **calls},
            "content": {**content, **joined},
        },
    }


def _tagged(opening: str, closing: str, tag: str) -> dict[str, Any]:
    values = {"tag_pattern": tag, "value_parser": {"name": "text", "args": {"strip": False}}}
    return {"open_pattern": opening, "close_pattern": closing, "content": "xml-inline", "content_args": values}


_BAR = "\uff5c"  # of DeepSeek's tokens
_NAME = r"(?P<name>[\w.-]+)"
_THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*"}
RESPONSE_TEMPLATES: Mapping[str, Mapping[str, Any]] = {
    "gemma4": _response_template(
        r"<\|turn>model\n|<tool_response\|>",
        {"close_pattern": r"<turn\|>|<\|tool_response>"},
        {"open": "<|channel>thought\n", "close_pattern": r"<channel\|>\s*"},
        {
            "open_pattern": rf"<\|tool_call>call:{_NAME}",
            "close_pattern": r"<tool_call\|>\s*",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
        },
    ),
    "gpt_oss": _response_template(
        r"<\|start\|>assistant",
        {"open": "<|channel|>final<|message|>", "close_pattern": r"<\|return\|>|<\|end\|>"},
        {"open": "<|channel|>analysis<|message|>", "close_pattern": r"<\|end\|>"},
        {
            "open_pattern": (  # as the chat template writes it, or as the model does: the channel before the name
                rf"(?:<\|channel\|>\s*\w+)?\s*to=functions\.{_NAME}\s*(?:<\|channel\|>\s*\w+)?"
                r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>"
            ),
            "close_pattern": r"<\|call\|>",
        },
    ),
    "glm4": _response_template(
        r"<\|assistant\|>",
        {"close_pattern": r"<\|user\|>|<\|observation\|>"},
        _THOUGHT,
        _tagged(
            rf"<tool_call>\s*{_NAME}\s*(?=<arg_key>|</tool_call>)",
            r"</tool_call>\s*",
            r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>(?:(?!</?(?:arg_|tool_call)).)*)</arg_value>",
        ),
    ),
    "deepseek": _response_template(
        rf"<{_BAR}Assistant{_BAR}>",
        {"close_pattern": rf"<{_BAR}end▁of▁sentence{_BAR}>"},
        _THOUGHT,
        {
            "open_pattern": (
                rf"(?:<{_BAR}tool▁calls▁begin{_BAR}>)?\s*<{_BAR}tool▁call▁begin{_BAR}>function<{_BAR}tool▁sep{_BAR}>{_NAME}\s*```json"
            ),
            "close_pattern": rf"```\s*<{_BAR}tool▁call▁end{_BAR}>\s*(?:<{_BAR}tool▁calls▁end{_BAR}>)?",
        },
    ),
    "muse": _response_template(
        r"<\|start\|>assistant",
        {"open": " to=user<|message|>", "close_pattern": r"<\|eot\|>|<\|eom\|>"},
        {"open": " to=self<|message|>", "close_pattern": r"<\|eom\|>"},
        _tagged(
            rf'(?:<atem:function_calls>\s*)?<atem:invoke name="{_NAME}">',
            r"</atem:invoke>\s*(?:</atem:function_calls>)?",
            r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>(?:(?!</?atem:).)*)</atem:parameter>',
        ),
    ),
}
"""Families whose calls transformers reads, each in the form of a tokenizer's ``response_template``."""
CallFormatName = Literal["qwen", "hermes", "json", "llama", "python", "gemma4", "gpt_oss", "glm4", "deepseek", "muse"]


# ---- turns ---------------------------------------------------------------------------------------------

_THINK = re.compile("</?think>")
_NUM_ENDS = 16  # that are tried for one call: an argument may hold the text that ends calls


def read_turn(text: str, form: CallFormat, tools: Mapping[str, Tool], thinking: bool = False) -> Turn:
    """Read a turn; calls within its reasoning are none.

    Args:
        text: The turn, without the token that ends it.
        form: The format of tool calls.
        tools: Tools that may be called, by name; their schemas give arguments their types.
        thinking: Whether the text before the turn has opened its reasoning. If the turn never closes it, the turn is
            read as if reasoning had not been opened.
    """
    thinking = thinking and "</think>" in text
    said: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall | MalformedCall] = []
    rest = text
    while rest:
        if thinking:
            thought, _, rest = rest.partition("</think>")
            thoughts.append(thought)
            thinking = False
            continue
        begins = [found for found in (form.opening.search(rest), _THINK.search(rest)) if found]
        if not begins:
            said.append(rest)
            break
        found = min(begins, key=lambda each: each.start())
        said.append(rest[: found.start()])
        rest = rest[found.end() :]
        if found.re is form.opening:
            read, rest = _calls_of(found[0], rest, form, tools)
            calls += read
        elif found[0] == "<think>":
            thinking = True
        elif calls:
            said.append(found[0])
        else:  # the reasoning was begun before the turn
            thoughts, said = [*thoughts, *said], []
    content = "".join(said).strip()
    calls += _left_over(content, dict.fromkeys(form.marks, 0))
    return Turn(content, "\n".join(thought.strip() for thought in thoughts if thought.strip()), tuple(calls))


def _calls_of(
    opening: str, rest: str, form: CallFormat, tools: Mapping[str, Tool]
) -> tuple[list[ToolCall] | list[MalformedCall], str]:
    """Read what an opening begins; return the calls, all or none, and what follows them.

    A call ends at the first closing, or at the next opening, with which it can be read.
    """
    ends = [(len(rest), len(rest))]
    if form.closing is not None:
        either = re.finditer(f"{re.escape(form.closing)}|{form.opening.pattern}", rest)
        found = ((end.start(), end.end() if end[0] == form.closing else end.start()) for end in either)
        ends = [*itertools.islice(found, _NUM_ENDS), *ends]
    errors: list[ValueError] = []
    for start, end in ends:
        try:
            return form.read(rest[:start], tools), rest[end:]
        except ValueError as error:
            errors.append(error)
    return [MalformedCall(opening + rest[: ends[0][1]], str(errors[0]))], rest[ends[0][1] :]


def _left_over(text: str, marks: Mapping[str, int]) -> list[MalformedCall]:
    found = next((mark for mark, most in marks.items() if text.count(mark) > most), None)
    return [] if found is None else [MalformedCall("", f"{found} stands where no call can be read")]


def read_response(parser: Any, template: Mapping[str, Any], text: str, marks: Mapping[str, int]) -> Turn:
    """Read a turn with a response template of transformers.

    The parser of transformers takes a call that is cut, or two that are run together, for one with the arguments that
    it finds. So what it leaves out of a call makes that a broken one.

    Args:
        parser: The parser that a tokenizer's ``get_response_parser`` returns; it has read the text before the turn.
        template: The response template that the parser follows.
        text: The text of the turn.
        marks: Texts that stand in calls alone, with how often they do in one call.
    """
    try:
        events = parser.feed(text)
        events += parser.finalize()[1]
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        return Turn("", "", (MalformedCall(text, " ".join(str(error).split())[:200]),))
    values: dict[str, list[Any]] = {}
    calls: list[ToolCall | MalformedCall] = []
    body = ""
    for event in events:
        name = event["field"]
        body = "" if event["type"] == "region_open" else body + event.get("text", "")
        if event["type"] == "region_close" and name == "tool_calls":
            found = event["value"] if isinstance(event["value"], list) else [event["value"]]
            calls += [_call_of(each, body, template["fields"][name], marks) for each in found]
        elif event["type"] == "region_close":
            values.setdefault(name, []).append(str(event["value"]).strip())
    thoughts = [each for name in ("reasoning_content", "thinking", "reasoning") for each in values.get(name, ())]
    shown = text
    for thought in thoughts:
        shown = shown.replace(thought, "", 1)
    if all(isinstance(call, ToolCall) for call in calls):
        calls += _left_over(shown, {mark: count * len(calls) for mark, count in marks.items()})
    return Turn("\n".join(values.get("content", ())), "\n".join(thoughts), tuple(calls))


def _call_of(said: Any, body: str, field: Mapping[str, Any], marks: Iterable[str]) -> ToolCall | MalformedCall:
    """Return a call that a response template has found in a text; a broken one if more is written there."""
    function = said.get("function", said) if isinstance(said, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments")
    content, options = field.get("content", "text"), field.get("content_args", {})
    try:
        if isinstance(arguments, str) or (content == "json" and not options):
            value, end = _decoded(body.strip(), 0, "it is")  # which refuses a name that comes twice
            arguments = value if isinstance(arguments, str) and not body.strip()[end:] else arguments
        if content == "json" and options.get("unquoted_keys"):
            _check_names(body, options.get("string_delims", ()), arguments)
        if content == "xml-inline" and not options.get("merge_duplicates"):
            _check_tags(body, options["tag_pattern"], marks)
    except ValueError as error:
        return MalformedCall(body, str(error))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return MalformedCall(body, "it has no name, or arguments that are no object")
    return ToolCall(name, arguments)


def _check_names(body: str, delimiters: Sequence[Sequence[str]], arguments: Any) -> None:
    """Check that arguments have each name that is written."""
    for opening, closing in delimiters:
        body = re.sub(f"{re.escape(opening)}.*?{re.escape(closing)}", "", body, flags=re.DOTALL)
    if len(re.findall(r"[{,]\s*\w+\s*:", body)) > _num_names(arguments):
        raise ValueError("a name is given twice")


def _num_names(value: Any) -> int:
    if isinstance(value, Mapping):
        return len(value) + sum(map(_num_names, value.values()))
    return sum(map(_num_names, value)) if isinstance(value, list) else 0


def _check_tags(body: str, pattern: str, marks: Iterable[str]) -> None:
    """Check that a call is tags alone, each with another name, and none with another tag or a mark in its value."""
    import regex  # whose patterns those of transformers are

    found = list(regex.finditer(pattern, body, flags=regex.DOTALL))
    _once([(each["key"], None) for each in found])
    opening = pattern.partition("(?P<key>")[0]
    rest = regex.sub(r"</[^<>]*>", "", regex.sub(pattern, "", body, flags=regex.DOTALL)).strip()
    others = "|".join([*map(re.escape, marks), *([opening] if opening else [])])
    if others and not rest:
        rest = next((each["value"] for each in found if regex.search(others, each["value"] or "")), "")
    if rest:
        raise ValueError(f"{rest[:60]!r} stands in it beside its arguments")
