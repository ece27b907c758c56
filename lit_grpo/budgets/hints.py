"""Hints for prompts that nobody solves: how much of one a prompt gets, and which text it is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lit_grpo.budgets.history import Record, Visit
from lit_grpo.plugins import Plugin
from lit_grpo.settings import check_number
from lit_grpo.types import Prompt


@dataclass(frozen=True)
class Hint(Plugin):
    """Which prompts get a hint, how much of it, and its text: here none.

    Once nobody has passed a prompt at ``after`` visits on end, it is asked with a share ``begin`` of its hint. After
    a visit with a hint that somebody passed, the share falls by ``step``, and after one that nobody did, it rises by
    it, up to ``most``. Where it has fallen to 0 the prompt is asked without, and ``after`` further visits that nobody
    passes bring the hint back. All completions of a visit have the same hint, so that groups compare like with like.

    A rule of your own is a dataclass that derives from it, and gives the text.

    Args:
        after: Visits on end that nobody passed, before hints begin.
        begin: The share that is shown first.
        step: By how much it moves.
        most: The largest share.
    """

    role: ClassVar[str] = "what prompts are asked with"
    goes_on: ClassVar[bool] = False
    """Whether the text is the beginning of an answer. The share of its tokens then stands behind the prompt, the policy
    goes on from there, and reward functions get both together as the completion. Otherwise all of it stands in front of
    the question, however small the share."""

    after: int = 1
    begin: float = 0.5
    step: float = 0.25
    most: float = 1.0

    def __post_init__(self) -> None:
        check_number("after", self.after, 1, int)
        for name in ("begin", "step", "most"):
            check_number(name, getattr(self, name), 0, int | float)
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}.")
        if self.begin > self.most:
            raise ValueError(f"begin must be at most most, {self.most}, not {self.begin}.")

    @property
    def needs(self) -> frozenset[str]:
        """It goes by the rewards of whole visits."""
        return frozenset({"whole_groups", "prompt_stream"})

    def share(self, record: Record) -> float:
        """Return how much of its hint a prompt gets when it is asked next, from 0 (none) to 1."""
        if not record.hint:
            return self.begin if record.num_unsolved >= self.after else 0.0
        moved = record.hint - self.step if record.hint_pass_rate else record.hint + self.step
        return round(min(max(moved, 0.0), self.most), 9)

    def text(self, prompt: Prompt, share: float) -> str:
        """Return the text of a prompt's hint; a prompt whose text is empty gets none.

        Args:
            prompt: As it would be asked without; its columns have the names that reward functions know.
            share: See :meth:`share`.

        Raises:
            ValueError: The prompt lacks what the text is taken from; the sentence goes on behind the row's number.
        """
        return ""


def hint_metrics(visits: Sequence[Visit]) -> dict[str, float]:
    """Return what is logged of a batch's visits on all ranks, where a run has hints; NaN for what is of nothing."""
    hinted = [visit for visit in visits if visit.hint]
    rewards = {kind: _finite(visit for visit in visits if bool(visit.hint) == kind) for kind in (False, True)}
    metrics = {
        "hints/share_of_prompts": len(hinted) / len(visits) if visits else math.nan,
        "hints/reward_unhinted": _mean(rewards[False]),
    }
    if hinted:
        metrics |= {
            "hints/mean_share": _mean([visit.hint for visit in hinted]),
            "hints/pass_rate": sum(visit.num_passed for visit in hinted) / max(len(rewards[True]), 1),
            "hints/reward_hinted": _mean(rewards[True]),
        }
    return metrics


def _finite(visits: Iterable[Visit]) -> list[float]:
    return [reward for visit in visits for reward in visit.rewards if math.isfinite(reward)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
