"""GRESO (arXiv 2506.02177): prompts whose visits bring no difference are asked less often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lit_grpo.budgets.history import Record
from lit_grpo.budgets.prompts import SMALLEST_CHANCE, State
from lit_grpo.limits import Share, check_order
from lit_grpo.plugins import Plugin
from lit_grpo.types import Prompt


@dataclass
class Greso(Plugin):
    """Skip a prompt the more often, the more visits in a row have been easy, or hard (GRESO, arXiv 2506.02177).

    A visit is easy if at least 98% of its completions pass, and hard if at most 11% do. After c easy visits in a row
    the chance of a prompt is ``max(p^c, 0.01)``; hard prompts have a p of their own. From the second epoch on, each p
    falls by ``step`` after a batch in which at least its part of ``target`` of the prompts were passed by all
    completions (a third of ``target``), or by none (two thirds), and else rises by ``step``. These are the rules of
    ``all_probabilistic`` in the paper's code (Infini-AI-Lab/GRESO at b277843), which has them on mean rewards of 8
    completions that earn 1 or at most 0.1.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"revisits"})

    target: Share = 0.25
    """Target fraction of zero-variance groups."""
    begin_at: Share = 0.5
    """Initial value of each p."""
    step: Share = 0.01
    """Change of each p after a batch."""
    least: Share = 0.05
    """Lower bound of each p."""
    most: Share = 0.95
    """Upper bound of each p."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "least", "most")

    def prompt_chance(self, prompt: Prompt, record: Record, state: State) -> float:
        return max(state["easy"] ** record.num_easy * state["hard"] ** record.num_hard, SMALLEST_CHANCE)

    def prompt_state(
        self, prompts: Sequence[Prompt], records: Sequence[Record] = (), state: State | None = None
    ) -> State:
        """Return both p, which move once prompts come for the second time."""
        if state is None:
            return {"easy": self.begin_at, "hard": self.begin_at}
        if all(record.num_visits < 2 for record in records):
            return state
        rates = [record.last_pass_rate for record in records]
        excess = {
            "easy": rates.count(1.0) / len(rates) - self.target / 3,
            "hard": rates.count(0.0) / len(rates) - 2 * self.target / 3,
        }
        return {
            name: max(p - self.step, self.least) if excess[name] >= 0 else min(p + self.step, self.most)
            for name, p in state.items()
        }


PLUGINS = {"greso": Greso()}
