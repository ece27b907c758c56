"""Base class of plug-ins that divide a budget of completions or tokens among prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lit_grpo.budgets.allocation import AtLeastTwo, proportional
from lit_grpo.budgets.history import Record
from lit_grpo.compatibility import Clash, check_clashes
from lit_grpo.limits import Count, check_order
from lit_grpo.plugins import Plugin, RunFacts


@dataclass
class Divided(Plugin):
    """A budget of completions or of tokens, divided by how often prompts have been passed.

    A prompt that nothing is known of, on its first visit, gets an equal share of the budget. A completion is expected
    to take as many tokens as its prompt's have taken of late, or, on the first visit, as those of all prompts. As long
    as no length is known, all get ``model.num_generations``.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"revisits"})

    budget: Count | None = None
    """Completions per update and rank; by default ``data.batch_size`` x ``model.num_generations``."""
    tokens: Count | None = None
    """Expected tokens per update and rank, in place of ``budget``. If they are too few, each prompt gets ``least``."""
    least: AtLeastTwo = 2
    """Min completions per prompt."""
    most: Count | None = None
    """Max completions per prompt; by default all that are left of the budget."""

    def __post_init__(self) -> None:
        super().__post_init__()
        both = self.budget is not None and self.tokens is not None
        check_clashes([Clash(f"budget {self.budget} needs completions", f"tokens {self.tokens} counts tokens", both)])
        check_order(self, "least", "most")

    def check(self, run: RunFacts) -> None:
        num_prompts = run.num_prompts
        if num_prompts is None:
            return
        name, unit, budget = "budget", "completions", self.budget or num_prompts * run.num_generations
        if self.tokens is not None:
            name, unit, budget = "tokens", "tokens", self.tokens
        if budget < self.least * num_prompts:
            raise ValueError(
                f"{name} is {budget} {unit} for {num_prompts} prompts, which is less than {self.least} each; give at "
                f"least {self.least * num_prompts}, or fewer prompts a batch."
            )

    def first_round(self, records: Sequence[Record], num_generations: int, num_prompts: int | None = None) -> list[int]:
        """Divide the budget, or such a part of it as these prompts are of an update's."""
        if not records:
            return []
        number, costs = len(records), np.array([record.mean_tokens for record in records])
        whole = self.tokens
        if whole is None or not costs.all():
            costs, whole = np.ones(number), self.budget or (num_prompts or number) * num_generations
        budget = whole * number // (num_prompts or number)
        most = self.most or max(int(budget / costs.min()), self.least)
        counts = np.array(proportional(np.ones(number), costs, budget, self.least, most))
        known = np.array([record.num_visits > 0 for record in records])
        rates, shared = np.array([record.pass_rate for record in records]), float(counts[known] @ costs[known])
        counts[known] = self.divided(rates[known], costs[known], shared, most)
        return counts.tolist()

    def divided(self, rates: np.ndarray, costs: np.ndarray, budget: float, most: int) -> list[int]:
        """Divide a budget over prompts that pass at these rates, of completions at these costs, both (prompts,)."""
        raise NotImplementedError
