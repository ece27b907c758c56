"""Text is put into prompts that have been rendered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from lit_grpo.data.chat import EndlessTemplate, UnusableRow
from lit_grpo.data.control import ControlTokens
from lit_grpo.data.parts import PartTokens
from lit_grpo.data.rendering import PromptRenderer, Written, check_known
from lit_grpo.data.sources import Row
from lit_grpo.plugins import ask, read
from lit_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lit_grpo.plugins import Plugin


class PromptWriter:
    """Puts a text before a prompt's question, or after the prompt as the beginning of the answer.

    The text is cut at its end where the prompt would be too long with it. Where there is no room at all, or the text
    has no tokens, the very same prompt is returned. The question itself is never cut.

    Args:
        renderer: Renderer of the prompts.
        tokenizer: Tokenizer of the policy, which encodes the changed prompts.
        rows: The rows from which prompts are rendered, by the ids of the prompts.

    Attributes:
        most_tokens: The most tokens of a prompt together with its text.
    """

    def __init__(self, renderer: PromptRenderer, tokenizer: PreTrainedTokenizerBase, rows: Mapping[str, Row]) -> None:
        self._renderer, self._tokenizer, self._rows = renderer, tokenizer, rows
        self.most_tokens = renderer.max_prompt_tokens

    def put_before(self, prompt: Prompt, text: str) -> Prompt:
        """Return a prompt with a text before its question; in a conversation, before its last user message.

        Raises:
            ValueError: The tokenizer or the template cannot use the text; the message goes on after the row's number.
        """
        with _told_as_value_errors():
            tokens = self._tokens(text)
            kept = len(tokens.ids)
            while kept > 0:
                rendered = self._renderer.rendered(self._rows[prompt.prompt_id], self._tokenizer, text.__add__)
                over = len(rendered.token_ids) - self.most_tokens
                if over <= 0:
                    return replace(prompt, **rendered._asdict())
                kept -= over
                text = tokens.head(max(kept, 0))[1]
            return prompt

    def put_after(self, prompt: Prompt, text: str, share: float = 1.0) -> Prompt:
        """Return a prompt that is followed by the beginning of an answer, from which the policy goes on.

        Reward functions get that beginning (``Prompt.given``) as part of the completion.

        Args:
            prompt: Prompt as its row says, without a text.
            text: The text of the answer.
            share: Fraction of the text's tokens to append, rounded down, but one token at least; no character is cut.

        Raises:
            ValueError: The tokenizer cannot use the text, or joins its beginning with the prompt's end; the message
                goes on after the row's number.
        """
        if not text:
            return prompt
        with _told_as_value_errors():
            self._tokens(text)  # checks it
            asked = self._renderer.written(self._rows[prompt.prompt_id], self._tokenizer)
            tokens = PartTokens(self._tokenizer, asked.text, text, add_special_tokens=asked.adds_special_tokens)
            first_ids = self._written_ids(prompt, asked)
            num = len(tokens.divided(first_ids)[-1])
            room = max(self.most_tokens - len(prompt.token_ids), 0)
            shown, given = tokens.head(min(max(int(share * num), 1), room), first_ids)
        if not shown:
            return prompt
        return replace(prompt, token_ids=(*prompt.token_ids, *shown), text=prompt.text + given, given=given)

    def reworded(self, prompt: Prompt, template: str, texts: Mapping[str, str]) -> Prompt:
        """Return a prompt whose question is a template with the question and other texts, however long it is.

        In a conversation the question is the last user message, and all other messages stay. Control tokens that the
        texts spell are plain characters.

        Args:
            prompt: As its row says.
            template: For example ``"{prompt} A right answer: {answer}"``, as
                :func:`lit_grpo.budgets.rewriting.check_template` allows.
            texts: The texts by their names in the template, ``prompt`` apart.

        Raises:
            ValueError: The tokenizer or the chat template cannot use the texts; the message goes on after the row's
                number.
        """
        cover = ControlTokens.of(self._tokenizer).cover
        covered = {name: cover(text) for name, text in texts.items()}
        with _told_as_value_errors():
            rendered = self._renderer.rendered(
                self._rows[prompt.prompt_id],
                self._tokenizer,
                lambda question: template.format(prompt=question, **covered),
            )
        return replace(prompt, **rendered._replace(messages=None)._asdict())

    def continued(self, prompt: Prompt, text: str) -> list[int]:
        """Return the tokens that a text of others has after a prompt; control tokens that it spells are characters.

        Args:
            prompt: As its row says.
            text: The whole answer, without the token that ends it; it may be empty.

        Raises:
            ValueError: The tokenizer cannot use the text, or joins its beginning with the prompt's end; the message
                goes on after the row's number.
        """
        with _told_as_value_errors():
            covered = ControlTokens.of(self._tokenizer).cover(text)
            asked = self._renderer.written(self._rows[prompt.prompt_id], self._tokenizer)
            tokens = PartTokens(self._tokenizer, asked.text, covered, add_special_tokens=asked.adds_special_tokens)
            ids = tokens.divided(self._written_ids(prompt, asked))[-1]
            check_known(ids, text, self._tokenizer, "text")
            return ids

    def _written_ids(self, prompt: Prompt, asked: Written) -> tuple[int, ...]:
        """Return the tokens of a prompt as it is written, with one placeholder for each image."""
        if prompt.pictures is None:
            return prompt.token_ids
        return tuple(ControlTokens.of(self._tokenizer).encode(asked.text, asked.adds_special_tokens))

    def decoded(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _tokens(self, text: str) -> PartTokens:
        if not isinstance(text, str):  # a rule of the user's own makes it
            raise ValueError(f"gets {text!r} of type {type(text).__name__}, not a text")
        tokens = PartTokens(self._tokenizer, text)
        check_known(tokens.ids, text, self._tokenizer, "text")
        return tokens


def rewritten(prompt: Prompt, rules: Sequence[Plugin], writer: PromptWriter) -> Prompt:
    for rule in rules:
        prompt = ask(rule, "rewrite", prompt, writer)
    return prompt


def check_rewriting(
    rules: Sequence[Plugin], writer: PromptWriter, prompts: Sequence[Prompt], source: str
) -> list[Prompt]:
    """Rewrite each prompt once to the longest form that it may take, to check its length before the run.

    Args:
        rules: The plug-ins that rewrite prompts, each those of its data sets.
        writer: Puts text into prompts; learns how long prompts become.
        prompts: As their rows say.
        source: Source of the rows, for messages.

    Returns:
        The rewritten prompt that is longest, and the one that has the largest token.

    Raises:
        ValueError: A prompt cannot be rewritten, or none is.
    """
    longest_forms: list[Prompt] = []
    for prompt in prompts:
        largest = prompt.own()
        for rule in rules:
            if not prompt.is_of(rule.datasets):
                continue
            try:
                returned = rule.rewrite(largest, writer, True)
            except ValueError as error:
                number = prompt.prompt_id.rpartition("/")[2]
                raise ValueError(
                    f"rollout.plugins: the text that {type(rule).__name__} puts into row {number} of {source} cannot "
                    f"be made, since the row {error}; mend the row, name another column, or leave the plug-in out."
                ) from None
            largest = read(rule, "rewrite", returned, largest, writer, True)
        longest_forms += [] if largest.digest == prompt.digest else [largest]
    if not longest_forms:
        names = " or ".join(type(rule).__name__ for rule in rules)
        raise ValueError(
            f"rollout.plugins: no row of {source} has a text for {names} that there is room for; give a "
            "row one, raise data.max_prompt_tokens, or leave the plug-in out."
        )
    longest = max(longest_forms, key=lambda prompt: len(prompt.token_ids))
    writer.most_tokens = max(len(prompt.token_ids) for prompt in (longest, *prompts))
    return [longest, max(longest_forms, key=lambda prompt: max(prompt.token_ids))]


@contextmanager
def _told_as_value_errors() -> Iterator[None]:
    try:
        yield
    except (UnusableRow, EndlessTemplate) as error:
        raise ValueError(str(error)) from None
