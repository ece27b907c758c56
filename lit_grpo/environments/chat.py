"""Tokens in, tokens out: what follows a turn is rendered by itself, and the tokens of turns never again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lit_grpo.data.chat import Message, UnusableRow, apply_template, encode_chat
from lit_grpo.data.rendering import with_added
from lit_grpo.environments.calls import FORMATS, BrokenCall, Call, Turn, format_of, read_turn
from lit_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_grpo.environments.tools import Tool

_MARK = "MARKOFATURN"
_SHOWN = "ANANSWER"
_ASKED: Message = {"role": "user", "content": "Go on."}
_CHARACTERS = 8  # of a text that are looked at for each token that may stay: a long token more or less is no matter
CUT = "\n... {} characters are left out here ...\n"


class Chat:
    """A tokenizer's chat template, for conversations that go on.

    New messages are rendered after a short made-up conversation, of which everything up to the end of its assistant's
    turn is cut off. So the tokens of a conversation are those that were sampled and those that each answer adds,
    whatever the template would make of earlier turns now.

    Args:
        tokenizer: The policy's.
        options: Variables of its chat template.
        form: How calls are written, a name of :data:`lit_grpo.environments.calls.FORMATS`; by default what the
            template says, and the tokenizer's ``response_template`` where it has one.

    Raises:
        ValueError: There is no chat template, or one that does not end turns with a token of their own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any] | None = None,
        form: str | None = None,
    ) -> None:
        if tokenizer.chat_template is None:
            raise ValueError("The policy's tokenizer has no chat template, which turns need; choose a chat model.")
        self.tokenizer, self.options = tokenizer, dict(options or {})
        template = tokenizer.chat_template
        written = template if isinstance(template, str) else "".join(template.values())
        self.form = form or format_of(written)
        self._answers_by_template = form is None and getattr(tokenizer, "response_template", None) is not None
        self._end = self._end_of_turn()
        self._end_id: int = tokenizer.convert_tokens_to_ids(self._end)  # pyright: ignore
        self._checked: set[str] = set()  # tools, as JSON
        self._ends: dict[str, int] = {}  # of turns in made-up conversations
        self._arguments: Any = {}
        if self._refusal(self._called("f"), {"role": "tool", "name": "f", "content": _SHOWN}) is not None:
            self._arguments = "{}"  # some templates expect JSON text

    # ---- what policies write --------------------------------------------------------------------------

    def read(self, token_ids: Sequence[int], before: Sequence[int], tools: Mapping[str, Tool]) -> Turn:
        """Read a turn that was sampled.

        Args:
            token_ids: Of the turn.
            before: The tokens before it; only the tokenizer's own ``response_template`` needs them.
            tools: What may be called.
        """
        kept = list(token_ids)
        while kept and kept[-1] in (self._end_id, self.tokenizer.eos_token_id, self.tokenizer.pad_token_id):
            kept.pop()
        text = str(self.tokenizer.decode(kept, skip_special_tokens=False))
        turn = read_turn(text, FORMATS[self.form], tools)
        if not self._answers_by_template:
            return turn
        schemas: list[Any] = [dict(tool.schema) for tool in tools.values()]
        said: Any = self.tokenizer.parse_response(list(token_ids), prefix=list(before), tools=schemas)
        calls = [
            _call_of(call.get("function", call)) for call in said.get("tool_calls") or () if isinstance(call, dict)
        ]
        if not calls:  # it takes a broken call for text
            calls = [call for call in turn.calls if isinstance(call, BrokenCall)]
        reasoning = said.get("reasoning_content") or said.get("thinking") or ""
        return Turn(str(said.get("content") or "").strip(), str(reasoning).strip(), tuple(calls))

    # ---- what they read ------------------------------------------------------------------------------

    def opening(self, prompt: Prompt, text: str, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens that follow a prompt whose last user message ends in ``text``.

        Raises:
            ValueError: The prompt's tokens are no beginning of it.
        """
        messages = prompt.messages or [{"role": "user", "content": ""}]
        try:
            added = self.beginning(prompt, with_added(messages, text) if text else messages, tools)
        except UnusableRow as error:
            raise ValueError(f"What an environment says at the start of {prompt.prompt_id} {error}.") from None
        if added is None:
            raise ValueError(
                f"What an environment says at the start of {prompt.prompt_id} changes the tokens before it; let the "
                "row's prompt end in a line break."
            )
        return added

    def beginning(
        self, prompt: Prompt, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[int] | None:
        """Return the tokens of a whole conversation that follow a prompt; None where it begins with something else.

        Raises:
            UnusableRow: The chat template refuses the conversation.
        """
        options = self.options | ({"tools": list(tools)} if tools else {})
        token_ids = encode_chat(messages, self.tokenizer, options)
        start = len(prompt.token_ids)
        if tuple(token_ids[:start]) == prompt.token_ids:
            return token_ids[start:]
        whole, begins = (str(self.tokenizer.decode(list(ids))) for ids in (token_ids, prompt.token_ids))
        return self._encode(whole[len(begins) :]) if whole.startswith(begins) else None

    def following(self, messages: Sequence[Message], last: int) -> list[int]:
        """Return the tokens between a turn and the next one: messages of tools or the user, and the next one's start.

        Args:
            messages: At least one.
            last: The last token of the turn. Where it is not the one that ends turns, that comes first.

        Raises:
            ValueError: The chat template cannot show them.
        """
        first = messages[0]
        before = self._called(first["name"]) if first["role"] == "tool" else self._said("")
        try:
            added = self._after(before, messages)
        except UnusableRow as error:
            raise ValueError(f"A conversation with an answer to a turn {error}.") from None
        return added if last == self._end_id else [self._end_id, *added]

    def shorten(self, text: str, most: int) -> tuple[str, bool]:
        """Cut the middle out of a text of more than ``most`` tokens and say so in it; return whether it was cut."""
        whole, reach = text, _CHARACTERS * most
        if len(text) <= 2 * reach:
            token_ids = self._encode(text)
            if len(token_ids) <= most:
                return text, False
            head, tail = token_ids[: most // 2], token_ids[len(token_ids) - (most - most // 2) :]
        else:
            head = self._encode(text[:reach])[: most // 2]
            tail = self._encode(text[-reach:])[-(most - most // 2) :]
        ends = [str(self.tokenizer.decode(ids, skip_special_tokens=False)) for ids in (head, tail)]
        return CUT.format(len(whole) - sum(map(len, ends))).join(ends), True

    # ---- before anything is sampled --------------------------------------------------------------------

    def check(
        self, schemas: Sequence[Mapping[str, Any]], calls: bool, responds: bool, rewrites: bool = False
    ) -> list[str]:
        """Try the turns that will come, with reasoning in them and without; return what the user has to know.

        Args:
            schemas: Of tools.
            calls: Whether turns may call tools.
            responds: Whether the user may answer.
            rewrites: Whether each turn is sampled after the conversation as the template writes it then.

        Raises:
            ValueError: The chat template refuses an answer, or does not show it.
        """
        told: list[str] = []
        answers: list[tuple[str, Message]] = []
        if calls:
            answers.append(("a tool's answer", {"role": "tool", "name": "f", "content": _SHOWN}))
            if self._text([_ASKED], {"tools": list(schemas)}) == self._text([_ASKED], {}):
                told.append(
                    "The chat template shows no tools, so the policy is not told of them; describe them in "
                    "data.system_prompt, unless it knows them."
                )
        if responds:
            answers.append(("a user's answer", {"role": "user", "content": _SHOWN}))
        changed: list[str] = []
        for what, answer in answers:
            for thought in (False, True):
                before = self._called("f", thought) if answer["role"] == "tool" else self._said(_MARK, thought)
                if (refusal := self._refusal(before, answer)) is not None:
                    raise ValueError(f"The chat template cannot show {what}: the conversation {refusal}.")
                if _SHOWN not in self._text([*before, answer], {}):
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
                f"{differs}; here they stay as they were sampled, reasoning among them. What serves the policy later "
                "has to keep them too."
            )
        return told

    def check_once(self, schemas: Sequence[Mapping[str, Any]]) -> list[str]:
        """Do the same for tools that are known only later; nothing the second time.

        Raises:
            ValueError: As for :meth:`check`.
        """
        written = json.dumps(schemas, sort_keys=True)
        if written in self._checked:
            return []
        told = self.check(schemas, calls=bool(schemas), responds=False)
        self._checked.add(written)
        return told

    def _extends(self, before: Sequence[Message], answer: Message) -> bool:
        """Whether the template adds to a conversation and leaves what is there."""
        start, _, _ = self._text(before, {}).rpartition(self._end)
        return self._text([*before, answer], {}).startswith(start + self._end)

    def _refusal(self, messages: Sequence[Message], *more: Message) -> str | None:
        """Why the template does not take messages; None where it does."""
        try:
            self._text([*messages, *more], {})
        except UnusableRow as error:
            return str(error)
        return None

    def _end_of_turn(self) -> str:
        try:
            text = self._text(self._said(_MARK), {})
        except UnusableRow as error:
            raise ValueError(f"A conversation of two turns {error}.") from None
        after = text.rpartition(_MARK)[2].lstrip()
        known = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        known += [str(self.tokenizer.eos_token)] if self.tokenizer.eos_token else []
        ends = [token for token in known if token and after.startswith(token)]
        if _MARK not in text or not ends:
            raise ValueError(
                "The chat template ends an assistant's turn with no special token, so that it cannot be told where a "
                "turn is over; choose a model whose template does."
            )
        return max(ends, key=len)

    # ---- the made-up conversation ----------------------------------------------------------------------

    def _said(self, content: str, thought: bool = False) -> list[Message]:
        thinking = "<think>\nA thought.\n</think>\n\n" if thought else ""
        return [_ASKED, {"role": "assistant", "content": thinking + (content or _MARK)}]

    def _called(self, name: str, thought: bool = False) -> list[Message]:
        call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": self._arguments}}
        content = "<think>\nA thought.\n</think>\n\n" if thought else ""
        return [_ASKED, {"role": "assistant", "content": content, "tool_calls": [call]}]

    def _after(self, before: Sequence[Message], messages: Sequence[Message]) -> list[int]:
        """Return the tokens that messages add after the last turn of ``before``."""
        made_up = str(before)
        if made_up not in self._ends:
            self._ends[made_up] = self._tokens(before, False).count(self._end_id)
        token_ids = self._tokens([*before, *messages], True)
        place = -1
        for _ in range(self._ends[made_up]):
            place = token_ids.index(self._end_id, place + 1)
        return token_ids[place + 1 :]

    def _tokens(self, messages: Sequence[Message], goes_on: bool) -> list[int]:
        options = self.options | {"add_generation_prompt": goes_on, "tokenize": True, "return_dict": False}
        return list(apply_template(messages, self.tokenizer, options))

    def _text(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        return str(apply_template(messages, self.tokenizer, {**self.options, **options, "tokenize": False}))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _call_of(said: Mapping[str, Any]) -> Call | BrokenCall:
    """Read a call that the tokenizer has found."""
    arguments = said.get("arguments")
    if isinstance(said.get("name"), str) and isinstance(arguments, dict):
        return Call(said["name"], arguments)
    return BrokenCall(str(dict(said)), "it has no name, or arguments that are no object")
