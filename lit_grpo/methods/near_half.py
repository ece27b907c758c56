"""Prompts that about half of the completions pass are asked most often (as in DOTS, arXiv 2506.05316)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lit_grpo.budgets.history import Record
from lit_grpo.budgets.prompts import State
from lit_grpo.limits import Positive, Share
from lit_grpo.plugins import Plugin
from lit_grpo.types import Prompt


@dataclass
class NearHalf(Plugin):
    """Ask a prompt the more often, the nearer its pass rate p is to a half: with a chance of ``4 p (1 - p)``.

    DOTS draws prompts from ``softmax(-|p - 0.5| / tau)`` over all of them, with tau 0.001 (its code,
    ASTRAL-Group/data-efficient-llm-rl at 59df918), and predicts p by a model of its own. ``temperature`` gives the
    chances of due prompts the same ratios, ``exp(-|p - 0.5| / temperature)``, down to ``least``.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"revisits"})

    least: Share = 0.1
    """Lower bound of a prompt's chance."""
    temperature: Positive | None = None
    """The tau of DOTS; by default the chance is ``4 p (1 - p)``, which is much flatter."""

    def prompt_chance(self, prompt: Prompt, record: Record, state: State) -> float:
        if not record.num_visits:
            return 1.0
        rate = record.pass_rate
        if self.temperature is None:
            return max(4 * rate * (1 - rate), self.least)
        return max(math.exp(-abs(rate - 0.5) / self.temperature), self.least)


PLUGINS = {"near_half": NearHalf()}
