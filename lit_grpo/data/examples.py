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

from lit_grpo.data.chat import Message, UnusableRow, read_message, render_chat
from lit_grpo.data.control import ControlTokens
from lit_grpo.data.rendering import PromptRenderer, check_known
from lit_grpo.data.sources import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_grpo.budgets.rewriting import TextWriter
    from lit_grpo.types import Prompt

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
    """

    place: str
    prompt_ids: tuple[int, ...]
    answer_ids_T: np.ndarray
    learned_T: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and answer."""
        return len(self.prompt_ids) + len(self.answer_ids_T)


class AnsweredData(Protocol):
    """The data of a run, whose rows may have answers; :class:`lit_grpo.data.module.PromptDataModule` is one.

    Attributes:
        seed: Seed of the order of rows.
        prompts: The prompts that have been read, by split.
    """

    seed: int
    prompts: dict[str, list[Prompt]]

    @property
    def writer(self) -> TextWriter:
        """Puts texts into the prompts of ``train`` and ``validation``."""
        ...

    def answered(self, split: str, column: str, turns: Turns = "all", datasets: Collection[str] = ()) -> list[Example]:
        """Return the prompts of a split with their answers.

        Args:
            split: ``train`` or ``validation``.
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
            data: The data set.
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

    Args:
        renderer: Renderer of the prompts.
        tokenizer: The policy's tokenizer.
        row: The row that has the prompt.
        answer: A text, or a list of chat messages that begins and ends with one of the assistant; None if the prompt's
            column holds the whole conversation.
        turns: The turns of the assistant that are imitated.
        place: The row, for messages.

    Raises:
        UnusableRow: There is no answer, or the tokenizer or the chat template cannot use it.
    """
    if answer is None:  # the conversation has it
        renderer = replace(renderer, continue_final_message=True, cut_answers=False)
    conversation, options = renderer.conversation(row, tokenizer)
    if conversation is None:
        if answer is None:
            raise UnusableRow("has a prompt that is a text, and no answer; name the column of the answers")
        if not isinstance(answer, str):
            kind = type(answer).__name__
            raise UnusableRow(f"has an answer of type {kind}, and a prompt that is a text needs a text as its answer")
        _check_text(answer)
        prompt_ids, parts = renderer.render(row, tokenizer).token_ids, [(answer, True)]
    else:
        asked, answers = _divided(conversation, answer, turns)
        prompt, parts = _written(asked, answers, tokenizer, options)
        prompt_ids = tuple(ControlTokens.of(tokenizer).encode(prompt))
        if len(prompt_ids) > renderer.max_prompt_tokens:
            limit = f"max_prompt_tokens={renderer.max_prompt_tokens}"
            raise UnusableRow(f"has a prompt of {len(prompt_ids)} tokens, more than {limit}")
    ids, learned = list[int](), list[bool]()
    for text, is_learned in parts:
        part = ControlTokens.of(tokenizer).encode(text)
        check_known(part, text, tokenizer, "answer")
        if is_learned and part[-1:] and part[-1] not in _special(tokenizer).values():
            part.append(cast(int, tokenizer.eos_token_id))
        ids += part
        learned += [is_learned] * len(part)
    return Example(place, prompt_ids, np.array(ids, np.int32), np.array(learned, np.bool_))


def _check_text(text: str) -> None:
    if not text.strip():
        raise UnusableRow("has an empty answer")
    if found := re.search("[\ud800-\udfff]", text):
        raise UnusableRow(f"has an answer with the lone surrogate {found[0]!r}, half a character; replace it")


def _divided(conversation: list[Message], answer: Any, turns: Turns) -> tuple[list[Message], list[Message]]:
    """Return the messages of the prompt, and those from the first that is imitated on."""
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
    own = [place for place, message in enumerate(messages) if message["role"] == "assistant" and place >= first]
    for place in own:
        if not messages[place].get("tool_calls"):
            _check_text(messages[place]["content"])
    begin = own[-1 if turns == "last" else 0]
    if begin == 0:
        raise UnusableRow("has a conversation that begins with a message of the assistant, so that nothing is asked")
    return messages[:begin], messages[begin:]


def _written(
    asked: list[Message], answers: list[Message], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> tuple[str, list[tuple[str, bool]]]:
    """Return the text of the prompt, and the texts after it, of which those of the assistant are imitated."""
    ends = _special(tokenizer)
    pattern = re.compile("|".join(map(re.escape, sorted(ends, key=len, reverse=True))) or r"(?!)")
    whole = render_chat([*asked, *answers], tokenizer, options, is_closed=True)
    prompt, parts = "", list[tuple[str, bool]]()
    end = 0
    for number, message in enumerate(answers):
        before = [*asked, *answers[:number]]
        if message["role"] != "assistant":
            continue
        if before[-1]["role"] == "assistant":
            raise UnusableRow("has two messages of the assistant one after another; join them")
        begun = render_chat(before, tokenizer, options)
        turn = render_chat([*before, message], tokenizer, options, is_closed=True)
        found = [*pattern.finditer(turn, len(begun))]
        turn = turn[: found[-1].end()] if found else turn
        if not (whole.startswith(turn) and turn.startswith(begun)):
            raise UnusableRow(
                "has turns that the chat template writes in another way once they are followed by others, or before "
                "they are answered; set turns to last, or mend the template"
            )
        if parts:
            parts.append((whole[end : len(begun)], False))
        else:
            prompt = begun
        parts.append((whole[len(begun) : len(turn)], True))
        end = len(turn)
    return prompt, parts


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the special tokens, with which turns end, by their texts."""
    return {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
