"""Prompts that about half of the completions pass are asked most often (as in DOTS, arXiv 2506.05316)."""

from __future__ import annotations

from dataclasses import dataclass

from lit_grpo.budgets.history import Record
from lit_grpo.budgets.prompts import PromptRule, State
from lit_grpo.settings import check_number


@dataclass(frozen=True)
class NearHalf(PromptRule):
    """Ask a prompt the more often, the nearer to a half it is passed: at a chance of ``4 p (1 - p)``.

    Args:
        least: The least chance of a prompt.
    """

    least: float = 0.1

    def __post_init__(self) -> None:
        check_number("least", self.least, 0, int | float)
        if not 0 < self.least <= 1:
            raise ValueError(f"least must be above 0 and at most 1, not {self.least}.")

    def chance(self, record: Record, state: State) -> float:
        """See above; 1 of a prompt that nothing is known of."""
        rate = record.pass_rate
        return max(4 * rate * (1 - rate), self.least) if record.num_visits else 1.0


PLUGINS = {"near_half": NearHalf()}
