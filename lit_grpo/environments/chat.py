"""Tokens in, tokens out: what follows a turn is rendered by itself, and the tokens of turns never again."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_grpo.data.chat import Message, UnusableRow, apply_template, read_message, render_chat
from lit_grpo.data.control import ControlTokens
from lit_grpo.data.parts import PartTokens, num_common
from lit_grpo.data.rendering import with_added
from lit_grpo.environments.calls import (
    FORMATS,
    RESPONSE_TEMPLATES,
    CallFormat,
    ToolCall,
    Turn,
    read_response,
    read_turn,
)
from lit_grpo.environments.tools import Tool
from lit_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_grpo.policy.architecture.vision import Vision
    from lit_grpo.types import Pictures

_MARK = "MARKOFATURN"
_SHOWN = "ANANSWER"
_ASKED: Message = {"role": "user", "content": "Go on."}
_SAID: Message = {"role": "user", "content": _SHOWN}
_TOLD: Message = {"role": "tool", "name": "f", "content": _SHOWN}
_THOUGHT = "<think>\nA thought.\n</think>\n\n"
_MADE_UP: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}, "text": {"type": "string"}}},
    },
}
_VALUES: Mapping[str, Any] = {"string": _MARK, "integer": 7, "number": 0.5, "boolean": True, "array": [], "object": {}}
_CHARACTERS = 8  # of a text that are looked at for each token that may stay: a long token more or less is no matter
_THINKING = re.compile(r"<think>\s*\Z")
_TAG = re.compile(r"</?[A-Za-z][\w:]*[ =>]|to=functions\.")
_NUM_OF_PROMPT = 8  # last tokens before a turn, in which its reasoning may have been begun
OWN = "response_template"
CUT = "\n... {} characters are left out here ...\n"


class _Following(NamedTuple):
    """The tokens that follow a turn, counted from the first control token after the turn's text.

    Args:
        head: The tokens before the answer; a turn may end with any control token among them.
        end: The place of the one that ends the turn; all from there on follow a turn that did not end with one of them.
        last: Tokens that end the last turn of a conversation in place of the first of them, as GPT-OSS has it.
    """

    head: tuple[int, ...]
    end: int
    last: frozenset[int] = frozenset()


Content = str | list[dict[str, Any]]
"""A text, or parts of a message that are texts and images, each image as its file."""


class Chat:
    """A tokenizer's chat template, for conversations that are extended turn by turn.

    New messages are rendered after a short made-up conversation, of which everything up to the end of its assistant's
    turn is cut off. So the tokens of a conversation are those that were sampled and those that each answer adds,
    whatever the template would make of earlier turns now. What answers spell is encoded as plain characters, never as
    a control token (:mod:`lit_grpo.data.control`).

    Args:
        tokenizer: Tokenizer of the policy, whose chat template renders the messages.
        options: Variables of its chat template.
        form: Format of tool calls, a name of :data:`lit_grpo.environments.calls.FORMATS` or
            :data:`lit_grpo.environments.calls.RESPONSE_TEMPLATES`. By default the tokenizer's ``response_template``,
            else the first format that parses a sample call rendered by the chat template.
        plain_rows: Whether rows are encoded as plain characters too.
        vision: What reads images, if the policy sees them.

    Attributes:
        form: Format with which calls are parsed; ``response_template`` for the tokenizer's own, None if no format
            parses the sample call.
        shows_images: Whether tools and environments may return images.

    Raises:
        ValueError: There is no chat template, or one that does not end turns with a token of their own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any] | None = None,
        form: str | None = None,
        plain_rows: bool = False,
        vision: Vision | None = None,
    ) -> None:
        if tokenizer.chat_template is None:
            raise ValueError(
                "Environments need a chat template, but the policy's tokenizer has none; choose a chat model."
            )
        self.tokenizer, self.options, self.plain_rows = tokenizer, dict(options or {}), plain_rows
        self.vision, self.shows_images = vision, vision is not None
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ValueError(
                "The policy's tokenizer is no fast tokenizer (of the library tokenizers), so text of tools could "
                "become control tokens; choose a policy with a fast tokenizer."
            )
        self._control = ControlTokens.of(tokenizer)
        self._checked: set[str] = set()  # tools, as JSON
        self._checks = threading.Lock()  # agents' tools are checked in threads
        self._marks: dict[str, int] = {}  # texts that stand in calls alone, with how often they do in each
        self._arguments: Any = {}  # of a made-up call
        self._content: str | None = ""
        self._ends = {end for end in (tokenizer.eos_token_id, tokenizer.pad_token_id) if isinstance(end, int)}
        self._after_text = self._following_of_text()
        self._after_call: _Following | None = None
        own = [OWN] if getattr(tokenizer, OWN, None) is not None else [*FORMATS, *RESPONSE_TEMPLATES]
        self._forms = [form] if form else own
        self._written = ""  # a call, as the template writes it
        self.form = self._form_of(_MADE_UP)

    @cached_property
    def longest_token(self) -> int:
        """The number of characters of the longest token: no token stands for more of a text."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    # ---- what policies write --------------------------------------------------------------------------

    def read(self, token_ids: Sequence[int], before: Sequence[int], tools: Mapping[str, Tool]) -> Turn:
        """Parse a sampled turn.

        Args:
            token_ids: Token ids of the turn.
            before: The tokens before it, which may have begun its reasoning.
            tools: Tools that may be called, by name.
        """
        form = self.form or self._forms[0]
        decode = self.tokenizer.decode
        if form in FORMATS:
            kept = list(token_ids)
            while kept and kept[-1] in self._ends:
                kept.pop()
            start = str(decode(list(before[-_NUM_OF_PROMPT:]), skip_special_tokens=False))
            return self._read(str(decode(kept, skip_special_tokens=False)), start, tools, form)
        text, start = (str(decode(list(ids), skip_special_tokens=False)) for ids in (token_ids, before))
        return self._read(text, start, tools, form)

    def _read(self, text: str, before: str, tools: Mapping[str, Tool], form: str) -> Turn:
        if form in FORMATS:
            return read_turn(text, FORMATS[form], tools, thinking=_THINKING.search(before) is not None)
        template = self._template(form)
        schemas: list[Any] = [dict(tool.schema) for tool in tools.values()]
        before = before if "</think>" in text else _THINKING.sub("", before)  # reasoning that the turn never ends
        parser = self.tokenizer.get_response_parser(template, prefix=before, tools=schemas)
        return read_response(parser, template, text, self._marks)

    def _template(self, form: str) -> Any:
        return getattr(self.tokenizer, OWN) if form == OWN else RESPONSE_TEMPLATES[form]

    # ---- what they read ------------------------------------------------------------------------------

    def cover(self, message: Message) -> Message:
        """Return a message of which no text becomes a control token; what the policy has said stays as it is.

        Content in parts becomes a text, in which :data:`lit_grpo.data.chat.IMAGE` stands for each image.
        """
        message = read_message(message, []) if isinstance(message["content"], list) else message
        return self._control.cover_message(message)

    def conversation(self, prompt: Prompt, added: Content = "", more: Sequence[Message] = ()) -> list[Message]:
        """Return a row's conversation and what follows it, for :meth:`beginning`.

        Args:
            prompt: The prompt; control tokens in its row are encoded as plain characters only with ``plain_rows``.
            added: What an environment says, at the end of the last user message.
            more: Messages after the prompt.

        Raises:
            UnusableRow: There is no user message to which the text could be added.
        """
        begins: list[Message] = list(prompt.messages or [{"role": "user", "content": ""}])
        if prompt.pictures is not None:
            begins = [read_message(message, []) for message in begins]
        begins = [*map(self.cover, begins)] if self.plain_rows else begins
        begins = with_added(begins, self.cover({"role": "user", "content": added})["content"]) if added else begins
        return [*begins, *map(self.cover, more)]

    def opening(self, prompt: Prompt, text: Content, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens that follow a prompt whose last user message ends in ``text``, for :meth:`shown`."""
        try:
            added = self.beginning(prompt, self.conversation(prompt, text), tools)
        except UnusableRow as error:
            raise ValueError(f"The text that reset returned for prompt {prompt.prompt_id} {error}.") from None
        if added is None:
            raise ValueError(
                f"The text that reset returned for prompt {prompt.prompt_id} changes the tokens before it; let the "
                "row's prompt end in a line break."
            )
        return added

    def beginning(
        self, prompt: Prompt, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[int] | None:
        """Return the tokens of a whole conversation after its prompt's; None if it does not begin with those.

        They are for :meth:`shown`.
        """
        token_ids, num = self._control.encode(self._rendered(messages, tools)), len(prompt.token_ids)
        if prompt.pictures is not None:
            assert self.vision is not None
            places = [place for place, token in enumerate(token_ids) if token == self.vision.placeholder]
            own = prompt.pictures.images
            end = places[len(own)] if len(places) > len(own) else len(token_ids)
            begins, _ = self.vision.read(token_ids[:end], own)
            token_ids = begins + token_ids[end:]
        return token_ids[num:] if tuple(token_ids[:num]) == prompt.token_ids else None

    def shown(self, token_ids: list[int], observed: Sequence[Content]) -> tuple[list[int], Pictures | None]:
        """Return tokens of what was observed with those of its images in place of one each, and these.

        Raises:
            UnusableRow: The chat template does not show as many images as there are, or ends in one.
        """
        images = [part["image"] for each in observed if isinstance(each, list) for part in each if "image" in part]
        if self.vision is None or not (images or self.vision.placeholder in token_ids):
            return token_ids, None
        try:
            expanded, pictures = self.vision.read(token_ids, images)
        except ValueError as error:
            raise UnusableRow(f"has images that cannot be shown: {error}") from None
        if token_ids[-1] == self.vision.placeholder:
            raise UnusableRow("ends in an image, after which the chat template begins no turn")
        return expanded, pictures

    def text_of(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of a conversation that the policy answers."""
        return self._control.uncover(self._rendered(messages, tools))

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        return render_chat(messages, self.tokenizer, self.options | ({"tools": list(tools)} if tools else {}))

    def following(self, messages: Sequence[Message], last: int) -> list[int]:
        """Return the tokens between a turn and the next one: messages of tools or the user, and the next one's start.

        They are for :meth:`shown`.

        Args:
            messages: The messages to add, at least one.
            last: The last token of the turn. Where it is not one that ends turns, such a one comes first.

        Raises:
            ValueError: The chat template cannot show them.
        """
        first = messages[0]
        after = self._after_call if first["role"] == "tool" else None
        before = self._said() if after is None else self._called(first["name"])
        after = after or self._after_text
        try:
            text = self._text([*before, *map(self.cover, messages)], {"add_generation_prompt": True})
        except UnusableRow as error:
            raise ValueError(f"A conversation with an answer to a turn {error}.") from None
        token_ids = self._control.encode(self._after_mark(text))
        if last in after.head and last in self._control.ids.values():
            return token_ids[after.head.index(last) + 1 :]
        return token_ids[1 if last in after.last else after.end :]

    def shorten(self, text: str, most: int) -> tuple[str, bool]:
        """Cut the middle out of a text of more than ``most`` tokens and say so in it; return whether it was cut."""
        reach = _CHARACTERS * most
        is_long = len(text) > 2 * reach
        first = PartTokens(self.tokenizer, self._control.cover(text[:reach] if is_long else text))
        if not is_long and len(first.ids) <= most:
            return text, False
        last = PartTokens(self.tokenizer, self._control.cover(text[-reach:])) if is_long else first
        head, tail = first.head(most // 2)[1], last.tail(most - most // 2)
        return CUT.format(len(text) - len(head) - len(tail)).join([head, tail]), True

    # ---- before anything is sampled --------------------------------------------------------------------

    def check(
        self, schemas: Sequence[Mapping[str, Any]], calls: bool, responds: bool, rewrites: bool = False
    ) -> list[str]:
        """Test the chat template on turns with and without reasoning; return warnings for the user.

        Args:
            schemas: Schemas of the tools.
            calls: Whether turns may call tools.
            responds: Whether the user may answer.
            rewrites: Whether each turn is sampled after the conversation as the template writes it then.

        Raises:
            ValueError: A call cannot be read back, or the chat template refuses an answer, or does not show it.
        """
        told: list[str] = []
        answers: list[tuple[str, Message]] = []
        if calls:
            told += self._check_calls(schemas)
            answers.append(("a tool's answer", _TOLD))
            if self._text([_ASKED], {"tools": list(schemas)}) == self._text([_ASKED]):
                told.append(
                    "The chat template shows no tools, so the policy does not see them; describe them in "
                    "data.system_prompt, unless the policy knows them."
                )
        if responds:
            answers.append(("a user's answer", _SAID))
        changed: list[str] = []
        for what, answer in answers:
            for thought in (False, True):
                is_call = answer["role"] == "tool" and self._after_call is not None
                before = self._called("f", thought) if is_call else self._said(thought)
                if (refusal := self._refusal(before, answer)) is not None:
                    raise ValueError(f"The chat template cannot show {what}: the conversation {refusal}.")
                if _SHOWN not in self._text([*before, answer]):
                    raise ValueError(
                        f"The chat template does not show {what}; choose a model whose template does, or set a "
                        "chat_template of its tokenizer."
                    )
                if not self._extends(before, answer):
                    changed.append(f"{what}{' to a turn with reasoning' * thought}")
        differs = f"The chat template writes earlier turns differently after {' and '.join(changed)}"
        if rewrites and changed:
            told.append(
                f"{differs}; with history rerendered each turn is sampled after the conversation as it is written "
                "then, and is a row of its own in the update."
            )
        elif rewrites:
            told.append(
                "With history rerendered each turn is a row of its own in the update; the chat template only adds to "
                "conversations, so that history appended does the same in one row."
            )
        elif changed:
            told.append(
                f"{differs}; in training they stay as they were sampled, including reasoning. A server of the trained "
                "policy has to keep them too."
            )
        return told

    def check_once(self, schemas: Sequence[Mapping[str, Any]]) -> list[str]:
        """Run :meth:`check` for tools that are known only later, once for each set of tools."""
        written = json.dumps(schemas, sort_keys=True)
        with self._checks:
            if written in self._checked:
                return []
            told = self.check(schemas, calls=bool(schemas), responds=False)
            self._checked.add(written)
            return told

    def check_ends(self, eos_ids: Sequence[int]) -> list[str]:
        """Return warnings for the user about the tokens at which the policy stops."""
        after = self._after_call
        if after is None or {*after.head} & {*eos_ids}:
            return []
        end = after.head[after.end]
        return [
            f"The chat template ends a tool call with {self.tokenizer.convert_ids_to_tokens(end)!r}, but the policy "
            f"stops only at {self.tokenizer.convert_ids_to_tokens(list(eos_ids))}, so it may continue without the "
            f"tool's answer; add {end} to eos_token_id of its generation_config."
        ]

    def _check_calls(self, schemas: Sequence[Mapping[str, Any]]) -> list[str]:
        """Check that tool calls can be parsed; return warnings for the user."""
        for schema in schemas:  # a template may be made for these tools alone
            self.form = self.form or self._form_of(schema)
        if self.form:
            return []
        names = ", ".join([*FORMATS, *RESPONSE_TEMPLATES])
        is_set = len(self._forms) == 1 and self._forms != [OWN]
        if self._written and is_set:
            return [
                f"The chat template renders a call as {self._written[:160]!r}, which is not the format "
                f"{self._forms[0]}: calls that the policy writes in the template's format are not made."
            ]
        if self._written:
            own = "which the tokenizer's response_template cannot parse"
            reads = own if self._forms == [OWN] else f"which is in none of the formats {names}"
            raise ValueError(
                f"The chat template renders a call as {self._written[:160]!r}, {reads}, so that no tool would ever "
                "run; give the tokenizer a response_template that parses such calls, or choose another policy."
            )
        if not is_set:
            raise ValueError(
                "The chat template does not show tool calls, so that their format cannot be detected; set calls to the "
                f"format that the policy writes ({names}), or choose another policy."
            )
        return []

    # ---- what the template makes of a made-up conversation ------------------------------------------------

    def _form_of(self, schema: Mapping[str, Any]) -> str | None:
        """Have the template write a call of a tool, and read it; return the form that reads it.

        Templates differ in what they take: arguments as a dict or as JSON text, content as an empty text or as null.
        """
        tool = Tool(schema["function"]["name"], lambda **_: None, schema)
        given = {name: _VALUES.get(str(each.get("type")), _MARK) for name, each in tool.parameters.items()}
        asked = self._text([_ASKED], {"add_generation_prompt": True})
        for arguments, content in itertools.product((given, json.dumps(given)), ("", None)):
            self._arguments, self._content = arguments, content
            turn = self._called(tool.name)
            alone = "" if self._refusal(turn) else self._text(turn)
            if _MARK not in alone:
                continue
            start = num_common(alone, asked)
            tokens = self._control.pattern.finditer(alone)  # none of which is cut
            start = next((token.start() for token in tokens if token.start() < start < token.end()), start)
            self._written = self._written or alone[start:]
            for form in self._forms:
                if self._reads(alone[start:], alone[:start], form, {tool.name: tool}, given):
                    self._marks = self._marks_of_calls(alone[start:])
                    self._after_call = self._following_of_call(turn, {**_TOLD, "name": tool.name}, form)
                    return form
        self._arguments, self._content = {}, ""
        return None

    def _reads(self, text: str, before: str, form: str, tools: Mapping[str, Tool], given: Mapping[str, Any]) -> bool:
        text = text.rstrip()
        ends = [token for token, number in self._control.ids.items() if number in self._ends]
        while form in FORMATS and (ended := next(filter(text.endswith, ends), None)):
            text = text.removesuffix(ended).rstrip()
        try:
            turn = self._read(text, before, tools, form)
        except (AttributeError, ValueError):  # of a response template that is none
            return False
        return not turn.content and list(turn.calls) == [ToolCall(next(iter(tools)), dict(given))]

    def _marks_of_calls(self, written: str) -> dict[str, int]:
        """Return tokens and tags that stand in each call equally often, and in no other turn, with their number."""
        given, self._arguments = self._arguments, "{}" if isinstance(self._arguments, str) else {}
        empty = "" if self._refusal(self._called("f")) else self._text(self._called("f"))
        self._arguments = given
        said = self._text(self._said())
        counts = {mark: written.count(mark) for mark in (*self._control.ids, *_TAG.findall(written))}
        return {mark: num for mark, num in counts.items() if 0 < num == empty.count(mark) and mark not in said}

    def _following_of_text(self) -> _Following:
        try:
            alone = self._text(self._said())
        except UnusableRow as error:
            raise ValueError(f"A conversation of two turns {error}.") from None
        longer = "" if self._refusal(self._said(), _SAID) else self._text([*self._said(), _SAID])
        tails = [self._control.encode(self._after_mark(text)) for text in (alone, longer)]
        if _MARK not in alone or not any(tails):
            raise ValueError(
                "The chat template ends an assistant's turn with no special token, so that it cannot be told where a "
                "turn is over; choose a model whose template does."
            )
        known = {*self._control.ids.values()}
        last = [*itertools.takewhile(known.__contains__, tails[0])]
        self._ends |= {*last, *tails[1][:1]}
        head = self._head(longer) or tuple(tails[0])
        return _Following(head, 0, frozenset(last) - {*head})

    def _following_of_call(self, turn: Sequence[Message], answer: Message, form: str) -> _Following | None:
        """Find the beginning of the text after a tool call; None if the template does not show the answer.

        The end of the turn is what ends other turns too, else the last token that the call has without an answer,
        such as Gemma's ``<|tool_response>``. Where that belongs to the call, the turn has no end of its own, as GLM's.
        """
        head = () if self._refusal(turn, answer) else self._head(self._text([*turn, answer]))
        if not head:
            return None
        alone = self._control.encode(self._after_mark(self._text(turn)))
        known = {number: token for token, number in self._control.ids.items()}
        last = max((place for place, token in enumerate(head[: num_common(head, alone)]) if token in known), default=0)
        last += _ends_calls(self._template(form) if form not in FORMATS else FORMATS[form], known[head[last]])
        end = next((place for place, token in enumerate(head) if token in self._ends), last)
        return _Following(head, end)

    def _head(self, text: str) -> tuple[int, ...]:
        """Return the tokens between a made-up turn and the answer to it; none where that is not shown."""
        after = self._after_mark(text)
        return tuple(self._control.encode(after.partition(_SHOWN)[0])) if _SHOWN in after else ()

    def _extends(self, before: Sequence[Message], answer: Message) -> bool:
        start, _, _ = self._text(before).partition(_MARK)
        return self._text([*before, answer]).startswith(start + _MARK)

    def _refusal(self, messages: Sequence[Message], *more: Message) -> str | None:
        """Return why the template does not accept messages; None if it does."""
        try:
            self._text([*messages, *more])
        except UnusableRow as error:
            return str(error)
        return None

    def _said(self, thought: bool = False) -> list[Message]:
        return [_ASKED, {"role": "assistant", "content": _THOUGHT * thought + _MARK}]

    def _called(self, name: str, thought: bool = False) -> list[Message]:
        call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": self._arguments}}
        content = _THOUGHT if thought else self._content
        return [_ASKED, {"role": "assistant", "content": content, "tool_calls": [call]}]

    def _after_mark(self, text: str) -> str:
        """Return a conversation from the first control token after the made-up turn on."""
        place = text.find(_MARK)
        found = self._control.pattern.search(text, max(place, 0))
        return text[found.start() :] if found and place >= 0 else ""

    def _text(self, messages: Sequence[Message], options: Mapping[str, Any] | None = None) -> str:
        return str(apply_template(messages, self.tokenizer, {**self.options, **(options or {}), "tokenize": False}))


def _ends_calls(form: CallFormat | Mapping[str, Any], token: str) -> bool:
    if isinstance(form, CallFormat):
        return form.closing == token
    field = form["fields"].get("tool_calls", {})
    return token in str(field.get("close") or field.get("close_pattern")).replace("\\", "")
