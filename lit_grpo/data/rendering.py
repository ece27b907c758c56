"""From a row of the data to the token ids of its prompt: template, chat template and tokenizer."""

from __future__ import annotations

import contextlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from lit_grpo.compatibility import Clash, check_clashes
from lit_grpo.data.chat import IMAGE, Message, UnusableRow, in_parts, read_message, render_chat
from lit_grpo.data.control import ControlTokens
from lit_grpo.data.mixture import DATASET
from lit_grpo.data.parts import num_common
from lit_grpo.data.sources import Row
from lit_grpo.limits import Count, check_fields
from lit_grpo.process.terminal import listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_grpo.policy.architecture.vision import Vision
    from lit_grpo.types import Pictures


RESERVED_CHAT_KWARGS = {
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
}


@runtime_checkable
class Conversing(Protocol):
    """Goes on with a conversation after its prompt, such as a plug-in with tools or environments.

    Attributes:
        datasets: Data sets whose rows it goes on with; all if empty.
    """

    datasets: ClassVar[frozenset[str]]

    def prepare(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any],
        plain_rows: bool = False,
        vision: Vision | None = None,
    ) -> None:
        """Receive the tokenizer and the variables of its chat template, before any prompt is rendered.

        Args:
            tokenizer: Tokenizer of the policy, with which all prompts are rendered.
            options: Variables of the chat template.
            plain_rows: Whether control tokens that rows spell are encoded as plain characters.
            vision: What reads images, if the policy sees them.

        Raises:
            ValueError: The chat template cannot show how the conversation goes on.
        """
        ...

    def tool_schemas(self, row: Row) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools that a row's prompt shows.

        Raises:
            ValueError: The row has no tools; the message goes on after the row's number.
        """
        ...

    def adds(self, row: Row) -> bool:
        """Return whether more is said when a completion begins, another each time, so that a row needs no prompt.

        Raises:
            ValueError: As :meth:`tool_schemas` does.
        """
        ...

    def alternatives(self, row: Row, messages: list[Message]) -> Sequence[tuple[list[Message], Mapping[str, Any]]]:
        """Return what a row's conversation may turn out to be when a completion begins; none where it stays as it is.

        Each is a conversation with further variables of the chat template. The tokens of the prompt are those that
        all of them begin with; alternatives that the template refuses are left out.
        """
        ...


@runtime_checkable
class Converses(Protocol):
    """A callback of the trainer that has what goes on with conversations."""

    @property
    def conversing(self) -> Conversing | None:
        """None where prompts are answered in one turn."""
        ...


class Rendered(NamedTuple):
    """The prompt of a row; ``messages`` is None if the row's prompt is a text and no conversation."""

    token_ids: tuple[int, ...]
    text: str
    messages: list[Message] | None
    pictures: Pictures | None = None


class Written(NamedTuple):
    """The text of a prompt as it is encoded.

    Args:
        text: The text, which may be covered (:class:`lit_grpo.data.control.ControlTokens`).
        adds_special_tokens: Whether the tokenizer puts its tokens before it: it is no conversation.
    """

    text: str
    adds_special_tokens: bool


@dataclass(frozen=True)
class PromptRenderer:
    r"""Turns a row into the token ids and the text of its prompt.

    .. code-block:: text

        row               {"question": "2 + 3 = ?", "answer": 5}
        template          "{question} Think first."      -> "2 + 3 = ? Think first."
        system_prompt     "You are a tutor."             -> a conversation of a system and a user message
        chat template     of the tokenizer               -> "<|im_start|>system ... <|im_start|>assistant\n"
        tokenizer                                        -> (151644, 8948, 198, ...)

    A prompt without template is the column ``prompt_column``: a text, or a list of chat messages. Without a chat
    template the text is tokenized as it is. The fields are those of :class:`lit_grpo.data.PromptDataModule`.

    Where something is ``conversing``, every prompt is a conversation, shows the tools of its row, and may be missing.
    If more is said when a completion begins, its tokens are those that all ``alternatives`` begin with. If there is
    ``vision``, rows may have images, in ``image_column`` or in parts of their messages, and are conversations. With
    ``split_special_tokens`` a text that spells a control token stays a text (:mod:`lit_grpo.data.control`).
    """

    prompt_column: str = "prompt"
    template: str | None = None
    system_prompt: str | None = None
    chat_template: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_prompt_tokens: Count = 512
    continue_final_message: bool = False
    split_special_tokens: bool = False
    cut_answers: bool = False
    image_column: str | None = None
    conversing: Conversing | None = None
    vision: Any = None  # a lit_grpo.policy.architecture.vision.Vision

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        if self.template is not None:
            _parse_template(self.template)
        acts = {
            "data.system_prompt": self.system_prompt,
            "data.chat_template_kwargs": self.chat_template_kwargs or None,
        }
        check_clashes(
            Clash(
                f"{name} needs the tokenizer's chat template",
                "data.chat_template false leaves it out",
                found=value is not None and self.chat_template is False,
                remedy="set data.chat_template to true",
            )
            for name, value in acts.items()
        )
        if taken := RESERVED_CHAT_KWARGS.intersection(self.chat_template_kwargs or {}):
            raise ValueError(
                f"data.chat_template_kwargs may not set {', '.join(sorted(taken))}, which lit_grpo sets itself; leave "
                "only variables of the chat template."
            )

    def render(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> Rendered:
        """Return the prompt of a row.

        Raises:
            UnusableRow: The row has no prompt, or one that cannot be used.
            EndlessTemplate: The chat template does not end.
            ValueError: A chat template is needed and the tokenizer has none.
        """
        rendered = self.rendered(row, tokenizer)
        if len(rendered.token_ids) > self.max_prompt_tokens:
            limit = f"max_prompt_tokens={self.max_prompt_tokens}"
            raise UnusableRow(f"has a prompt of {len(rendered.token_ids)} tokens, more than {limit}")
        return rendered

    def rendered(
        self, row: Row, tokenizer: PreTrainedTokenizerBase, reword: Callable[[str], str] | None = None
    ) -> Rendered:
        """Return the prompt of a row however long it is, whose question is what ``reword`` makes of the row's.

        In a conversation the question is the last user message. Texts of ``reword`` may be covered
        (:class:`lit_grpo.data.control.ControlTokens`). Raises what :meth:`render` does.
        """
        images = list[Any]()
        prompt, messages = self._read(row, images), None
        if reword is not None:
            no_question = "has no user's turn to put a text in front of"
            is_text = isinstance(prompt, str)
            prompt = reword(prompt) if is_text else _with_last_question(prompt, reword, no_question)
        text, adds_special_tokens = self._written(prompt, row, tokenizer)
        pictures: Pictures | None = None
        others: Sequence[tuple[list[Message], Mapping[str, Any]]] = ()
        if not adds_special_tokens:  # a conversation
            conversing = self._conversing_with(row)
            messages = None if isinstance(prompt, str) and conversing is None else self._conversation(prompt)
            others = () if conversing is None else conversing.alternatives(row, self._covered(prompt, tokenizer))
        if others:
            token_ids = _unchanging(text, others, tokenizer, self._options(row))
        else:
            token_ids = ControlTokens.of(tokenizer).encode(text, adds_special_tokens)
        if images:
            messages = None if messages is None else [*map(in_parts, messages)]
            token_ids, pictures = self.with_pictures(token_ids, images)
        while adds_special_tokens and token_ids and token_ids[-1] == tokenizer.eos_token_id:
            token_ids.pop()
        if not token_ids:
            raise UnusableRow("has a prompt that the tokenizer turns into no tokens")
        text = ControlTokens.of(tokenizer).uncover(text)
        check_known(token_ids, text, tokenizer)
        return Rendered(tuple(token_ids), text, messages, pictures)

    def with_pictures(self, token_ids: Sequence[int], images: Sequence[Any]) -> tuple[list[int], Pictures]:
        """Return tokens with those of their images, and these; raise :class:`UnusableRow` if these cannot be used."""
        try:
            return self.vision.read(token_ids, images)
        except ValueError as error:
            raise UnusableRow(f"has images that cannot be used: {error}") from None

    def written(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> Written:
        return self._written(self._read(row), row, tokenizer)

    def _written(self, prompt: str | list[Message], row: Row, tokenizer: PreTrainedTokenizerBase) -> Written:
        if self._renders_as_chat(prompt, row):
            return Written(render_chat(self._covered(prompt, tokenizer), tokenizer, self._options(row)), False)
        assert isinstance(prompt, str)
        return Written(ControlTokens.of(tokenizer).cover(prompt) if self.split_special_tokens else prompt, True)

    def conversation(
        self, row: Row, tokenizer: PreTrainedTokenizerBase, images: list[Any] | None = None
    ) -> tuple[list[Message] | None, dict[str, Any]]:
        """Return a row's conversation (None if its prompt is a text), and the variables of the chat template.

        ``images`` receives what the row gives for each image.
        """
        prompt = self._read(row, images)
        if not self._renders_as_chat(prompt, row):
            return None, {}
        return self._covered(prompt, tokenizer), self._options(row)

    def _covered(self, prompt: str | list[Message], tokenizer: PreTrainedTokenizerBase) -> list[Message]:
        """Return the conversation of a prompt, in which control tokens that texts only spell are covered."""
        conversation = self._conversation(prompt)
        cover = ControlTokens.of(tokenizer).cover_message
        return [*map(cover, conversation)] if self.split_special_tokens else conversation

    def spelled(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the control tokens that a row's prompt spells, those in the policy's own earlier turns apart."""
        prompt = self._read(row)
        said = [prompt] if isinstance(prompt, str) else [_ for _ in prompt if _["role"] != "assistant"]
        texts = [each if isinstance(each, str) else each["content"] or "" for each in said]
        found = ControlTokens.of(tokenizer).pattern.findall
        return list(dict.fromkeys(name for text in texts for name in found(text)))

    def _options(self, row: Row) -> dict[str, Any]:
        options = dict(self.chat_template_kwargs or {})
        conversing = self._conversing_with(row)
        if conversing is None:
            return options
        try:
            tools = conversing.tool_schemas(row)
        except ValueError as error:
            raise UnusableRow(str(error)) from None
        return options | ({"tools": tools} if tools else {})

    def adds(self, row: Row) -> bool:
        """Return whether more is said when a completion begins."""
        conversing = self._conversing_with(row)
        try:
            return conversing is not None and conversing.adds(row)
        except ValueError as error:
            raise UnusableRow(str(error)) from None

    def _conversing_with(self, row: Row) -> Conversing | None:
        """Return what goes on with a row's conversation, unless it is limited to other data sets."""
        datasets = frozenset[str]() if self.conversing is None else self.conversing.datasets
        return self.conversing if not datasets or row.get(DATASET) in datasets else None

    def _renders_as_chat(self, prompt: str | list[Message], row: Row) -> bool:
        messages = isinstance(prompt, list) or self._conversing_with(row) is not None
        if messages and self.chat_template is False:
            raise UnusableRow("holds chat messages, which chat_template: false cannot render")
        if self.chat_template is None:
            return messages or self.system_prompt is not None
        return self.chat_template

    def _read(self, row: Row, images: list[Any] | None = None) -> Any:
        """Return the prompt of a row, a text or messages; ``images`` receives what the row gives for each image."""
        adds = self.adds(row)
        of_parts: list[Any] | None = None if self.vision is None else []
        if adds and self.template is None and row.get(self.prompt_column) is None:
            return ""
        prompt = column_of(row, self.prompt_column) if self.template is None else _fill_template(self.template, row)
        if isinstance(prompt, str):
            texts = [prompt]
        elif not isinstance(prompt, list):
            kind = type(prompt).__name__
            raise UnusableRow(f"has a prompt of type {kind}, neither text nor a list of chat messages")
        else:
            prompt = [read_message(message, of_parts) for message in prompt]
            texts = [message["content"] or "" for message in prompt]
        if of_parts is not None:
            prompt, found = self._with_images(prompt, row, of_parts)
            if images is not None:
                images += found
        if not adds and not any(text.strip() for text in texts):
            raise UnusableRow("has an empty prompt")
        if found := re.search("[\ud800-\udfff]", json.dumps(prompt, ensure_ascii=False, default=str)):
            raise UnusableRow(
                f"has a prompt with the lone surrogate {found[0]!r}, half a character that no tokenizer takes; replace "
                "it"
            )
        return prompt

    def _with_images(self, prompt: Any, row: Row, of_parts: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return a prompt with a place for each image of its row, and these.

        Images of the column go to the parts of messages that hold none, in order; without such parts, before the first
        user message.
        """
        given = row.get(self.image_column or "")
        in_column = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
        if not in_column and not of_parts:
            return prompt, []
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        empty = sum(each is None for each in of_parts)
        if in_column and not empty:
            place = next((place for place, message in enumerate(prompt) if message["role"] == "user"), None)
            if place is None:
                raise UnusableRow(f"has images in column {self.image_column!r} and no user message to show them in")
            shown = {**prompt[place], "content": IMAGE * len(in_column) + (prompt[place]["content"] or "")}
            prompt = [*prompt[:place], shown, *prompt[place + 1 :]]
            images = [*in_column, *of_parts]
            if of_parts:
                raise UnusableRow(f"has images in its messages and others in column {self.image_column!r}; keep one")
        elif len(in_column) != empty:
            raise UnusableRow(
                f"has {len(in_column)} images in column {self.image_column!r}, and places for {empty} in its messages"
            )
        else:
            rest = iter(in_column)
            images = [next(rest) if each is None else each for each in of_parts]
        return prompt, images

    def _conversation(self, prompt: str | list[Message]) -> list[Message]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.cut_answers and len(messages) > 1 and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if messages[-1]["role"] == "assistant" and not self.continue_final_message:
            raise UnusableRow(
                "ends in an assistant message, which would be answered; set data.cut_answers to true to leave it out, "
                "or data.continue_final_message to have it continued"
            )
        if self.system_prompt is None:
            return messages
        if messages[0]["role"] == "system":
            raise UnusableRow("begins with a system message of its own beside system_prompt")
        return [{"role": "system", "content": self.system_prompt}, *messages]


def check_known(token_ids: Sequence[int], text: str, tokenizer: PreTrainedTokenizerBase, what: str = "prompt") -> None:
    """Check that the tokenizer knows all characters of a row's prompt, or of a text for it."""
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id) and unknown in token_ids:
        raise UnusableRow(f"has a {what} with characters that the tokenizer does not know ({text[:40]!r})")


def with_added(messages: Sequence[Message], text: str) -> list[Message]:
    """Return a conversation with a text at the end of its last user message."""
    return _with_last_question(
        messages, lambda said: said + text, "has no user message to which an environment could add what it says"
    )


def _with_last_question(messages: Sequence[Message], change: Callable[[str], str], refusal: str) -> list[Message]:
    """Change the content of the last user message; a conversation without any is refused."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not turns:
        raise UnusableRow(refusal)
    turn = {**messages[turns[-1]], "content": change(messages[turns[-1]]["content"])}
    return [*messages[: turns[-1]], turn, *messages[turns[-1] + 1 :]]


def _unchanging(
    text: str,
    others: Sequence[tuple[list[Message], Mapping[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any],
) -> list[int]:
    """Return the first tokens of a rendered conversation, those that each of the others has too."""
    control = ControlTokens.of(tokenizer)
    token_ids = control.encode(text)
    kept = len(token_ids)
    for messages, more in others:
        with contextlib.suppress(UnusableRow):
            other_ids = control.encode(render_chat(messages, tokenizer, {**options, **more}))
            kept = min(kept, num_common(token_ids, other_ids))
    return token_ids[:kept]


def _parse_template(template: str) -> list[tuple[str, str | None]]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"data.template {template!r} is malformed: {error}; name columns as {{column}} and write a brace "
            "that is meant as one twice."
        ) from error
    for _, column, spec, conversion in parts:
        if column is not None and (spec or conversion or not column or any(sign in column for sign in ".[]")):
            raise ValueError(
                f"data.template {template!r} may hold only plain columns such as {{question}}; leave out "
                "attributes, indices, formats and empty braces."
            )
    if all(column is None for _, column, _, _ in parts):
        raise ValueError(f"data.template {template!r} names no column; write one as {{question}}.")
    return [(literal, column) for literal, column, _, _ in parts]


def _fill_template(template: str, row: Row) -> str:
    pieces = _parse_template(template)
    return "".join(text + ("" if column is None else str(column_of(row, column))) for text, column in pieces)


def column_of(row: Row, column: str) -> Any:
    """Return the value of a column."""
    if column not in row:
        raise UnusableRow(f"has no column {column!r} (it has {listed(row)})")
    if row[column] is None:
        raise UnusableRow(f"has no value in column {column!r}")
    return row[column]
