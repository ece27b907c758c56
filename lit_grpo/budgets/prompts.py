"""Who is asked: which of the prompts that are due get a rollout, by what their earlier visits have shown."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.budgets.history import PromptHistory, Record
from lit_grpo.settings import by_name, check_number
from lit_grpo.types import Prompt

SMALLEST_CHANCE = 0.01
"""Of any prompt to be asked: what nobody passes today may be passed tomorrow."""
MOST_SKIPPED = 100_000
"""Prompts that may be passed over in a row, before a run is stopped."""
BUCKETS = (2, 4, 8)
"""How many completions a pass takes, by phases."""

State = Mapping[str, float]


@dataclass(frozen=True)
class PromptRule:
    """Which prompts are asked: here, all.

    A rule of your own is a dataclass that derives from it. Whether a prompt is asked is drawn from a hash of the seed,
    its id and its visit, so that runs can be repeated and resumed.
    """

    def begin(self) -> State:
        """Return what the rule remembers, at the beginning of a run: numbers by name, which are logged."""
        return {}

    def chance(self, record: Record, state: State) -> float:
        """Return the chance that a prompt is asked when it is due."""
        return 1.0

    def learn(self, state: State, records: Sequence[Record]) -> State:
        """Return what the rule remembers after a batch.

        Args:
            state: What it remembered before.
            records: Of the prompts of all ranks that were asked, this visit included.
        """
        return state


@dataclass(frozen=True)
class Greso(PromptRule):
    """Skip a prompt the more often, the more visits on end have brought equal rewards (GRESO, arXiv 2506.02177).

    After c such visits its chance is ``max(p^c, 0.01)``, with a p for prompts that all passed (easy) and one for those
    that none did (hard). After each batch each p falls by ``step`` where the batch has more such prompts than its
    share of ``target``, a third for easy and two thirds for hard ones, and else rises by it.

    Args:
        target: The share of groups without a difference that is aimed at.
        begin_at: Where each p begins.
        step: See above.
    """

    target: float = 0.25
    begin_at: float = 0.5
    step: float = 0.01

    def __post_init__(self) -> None:
        for name in ("target", "begin_at", "step"):
            check_number(name, getattr(self, name), 0, int | float)
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}.")

    def begin(self) -> State:
        """Both p."""
        return {"easy": self.begin_at, "hard": self.begin_at}

    def chance(self, record: Record, state: State) -> float:
        """See above."""
        return max(state["easy" if record.is_easy else "hard"] ** record.num_flat, SMALLEST_CHANCE)

    def learn(self, state: State, records: Sequence[Record]) -> State:
        """Move both p."""
        flat = [record.is_easy for record in records if record.num_flat]
        shares = {"easy": flat.count(True) / max(len(records), 1), "hard": flat.count(False) / max(len(records), 1)}
        targets = {"easy": self.target / 3, "hard": 2 * self.target / 3}
        return {
            name: min(max(p + math.copysign(self.step, targets[name] - shares[name]), SMALLEST_CHANCE), 1.0)
            for name, p in state.items()
        }


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


@dataclass(frozen=True)
class Phases(PromptRule):
    """Ask from easy to hard, by the number of completions that a pass takes (the phases of sGPO, arXiv 2606.08854).

    The first visits are the profile, in which all are asked. Then, where a share p has passed, prompts above ``easy``
    are dropped, of those that nobody has passed a share ``unsolved`` is asked at each visit, and the others are asked
    in the phase of their bucket: 2, 4 or 8, the smallest power of 2 that is at least ``1 / p``, 8 for all beyond it.
    A phase lasts for ``batches`` batches, or until one has no prompt of its bucket. Behind the last phase the first
    comes again, so that a prompt whose bucket has changed meanwhile has its turn. A batch that mostly holds first
    visits counts to no phase.

    No prompt's chance is less than 0.01: in a phase without prompts a batch is filled with what is left, and is the
    phase's only one; no run stops.

    Args:
        batches: How many batches a phase lasts at most.
        easy: The largest share that may have passed of a prompt that is asked.
        unsolved: The chance of a prompt that nobody has passed.
    """

    batches: int = 50
    easy: float = 0.75
    unsolved: float = 0.1

    def __post_init__(self) -> None:
        check_number("batches", self.batches, 1, int)
        for name in ("easy", "unsolved"):
            check_number(name, getattr(self, name), 0, int | float)
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}.")

    def begin(self) -> State:
        """The bucket of the phase, and how many batches that has had."""
        return {"phase": float(BUCKETS[0]), "phase_batches": 0.0}

    def chance(self, record: Record, state: State) -> float:
        """See above."""
        if not record.num_visits:
            return 1.0
        if record.pass_rate == 0:
            return max(self.unsolved, SMALLEST_CHANCE)
        return 1.0 if self._bucket(record) == state["phase"] else SMALLEST_CHANCE

    def learn(self, state: State, records: Sequence[Record]) -> State:
        """Count the batch, or go on to the next phase."""
        if 2 * sum(record.num_visits <= 1 for record in records) >= len(records):
            return state
        phase, count = state["phase"], state["phase_batches"] + 1
        if count < self.batches and any(self._bucket(record) == phase for record in records):
            return {"phase": phase, "phase_batches": count}
        following = BUCKETS[(BUCKETS.index(int(phase)) + 1) % len(BUCKETS)]
        return {"phase": float(following), "phase_batches": 0.0}

    def _bucket(self, record: Record) -> int | None:
        """Which phase a prompt belongs to; None where it is dropped or unsolved."""
        if not 0 < record.pass_rate <= self.easy:
            return None
        return next((bucket for bucket in BUCKETS if record.pass_rate * bucket >= 1), BUCKETS[-1])


PROMPT_RULES: dict[str, PromptRule] = {
    "all": PromptRule(),
    "greso": Greso(),
    "near_half": NearHalf(),
    "phases": Phases(),
}
"""Rules by name: docs/budgets.md says where each comes from."""


def make_prompt_rule(spec: str) -> PromptRule:
    """Return a rule.

    Args:
        spec: A name of ``PROMPT_RULES``, or the class path of a :class:`PromptRule`; behind a colon fields and their
            values, as in ``greso:target=0.2``.

    Raises:
        ValueError: There is no such rule or field, or a value does not fit.
    """
    return by_name("data.ask", spec, PROMPT_RULES, PromptRule)


class PromptChooser:
    """Says of prompts that are due whether they are asked, the same on every rank.

    Args:
        rule: See :class:`PromptRule`.
        seed: Of its draws.

    Attributes:
        history: What is known of prompts.
    """

    def __init__(self, rule: PromptRule, seed: int) -> None:
        self.rule, self.seed = rule, seed
        self.history = PromptHistory()
        self.state: dict[str, float] = dict(rule.begin())

    def asks(self, prompt: Prompt) -> bool:
        """Whether a prompt is asked at this visit.

        Raises:
            ValueError: The rule gives no chance from 0 to 1.
        """
        chance = self.rule.chance(self.history[prompt.prompt_id], self.state)
        if not 0 <= chance <= 1:
            raise ValueError(
                f"data.ask: {type(self.rule).__name__} gives the prompt {prompt.prompt_id!r} a chance of {chance}; it "
                "must be from 0 to 1."
            )
        return chance == 1 or self._draw(prompt) < chance

    def learn(self, prompt_ids: Sequence[str]) -> None:
        """Learn from a batch of all ranks, whose visits are in the history."""
        self.state = dict(self.rule.learn(self.state, [self.history[prompt_id] for prompt_id in prompt_ids]))

    def metrics(self) -> dict[str, float]:
        """Return what the rule remembers, to be logged."""
        return {f"prompts/{name}": value for name, value in self.state.items()}

    def _draw(self, prompt: Prompt) -> float:
        text = repr((self.seed, "ask", prompt.prompt_id, prompt.visit)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little") * 2.0**-56

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; the history is kept by its owner."""
        return dict(self.state)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint."""
        self.state = dict(state)
