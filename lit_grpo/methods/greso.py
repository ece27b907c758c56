"""GRESO (arXiv 2506.02177): prompts whose visits bring equal rewards are asked less often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lit_grpo.budgets.history import Record
from lit_grpo.budgets.prompts import SMALLEST_CHANCE, PromptRule, State
from lit_grpo.limits import Share
from lit_grpo.types import Prompt


@dataclass(frozen=True)
class Greso(PromptRule):
    """Skip a prompt the more often, the more visits in a row have brought equal rewards (GRESO, arXiv 2506.02177).

    After c such visits its chance is ``max(p^c, 0.01)``, with a p for prompts that all passed (easy) and one for those
    that none did (hard). After each batch each p falls by ``step`` where the batch has more such prompts than its
    share of ``target``, a third for easy and two thirds for hard ones, and else rises by it.

    Args:
        target: The share of groups without a difference that is aimed at.
        begin_at: Where each p begins.
        step: See above.
    """

    target: Share = 0.25
    begin_at: Share = 0.5
    step: Share = 0.01

    def begin(self, prompts: Sequence[Prompt]) -> State:
        """Both p."""
        return {"easy": self.begin_at, "hard": self.begin_at}

    def chance(self, prompt: Prompt, record: Record, state: State) -> float:
        """See above."""
        return max(state["easy" if record.is_easy else "hard"] ** record.num_flat, SMALLEST_CHANCE)

    def learn(self, state: State, prompts: Sequence[Prompt], records: Sequence[Record]) -> State:
        """Move both p."""
        flat = [record.is_easy for record in records if record.num_flat]
        shares = {"easy": flat.count(True) / max(len(records), 1), "hard": flat.count(False) / max(len(records), 1)}
        targets = {"easy": self.target / 3, "hard": 2 * self.target / 3}
        return {
            name: min(max(p + math.copysign(self.step, targets[name] - shares[name]), SMALLEST_CHANCE), 1.0)
            for name, p in state.items()
        }


PLUGINS = {"greso": Greso()}
