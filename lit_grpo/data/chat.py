"""Conversations: which ones can be prompts, and how the tokenizer's chat template turns them into token ids.

Content in several parts of text becomes one text. The history may hold tool calls and the tools' answers, in the form
of transformers' chat templates: ``{"role": "assistant", "content": None, "tool_calls": [...]}``.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.process.terminal import warn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
IMAGE = f"\ufffcimage {secrets.token_hex(8)}\ufffc"
"""Stands for an image in the text of a message; chat templates get a part of type ``image`` in its place.

No text can spell it.
"""

NO_MESSAGE = 'has a chat message that is not {"role": text, "content": text}'
LIMIT_S = 20.0
"""Seconds that a chat template may take for one conversation; it usually takes milliseconds."""
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class UnusableRow(Exception):
    """A row that cannot be a prompt; the message gives the reason and continues a sentence such as "row 7"."""


class EndlessTemplate(Exception):
    """A chat template that does not end; the message continues a sentence such as "row 7"."""

    def __init__(self) -> None:
        super().__init__(
            f"keeps the tokenizer's chat template busy for more than {LIMIT_S:g} s, as one does that loops for ever"
        )


def read_message(message: Any, images: list[Any] | None = None) -> Message:
    """Return a message of a row with its content as one text, without the fields that are None.

    The content of an assistant's tool call stays None.

    Args:
        message: Message of the row.
        images: Receives what each part of type ``image`` holds, None if that is nothing; in the text :data:`IMAGE`
            stands for it. Without it such parts are refused.

    Raises:
        UnusableRow: The message has no text.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UnusableRow(NO_MESSAGE)
    filled = {name: value for name, value in message.items() if value is not None}
    content, calls = filled.get("content"), filled.get("tool_calls")
    if "tool_calls" in filled and not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise UnusableRow('has a tool call that is not {"function": {"name": text, "arguments": dict or JSON text}}')
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        return filled | {"content": "".join(_text_of(part, images) for part in content)}
    if content is None and filled["role"] == "assistant" and calls:
        return filled | {"content": None}
    if not isinstance(content, str):
        raise UnusableRow(NO_MESSAGE)
    return filled


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def render_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any],
    is_closed: bool = False,
) -> str:
    """Return what the chat template makes of a conversation.

    If the conversation ends in an assistant's message, the policy continues that message; else it answers. If it
    ``is_closed``, its last message is complete, and nobody answers.

    Raises:
        UnusableRow: The chat template refuses the conversation, or fails.
        EndlessTemplate: The chat template has not ended within ``LIMIT_S``.
        ValueError: The tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "The prompts ask for a chat template, and the tokenizer of data.policy has none; "
            "choose a chat model, or give plain text without data.system_prompt and data.chat_template."
        )
    continues = messages[-1]["role"] == "assistant" and not is_closed
    if continues and messages[-1]["content"] is None:
        raise UnusableRow("ends in a tool call, which cannot be continued; add the tool's answer, or take the call out")
    options = {**options, "add_generation_prompt": not (continues or is_closed), "continue_final_message": continues}
    with _limited(LIMIT_S):
        if any("tool_calls" in message for message in messages):
            messages = _in_accepted_form(messages, tokenizer, options)
        return str(apply_template(messages, tokenizer, {**options, "tokenize": False}))


def apply_template(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> Any:
    """Return what the chat template makes of messages, as the options of ``apply_chat_template`` say.

    Raises:
        UnusableRow: The chat template refuses the conversation, or fails.
    """
    import jinja2

    try:
        return tokenizer.apply_chat_template([*map(in_parts, messages)], **options)
    except (jinja2.TemplateError, *_FAULTS) as error:
        complaint = " ".join(str(error).split())[:300]
        if type(error) is jinja2.TemplateError:  # what a template's raise_exception raises
            raise UnusableRow(f"is refused by the chat template: {complaint}") from error
        raise UnusableRow(
            f"makes the tokenizer's chat template fail ({type(error).__name__}: {complaint}); give messages that it "
            "takes, or mend the template"
        ) from error


def in_parts(message: Message) -> Message:
    """Return a message whose content has images in parts, as chat templates and reward functions expect them."""
    content = message.get("content")
    if not isinstance(content, str) or IMAGE not in content:
        return message
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return message | {"content": parts}


def without_files(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose parts of type ``image`` hold nothing, for what reads texts alone."""
    return [
        message | {"content": [{"type": "image"} if part["type"] == "image" else part for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def _in_accepted_form(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> Sequence[Message]:
    """Return a conversation with tool calls in the form that the template accepts.

    Templates differ in two points. Most expect arguments as a dict, some as JSON text; most expect a call's content to
    be null, some an empty text. In a wrong form a template fails, or writes a value as Python prints it, such as
    ``None``.

    Raises:
        UnusableRow: The template accepts no form.
    """
    shown: dict[tuple[bool, str | None], str] = {}
    faults: list[UnusableRow] = []
    forms = {
        (as_text, blank): [_in_form(message, as_text, blank) for message in messages]
        for as_text, blank in itertools.product((False, True), (None, ""))
    }
    for form, conversation in forms.items():
        try:
            shown[form] = apply_template(conversation, tokenizer, {**options, "tokenize": False})
        except UnusableRow as fault:
            faults.append(fault)
    if not shown:
        raise faults[0]
    of_python = [repr(arguments) for arguments in _arguments(forms[False, ""]) if arguments]
    clean = {
        (as_text, blank): text
        for (as_text, blank), text in shown.items()
        if text.count("None") <= shown.get((as_text, ""), text).count("None")
        and not any(arguments in text for arguments in of_python)
    }
    if not clean:
        raise UnusableRow("has tool calls that the tokenizer's chat template writes as Python does; mend the template")
    for form, text in clean.items():
        if _shows_calls(text, forms[form], tokenizer, options):
            return forms[form]
    rank_zero_only(warn)(
        "Prompts have earlier tool calls, and the tokenizer's chat template does not show them, so that the policy "
        "never sees them; choose a model whose template does, or write the calls into the messages' content."
    )
    return forms[next(iter(clean))]


def _shows_calls(
    text: str, messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> bool:
    """Return whether a conversation, whose rendering is ``text``, is rendered differently without its tool calls."""
    without = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
    try:
        return bool(apply_template(without, tokenizer, {**options, "tokenize": False}) != text)
    except UnusableRow:
        return True


def _text_of(part: Message, images: list[Any] | None) -> str:
    kind = part.get("type")
    if kind == "image" and images is not None:
        images.append(next((part[name] for name in ("image", "path", "bytes") if part.get(name) is not None), None))
        if part.get("url") is not None:
            raise UnusableRow("names an image by its URL, and nothing is downloaded; give a file or its bytes")
        return IMAGE
    if kind != "text" and isinstance(kind, str):
        remedy = "set data.image_column, or take it out" if kind == "image" else "take it out"
        raise UnusableRow(f"has a chat message with a part of type {kind!r}, and a prompt is text alone; {remedy}")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise UnusableRow('has a part of a chat message that is not {"type": "text", "text": text}')
    return part["text"]


def _in_form(message: Message, as_text: bool, blank: str | None) -> Message:
    """Return a message in one form: arguments of its tool calls as JSON text or as a dict, and ``blank`` as content."""
    if "tool_calls" not in message:
        return message
    calls: list[Message] = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        written = {**function, "arguments": _arguments_as(function.get("arguments"), as_text)}
        calls.append({**call, "function": written} if "function" in call else written)
    content = message.get("content")
    return message | {"content": blank if content is None else content, "tool_calls": calls}


def _arguments_as(arguments: Any, as_text: bool) -> Any:
    if as_text:
        return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments  # a policy may have written text that is no JSON


def _arguments(messages: Sequence[Message]) -> Iterator[Any]:
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = call.get("function", call)["arguments"]
            if isinstance(arguments, dict | list):
                yield arguments


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise ``EndlessTemplate`` in this thread if the code within takes longer.

    A template runs as Python code, which only an exception can end. A signal would reach the main thread only.
    """
    thread, lock, over = threading.get_ident(), threading.Lock(), False

    def end() -> None:
        with lock:
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(EndlessTemplate))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            over = True
