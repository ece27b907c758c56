"""Prompts that about half of the completions pass are asked most often (as in DOTS, arXiv 2506.05316)."""

from __future__ import annotations

from dataclasses import dataclass

from lit_grpo.budgets.history import Record
from lit_grpo.budgets.prompts import PromptRule, State
from lit_grpo.limits import Share
from lit_grpo.types import Prompt


@dataclass(frozen=True)
class NearHalf(PromptRule):
    """Ask a prompt the more often, the nearer to a half it is passed: at a chance of ``4 p (1 - p)``.

    Args:
        least: The least chance of a prompt.
    """

    least: Share = 0.1

    def chance(self, prompt: Prompt, record: Record, state: State) -> float:
        """See above; 1 of a prompt that nothing is known of."""
        rate = record.pass_rate
        return max(4 * rate * (1 - rate), self.least) if record.num_visits else 1.0


PLUGINS = {"near_half": NearHalf()}
