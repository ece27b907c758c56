"""Hints become part of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lit_grpo.budgets.hints import Hint
from lit_grpo.budgets.history import PromptHistory
from lit_grpo.data.chat import EndlessTemplate, UnusableRow
from lit_grpo.data.rendering import PromptRenderer, check_known
from lit_grpo.data.sources import Row
from lit_grpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Hinter:
    """Puts hints into prompts, by what their earlier visits have shown; the same on every rank.

    A hint is cut at its end where the prompt would be too long with it; where there is no room at all, the prompt is
    asked without. The question itself is never cut.

    Args:
        rule: Which prompts get how much of which text.
        renderer: Of prompts.
        tokenizer: The policy's.
        rows: What prompts are made of, by their ids; of those that are asked.

    Attributes:
        history: What is known of prompts.
        most_tokens: Of a prompt together with its hint.
    """

    def __init__(
        self, rule: Hint, renderer: PromptRenderer, tokenizer: PreTrainedTokenizerBase, rows: Mapping[str, Row]
    ) -> None:
        self.rule, self._renderer, self._tokenizer, self._rows = rule, renderer, tokenizer, rows
        self.history = PromptHistory()
        self.most_tokens = renderer.max_prompt_tokens

    def check(self, prompts: Sequence[Prompt], source: str) -> list[Prompt]:
        """Make the hints of all prompts once, as large as they may get; no prompt is longer with one from then on.

        Returns:
            The one that is longest with its hint, and the one whose hint has the largest token.

        Raises:
            ValueError: A row lacks what its hint is taken from, its text cannot be used, or no row has a hint.
        """
        hinted: list[Prompt] = []
        for prompt in prompts:
            try:
                with_hint = self.with_share(prompt, self.rule.most)
            except (ValueError, UnusableRow, EndlessTemplate) as error:
                number = prompt.prompt_id.rpartition("/")[2]
                raise ValueError(
                    f"rollout.plugins: the hint of row {number} of {source} cannot be made, since the row {error}; "
                    "mend the row, name another column, or leave the hint out."
                ) from None
            hinted += [with_hint] if with_hint.hint else []
        if not hinted:
            raise ValueError(
                f"rollout.plugins: no row of {source} has a hint that there is room for; give hints, raise "
                "data.max_prompt_tokens, or leave the hint out."
            )
        longest = max(hinted, key=lambda prompt: len(prompt.token_ids))
        self.most_tokens = max(len(prompt.token_ids) for prompt in (longest, *prompts))
        return [longest, max(hinted, key=lambda prompt: max(prompt.token_ids))]

    def hinted(self, prompt: Prompt) -> Prompt:
        """Return a prompt as it is to be asked now."""
        share = self.rule.share(self.history[prompt.prompt_id])
        return self.with_share(prompt, share) if share else prompt

    def with_share(self, prompt: Prompt, share: float) -> Prompt:
        """Return a prompt with such a share of its hint, or itself where it has none or no room for one.

        Raises:
            ValueError: The rule has no text for it.
            UnusableRow: The tokenizer or the chat template cannot do with the text.
        """
        text = self.rule.text(prompt, share)
        if not isinstance(text, str):
            raise ValueError(f"gets a hint of type {type(text).__name__} from {type(self.rule).__name__}, not text")
        token_ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
        if not token_ids:
            return prompt
        check_known(token_ids, text, self._tokenizer, "hint")
        if self.rule.goes_on:
            return self._behind(prompt, token_ids[: max(int(share * len(token_ids)), 1)], share)
        return self._in_front(prompt, text, token_ids, share)

    def _behind(self, prompt: Prompt, token_ids: list[int], share: float) -> Prompt:
        """Let the policy go on from what is given, as far as there is room for it."""
        shown = token_ids[: max(self.most_tokens - len(prompt.token_ids), 0)]
        if not shown:
            return prompt
        given = self._decode(shown)
        text, tokens = prompt.text + given, (*prompt.token_ids, *shown)
        return replace(prompt, token_ids=tokens, text=text, hint=share, given=given)

    def _in_front(self, prompt: Prompt, text: str, token_ids: list[int], share: float) -> Prompt:
        """Render the row anew with the text in front of its question, less what there is no room for."""
        kept = len(token_ids)
        while kept > 0:
            rendered = self._renderer.rendered(self._rows[prompt.prompt_id], self._tokenizer, text)
            over = len(rendered.token_ids) - self.most_tokens
            if over <= 0:
                return replace(prompt, hint=share, **rendered._asdict())
            kept -= over
            text = self._decode(token_ids[: max(kept, 0)])
        return prompt

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
