"""Choice of prompts: the due prompts that get a rollout, by the results of their earlier visits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from lit_grpo.budgets.history import PromptHistory
from lit_grpo.plugins import Plugin, ask
from lit_grpo.types import Prompt

SMALLEST_CHANCE = 0.01
"""Of any prompt to be asked: what nobody passes today may be passed tomorrow."""
MOST_SKIPPED = 100_000
"""Prompts that may be passed over in a row, before a run is stopped."""
State = Mapping[str, float]
"""What a rule remembers: numbers by name."""


class PromptChooser:
    """Says of prompts that are due whether they are asked, the same on every rank.

    Args:
        rule: Plug-in that gives chances (:meth:`lit_grpo.plugins.Plugin.prompt_chance`).
        seed: Seed of the draws.
        prompts: All prompts that training may draw; the rule derives its first state from them.

    Raises:
        ValueError: The rule needs a column that the prompts lack.

    Attributes:
        history: What is known of prompts.
    """

    def __init__(self, rule: Plugin, seed: int, prompts: Sequence[Prompt] = ()) -> None:
        self.rule, self.seed = rule, seed
        self.use_history(PromptHistory())
        self.state: dict[str, float] = dict(ask(rule, "prompt_state", prompts))
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}

    def use_history(self, history: PromptHistory) -> None:
        """Use what is known of prompts, which remembers as much as the rule needs."""
        self.history, history.num_recent = history, ask(self.rule, "numbers").num_recent

    def asks(self, prompt: Prompt) -> bool:
        """Return whether a prompt is asked at this visit.

        Raises:
            ValueError: The rule gives no chance from 0 to 1.
        """
        chance = self._chance(prompt)
        return chance == 1 or self._draw(prompt) < chance

    def largest(self, due: Sequence[Prompt], number: int) -> list[Prompt]:
        """Return as many of prompts that are due, those with the largest chances, in their order; of equals the first.

        What is due twice is taken once, as long as there are others.
        """
        first = {prompt.prompt_id: place for place, prompt in reversed([*enumerate(due)])}
        chances = [self._chance(prompt) for prompt in due]
        repeated = [first[prompt.prompt_id] < place for place, prompt in enumerate(due)]
        places = sorted(range(len(due)), key=lambda place: (repeated[place], -chances[place]))[:number]
        return [due[place] for place in sorted(places)]

    def learn(self, prompt_ids: Sequence[str]) -> None:
        """Learn from a batch of all ranks, whose visits are in the history."""
        prompts = [self._prompts[prompt_id] for prompt_id in prompt_ids]
        records = [self.history[prompt_id] for prompt_id in prompt_ids]
        self.state = dict(ask(self.rule, "prompt_state", prompts, records, self.state))

    def metrics(self) -> dict[str, float]:
        """Return what the rule remembers, to be logged."""
        return {f"prompts/{name}": value for name, value in self.state.items()}

    def _chance(self, prompt: Prompt) -> float:
        return ask(self.rule, "prompt_chance", prompt, self.history[prompt.prompt_id], self.state)

    def _draw(self, prompt: Prompt) -> float:
        text = repr((self.seed, "ask", prompt.prompt_id, prompt.visit)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little") * 2.0**-56

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs, without the history, which its owner saves."""
        return dict(self.state)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint."""
        self.state = dict(state)
