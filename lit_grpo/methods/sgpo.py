"""sGPO (arXiv 2606.08854): groups as large as a pass takes, and prompts from easy to hard in phases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lit_grpo.budgets.allocation import AtLeastTwo
from lit_grpo.budgets.history import Record
from lit_grpo.budgets.prompts import SMALLEST_CHANCE, State
from lit_grpo.limits import Count, Share, check_order
from lit_grpo.plugins import Plugin
from lit_grpo.types import Prompt

BUCKETS = (2, 4, 8)
"""How many completions a pass takes, by phases."""


@dataclass
class Buckets(Plugin):
    """As many completions as it takes to expect a pass, a power of two (sGPO, arXiv 2606.08854).

    It is the smallest power of 2 that is at least ``1 / p``, within ``least`` and ``most``; ``num_generations`` of a
    prompt that nothing is known of.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"revisits"})

    least: AtLeastTwo = 2
    """Min completions per prompt."""
    most: Count = 8
    """Max completions per prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "least", "most")

    def first_round(self, records: Sequence[Record], num_generations: int, num_prompts: int | None = None) -> list[int]:
        return [self._of(record.pass_rate) if record.num_visits else num_generations for record in records]

    def _of(self, rate: float) -> int:
        expected = math.inf if rate == 0 else 2.0 ** math.ceil(math.log2(1 / rate) - 1e-9)
        return int(min(max(expected, self.least), self.most))


@dataclass
class PhasedPrompts(Plugin):
    """Ask from easy to hard, by the number of completions that a pass takes (the phases of sGPO, arXiv 2606.08854).

    The first visits are the profile, in which all are asked. Then, where a share p has passed, prompts above ``easy``
    are dropped, of those that nobody has passed a share ``unsolved`` is asked at each visit, and the others are asked
    in the phase of their bucket: 2, 4 or 8, the smallest power of 2 that is at least ``1 / p``, 8 for all beyond it.
    A phase lasts for ``batches`` batches, or until one has no prompt of its bucket. After the last phase the first
    comes again, so that a prompt whose bucket has changed meanwhile has its turn. A batch that mostly holds first
    visits counts to no phase.

    No prompt's chance is less than 0.01: in a phase without prompts a batch is filled with what is left, and is the
    phase's only one; no run stops.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"revisits"})

    batches: Count = 50
    """Max batches per phase."""
    easy: Share = 0.75
    """Largest fraction of correct completions at which a prompt is asked."""
    unsolved: Share = 0.1
    """Chance of a prompt without a correct completion."""

    def prompt_chance(self, prompt: Prompt, record: Record, state: State) -> float:
        if not record.num_visits:
            return 1.0
        if record.pass_rate == 0:
            return max(self.unsolved, SMALLEST_CHANCE)
        return 1.0 if self._bucket(record) == state["phase"] else SMALLEST_CHANCE

    def prompt_state(
        self, prompts: Sequence[Prompt], records: Sequence[Record] = (), state: State | None = None
    ) -> State:
        """Return the bucket of the phase, and how many batches that has had; a batch may end it."""
        if state is None:
            return {"phase": float(BUCKETS[0]), "phase_batches": 0.0}
        if 2 * sum(record.num_visits <= 1 for record in records) >= len(records):
            return state
        phase, count = state["phase"], state["phase_batches"] + 1
        if count < self.batches and any(self._bucket(record) == phase for record in records):
            return {"phase": phase, "phase_batches": count}
        following = BUCKETS[(BUCKETS.index(int(phase)) + 1) % len(BUCKETS)]
        return {"phase": float(following), "phase_batches": 0.0}

    def _bucket(self, record: Record) -> int | None:
        """Return the phase of a prompt; None where it is dropped or unsolved."""
        if not 0 < record.pass_rate <= self.easy:
            return None
        return next((bucket for bucket in BUCKETS if record.pass_rate * bucket >= 1), BUCKETS[-1])


PLUGINS = {"buckets": Buckets(), "phases": PhasedPrompts()}
