"""Examples: rows with an answer, as the tokens of a prompt and of the answer that a policy is to imitate.

The prompt has the tokens with which the policy is sampled. The answer has the tokens that the policy would have to
sample, with the token that ends the turn, where a completion of the policy ends; what a chat template writes after that
token, such as a line break, belongs to no answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import numpy as np
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.data.chat import Message, UnusableRow, read_message, render_chat
from lit_grpo.data.control import TAGS, ControlTokens
from lit_grpo.data.parts import PartTokens, num_common
from lit_grpo.data.rendering import PromptRenderer, check_known
from lit_grpo.data.sources import Row
from lit_grpo.process.terminal import warn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_grpo.budgets.rewriting import TextWriter
    from lit_grpo.types import Pictures, Prompt

_MADE_UP = "MADEUPANSWER"
_ASKED: Message = {"role": "user", "content": "Go on."}
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_SHOWN = 30  # characters of a generation prompt in messages
Turns = Literal["all", "last"]
"""The turns of the assistant in a conversation that are imitated."""
SourceSpec = str | dict[str, Any] | Sequence[Row]
"""A file, a folder or a dataset id; the arguments of :class:`lit_grpo.data.HubRows`; or rows, from Python."""


class Example(NamedTuple):
    """A prompt and the answer to imitate.

    Args:
        place: The row, for messages, such as ``row 3 of train.jsonl``.
        prompt_ids: Tokens of the prompt.
        answer_ids_T: Tokens after the prompt, int32.
        learned_T: Which of these are imitated, bool; the others are what users and tools said between turns.
        pictures: The images of the prompt.
    """

    place: str
    prompt_ids: tuple[int, ...]
    answer_ids_T: np.ndarray
    learned_T: np.ndarray
    pictures: Pictures | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids_T)


class Part(NamedTuple):
    """A text after the prompt.

    Args:
        text: Characters of this part alone, such as one turn.
        is_learned: Whether the policy imitates it.
        ends: Whether it ends with the token that ends a turn.
    """

    text: str
    is_learned: bool
    ends: bool


class AnsweredData(Protocol):
    """The data of a run, whose rows may have answers; :class:`lit_grpo.data.module.PromptDataModule` is one.

    Attributes:
        seed: Seed of the order of rows.
        prompts: The prompts that have been read, by split.
    """

    seed: int
    prompts: dict[str, list[Prompt]]

    @property
    def writer(self) -> TextWriter: ...

    def answered(self, split: str, column: str, turns: Turns = "all", datasets: Collection[str] = ()) -> list[Example]:
        """Return the prompts of a split with their answers.

        Args:
            split: Rows to take: ``train`` or ``validation``.
            column: Column of the answers, by the name that reward functions know; empty if the prompts' column has
                whole conversations.
            turns: The turns of the assistant that are imitated.
            datasets: Data sets whose rows are taken; by default all.

        Raises:
            ValueError: Rows have no answer, or one that cannot be used.
        """
        ...

    def examples_of(self, data: SourceSpec, prompt_column: str, column: str, turns: Turns = "all") -> list[Example]:
        """Return the examples of a data set of its own, rendered with the settings of the run's data.

        Args:
            data: Data set to read: a path or hub id, the arguments of ``HubRows``, or rows.
            prompt_column: Column of the prompts; empty for that of the run's data.
            column: Column of the answers; empty if the prompts' column has whole conversations.
            turns: The turns of the assistant that are imitated.

        Raises:
            ValueError: It cannot be read, or rows have no answer, or one that cannot be used.
        """
        ...


def render_example(
    renderer: PromptRenderer, tokenizer: PreTrainedTokenizerBase, row: Row, answer: Any, turns: Turns, place: str
) -> Example:
    """Return the tokens of a row with its answer.

    They are the tokens of the whole text. The first of them are those that the prompt has alone, after which the policy
    is sampled. If the answer is the ``completion`` of a row that ``lit_grpo predict`` wrote, and its ``finish_reason``
    is ``length``, it was cut off: the token that would end it is not imitated.

    Args:
        renderer: Renderer of the prompts.
        tokenizer: Tokenizer of the policy, which encodes the row and its answer.
        row: The row that has the prompt.
        answer: A text, or a list of chat messages that begins and ends with one of the assistant; None if the prompt's
            column holds the whole conversation.
        turns: The turns of the assistant that are imitated, apart from those whose ``weight`` is 0.
        place: The row, for messages.

    Raises:
        UnusableRow: There is no answer, the tokenizer or the chat template cannot use it, or a token belongs to both
            the prompt and the answer.
    """
    if answer is None:  # the conversation has it
        renderer = replace(renderer, continue_final_message=True, cut_answers=False)
    conversation, options = renderer.conversation(row, tokenizer, images := [])
    pictures: Pictures | None = None
    if conversation is None:
        if answer is None:
            raise UnusableRow("has a prompt that is a text, and no answer; name the column of the answers")
        if not isinstance(answer, str):
            kind = type(answer).__name__
            raise UnusableRow(f"has an answer of type {kind}, and a prompt that is a text needs a text as its answer")
        _check_text(answer)
        parts, first_ids = [Part(answer, is_learned=True, ends=False)], renderer.render(row, tokenizer).token_ids
        prompt = renderer.written(row, tokenizer).text
        tokens = PartTokens(tokenizer, prompt, answer, add_special_tokens=True).divided(first_ids)
    else:
        asked, answers = _divided(conversation, answer, turns)
        prompt, parts = _written(asked, answers, tokenizer, options)
        tokens = PartTokens(tokenizer, prompt, *(part.text for part in parts)).divided()
        if images:
            tokens[0], pictures = renderer.with_pictures(tokens[0], images)
        if len(tokens[0]) > renderer.max_prompt_tokens:
            limit = f"max_prompt_tokens={renderer.max_prompt_tokens}"
            raise UnusableRow(f"has a prompt of {len(tokens[0])} tokens, more than {limit}")
    ids, learned = list[int](), list[bool]()
    for part, of_part in zip(parts, tokens[1:], strict=True):
        check_known(of_part, part.text, tokenizer, "answer")
        ids += of_part
        learned += [part.is_learned] * len(of_part)
    if not parts[-1].ends and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(cast(int, tokenizer.eos_token_id))
        learned.append(True)
    if row.get("finish_reason") == "length" and answer is not None and answer == row.get("completion"):
        learned[-1] = False
    return Example(place, tuple(tokens[0]), np.array(ids, np.int32), np.array(learned, np.bool_), pictures)


class _NotBegun(UnusableRow):
    """An answer that the chat template does not write after its own generation prompt, with which ``begun`` ends."""

    def __init__(self, begun: str, message: Message) -> None:
        self.is_thinking = begun.rstrip().endswith("<think>")
        if begun.rstrip().endswith("</think>"):
            remedy = (
                "take the thought out of the answer, or set data.chat_template_kwargs (often enable_thinking: true)"
            )
        elif self.is_thinking and "</think>" in (message["content"] or ""):
            remedy = "give the policy's tokenizer a chat template that keeps the thoughts of answers"
        else:
            remedy = "set data.chat_template_kwargs (often enable_thinking: false), or mend the template"
        super().__init__(
            "has an answer that the chat template does not write after its own generation prompt, which ends in "
            f"{begun[-_SHOWN:]!r}; {remedy}"
        )


def _check_text(text: str) -> None:
    if not text.strip():
        raise UnusableRow("has an empty answer")
    if found := re.search("[\ud800-\udfff]", text):
        raise UnusableRow(f"has an answer with the lone surrogate {found[0]!r}, half a character; replace it")


def _divided(conversation: list[Message], answer: Any, turns: Turns) -> tuple[list[Message], list[Message]]:
    """Return the messages of the prompt, and those from the first to the last that are imitated."""
    if answer is None:
        messages, first = conversation, 0
        if messages[-1]["role"] != "assistant":
            raise UnusableRow("has no answer: its conversation does not end in a message of the assistant")
    else:
        answers = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        if not isinstance(answers, list):
            raise UnusableRow(
                f"has an answer of type {type(answer).__name__}, neither text nor a list of chat messages"
            )
        answers = [*map(read_message, answers)]
        if not answers or {answers[0]["role"], answers[-1]["role"]} != {"assistant"}:
            raise UnusableRow("has an answer whose messages do not begin and end with one of the assistant")
        messages, first = [*conversation, *answers], len(conversation)
    turns_of_row = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    own = [place for place in turns_of_row if place >= first and is_imitated(messages[place])]
    own = own if turns == "all" else [place for place in own if place == turns_of_row[-1]]
    if not own:
        which = "each turn" if turns == "all" else "the last turn"
        raise UnusableRow(f"has nothing to imitate, because {which} of the assistant has weight 0; leave the row out")
    for place in own:
        if not messages[place].get("tool_calls"):
            _check_text(messages[place]["content"])
    if own[0] == 0:
        raise UnusableRow("has a conversation that begins with a message of the assistant, so that nothing is asked")
    return messages[: own[0]], messages[own[0] : own[-1] + 1]


def is_imitated(message: Message) -> bool:
    """Return False for a turn of the assistant with ``weight`` 0, which OpenAI's format for fine-tuning leaves out."""
    weight = message.get("weight", 1)
    if not isinstance(weight, int | float) or weight not in (0, 1):
        raise UnusableRow(f"has a turn with weight {weight!r}; give 0 (the turn is not imitated) or 1")
    return weight == 1


def _written(
    asked: list[Message], answers: list[Message], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> tuple[str, list[Part]]:
    """Return the text of the prompt, and the texts after it, of which those of the assistant are imitated.

    An ordinary answer gets an empty thought if the generation prompt begins one and the template does not end it, as
    Qwen3.5's does. ``answers`` are the messages from the first turn that is imitated to the last.
    """
    try:
        return _divided_text(asked, answers, tokenizer, options)
    except _NotBegun as reason:
        thinking = [_with_thought(message) for message in answers] if reason.is_thinking else answers
        if thinking == answers:
            raise
    written = _divided_text(asked, thinking, tokenizer, options)
    rank_zero_only(warn)(
        "The generation prompt of the chat template begins a thought, and answers have none: they are imitated with an "
        "empty thought. Give answers with thoughts (<think> ... </think>), or set data.chat_template_kwargs (often "
        "enable_thinking: false) so that no thought is begun."
    )
    return written


def _with_thought(message: Message) -> Message:
    """Return an answer with an empty thought before it, if it has none."""
    content = message["content"] or ""
    if message["role"] != "assistant" or not is_imitated(message) or "</think>" in content:
        return message
    return {**message, "content": _NO_THOUGHT + content}


def _divided_text(
    asked: list[Message], answers: list[Message], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> tuple[str, list[Part]]:
    """Return what :func:`_written` does for answers as they are.

    Raises:
        _NotBegun: The template does not write an answer after its own generation prompt.
    """
    whole = render_chat([*asked, *answers], tokenizer, options, is_closed=True)
    prompt, parts = "", list[Part]()
    end = 0
    for number, message in enumerate(answers):
        before = [*asked, *answers[:number]]
        if message["role"] != "assistant":
            continue
        if before[-1]["role"] == "assistant":
            raise UnusableRow("has two messages of the assistant one after another; join them")
        if not is_imitated(message):
            continue
        begun = render_chat(before, tokenizer, options)
        turn = render_chat([*before, message], tokenizer, options, is_closed=True)
        if not turn.startswith(begun):
            raise _NotBegun(begun, message)
        closing = _closing(turn, message, tokenizer, options)
        begin = len(turn) - len(closing)
        shared = num_common(closing, whole[begin:])  # the last turn may have an end of the whole text too
        length, ends = _end(closing[:shared], tokenizer)
        turn = turn[: begin + length] if ends else turn
        if not whole.startswith(turn):
            raise UnusableRow(
                "has turns that the chat template writes in another way once they are followed by others; set turns "
                "to last, or mend the template"
            )
        if not ends and len(turn) < len(whole):
            following = ControlTokens.of(tokenizer).pattern.match(whole, len(turn))
            if following is None:
                raise UnusableRow(
                    "has turns that the chat template ends with no token, so that the policy would not learn to end "
                    "them; set turns to last, or mend the template"
                )
            turn, ends = whole[: following.end()], True
        if parts:
            parts.append(Part(whole[end : len(begun)], is_learned=False, ends=True))
        else:
            prompt = begun
        parts.append(Part(whole[len(begun) : len(turn)], is_learned=True, ends=ends))
        end = len(turn)
    return prompt, parts


def _closing(turn: str, message: Message, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str:
    """Return what the chat template writes after the content of a turn and after its tool calls.

    It is the longest text with which both this turn and a made-up one end.

    Raises:
        UnusableRow: The template does not show what the assistant says.
    """
    made_up = {**message, "content": _MADE_UP}
    if calls := message.get("tool_calls"):
        call = {"name": _MADE_UP, "arguments": {}}
        made_up["tool_calls"] = [{**calls[0], "function": call} if "function" in calls[0] else {**calls[0], **call}]
    other = render_chat([_ASKED, made_up], tokenizer, options, is_closed=True)
    if _MADE_UP not in other:
        raise UnusableRow(
            "has an answer that the chat template does not show; mend the template, or choose another policy"
        )
    after = other[other.rindex(_MADE_UP) + len(_MADE_UP) :]
    return after[len(after) - num_common(turn[::-1], after[::-1]) :]


def _end(closing: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, bool]:
    """Return the length of a closing up to the token that ends the turn, and whether it has one.

    This is the end-of-sequence token, or else the last control token; tags of thoughts and calls end nothing.
    """
    found = [each for each in ControlTokens.of(tokenizer).pattern.finditer(closing) if each[0] not in TAGS]
    last = next((each for each in found if each[0] == tokenizer.eos_token), found[-1] if found else None)
    return (0, False) if last is None else (last.end(), True)
