"""Hints for prompts that nobody passes: how a solution begins (arXiv 2512.13095), or a strategy (2605.15726)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from lit_grpo.budgets.rewriting import TextWriter, text_of
from lit_grpo.limits import Count, Share, Text, check_order
from lit_grpo.plugins import GroupBatch, Plugin
from lit_grpo.types import PassRule, Prompt, RolloutGroup


class HintVisit(NamedTuple):
    """Result of one visit of a prompt, and the fraction of the hint that it had; only finite rewards count."""

    prompt_id: str
    share: float
    rewards: list[float]
    num_passed: int


@dataclass(frozen=True, slots=True)
class HintRecord:
    """Results of the visits of a prompt so far; a visit without a reward does not count.

    Args:
        num_unsolved: Visits without a hint that nobody passed, one after another, up to the last visit.
        share: Fraction of the hint that the last visit had; 0 if it had none.
        pass_rate: Fraction of that visit's completions that passed; 0 if it had no hint.
    """

    num_unsolved: int = 0
    share: float = 0.0
    pass_rate: float = 0.0

    def after(self, visit: HintVisit) -> HintRecord:
        """Return the record with one visit more."""
        if not visit.rewards:
            return self
        if visit.share:
            return HintRecord(0, visit.share, visit.num_passed / len(visit.rewards))
        return HintRecord(0 if visit.num_passed else self.num_unsolved + 1)


@dataclass
class Hint(Plugin):
    """Base class of rules that give prompts a hint, which choose the prompts, the fraction and the text: here none.

    Once nobody has passed a prompt at ``after`` visits one after another, it is asked with a share ``begin`` of its
    hint. After a visit with a hint that somebody passed, the share falls by ``step``, and after one that nobody passed
    it rises by ``step``, up to ``most``. Where it has fallen to 0 the prompt is asked without a hint, and ``after``
    further visits that nobody passes bring the hint back. All completions of a visit have the same hint, so that groups
    compare like with like.

    A rule of your own is a dataclass that derives from it, and gives the text. For example, an idea first, and a whole
    plan where that was not enough::

        @dataclass
        class Tiers(Hint):
            def text(self, prompt, share):
                return prompt.columns["plan" if share > 0.5 else "idea"]
    """

    goes_on: ClassVar[bool] = False
    """Whether the text is an answer. The share of its tokens then stands after the prompt, the policy goes on from
    there, and reward functions get both together as the completion. Otherwise all of it stands in front of the
    question, however small the share."""

    needs: ClassVar[frozenset[str]] = frozenset({"whole_groups"})
    traits: ClassVar[frozenset[str]] = frozenset({"common"})

    after: Count = 1
    """Number of samplings in a row without a correct completion before hints begin."""
    begin: Share = 0.5
    """Fraction of the hint that is shown first."""
    step: Share = 0.25
    """Change of the fraction after a visit with a hint."""
    most: Share = 1.0
    """Largest fraction of the hint that is shown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "begin", "most")

    def setup(self) -> None:
        self.known: dict[str, HintRecord] = {}  # by the ids of prompts; the same on every rank

    def share(self, record: HintRecord) -> float:
        """Return how much of its hint a prompt gets when it is asked next, from 0 (none) to 1."""
        if not record.share:
            return self.begin if record.num_unsolved >= self.after else 0.0
        moved = record.share - self.step if record.pass_rate else record.share + self.step
        return round(min(max(moved, 0.0), self.most), 9)

    def text(self, prompt: Prompt, share: float) -> str:
        """Return the text of a prompt's hint; a prompt whose text is empty gets none.

        Args:
            prompt: As it would be asked without; its columns have the names that reward functions know.
            share: Fraction of the hint to show, from 0 to 1, as :meth:`share` returns it.

        Raises:
            ValueError: The prompt lacks what the text is taken from; the sentence goes on after the row's number.
        """
        return ""

    def rewrite(self, prompt: Prompt, writer: TextWriter, longest: bool = False) -> Prompt:
        """Return a prompt with the share of its hint that it gets now, or itself if it has none or no room for one."""
        share = self.most if longest else self.share(self.record_of(prompt.prompt_id))
        return self.with_share(prompt, share, writer) if share else prompt

    def with_share(self, prompt: Prompt, share: float, writer: TextWriter) -> Prompt:
        put = partial(writer.put_after, share=share) if self.goes_on else writer.put_before
        hinted = put(prompt, self.text(prompt, share))
        return prompt if hinted is prompt else replace(hinted, extra={"hint": share})

    def visit_of(self, group: RolloutGroup, pass_rule: PassRule) -> HintVisit:
        """Return what is remembered of a group; what is replayed has been counted at an earlier visit."""
        rewarded = [each for each in group.rollouts if not each.replayed and math.isfinite(each.reward)]
        return HintVisit(
            prompt_id=group.prompt.prompt_id,
            share=group.prompt.extra.get("hint", 0.0),
            rewards=[each.reward for each in rewarded],
            num_passed=sum(pass_rule.passes(each.rewards) for each in rewarded),
        )

    def metrics_of(self, visits: Sequence[HintVisit]) -> dict[str, float]:
        """Return what is logged of a batch's visits on all ranks; NaN for what is of nothing."""
        hinted = [visit for visit in visits if visit.share]
        unhinted_rewards = [reward for visit in visits if not visit.share for reward in visit.rewards]
        metrics = {
            "hints/share_of_prompts": len(hinted) / len(visits) if visits else math.nan,
            "hints/reward_unhinted": fmean(unhinted_rewards) if unhinted_rewards else math.nan,
        }
        if not hinted:
            return metrics
        rewards = [reward for visit in hinted for reward in visit.rewards]
        return metrics | {
            "hints/mean_share": fmean(visit.share for visit in hinted),
            "hints/pass_rate": sum(visit.num_passed for visit in hinted) / max(len(rewards), 1),
            "hints/reward_hinted": fmean(rewards) if rewards else math.nan,
        }

    def record_of(self, prompt_id: str) -> HintRecord:
        return self.known.get(prompt_id, HintRecord())

    def on_update_end(self, batch: GroupBatch) -> dict[str, float]:
        own = [self.visit_of(group, batch.pass_rule) for group in batch.groups]
        visits = [visit for part in batch.all_gather(own) for visit in part]
        for visit in visits:
            self.known[visit.prompt_id] = self.record_of(visit.prompt_id).after(visit)
        return self.metrics_of(visits)

    def state_dict(self) -> dict[str, Any]:
        return {"known": {prompt_id: list(astuple(record)) for prompt_id, record in self.known.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.known = {prompt_id: HintRecord(*values) for prompt_id, values in state["known"].items()}


@dataclass
class Reference(Hint):
    """The beginning of a solution that a column holds, in tokens (as in ADHint, arXiv 2512.13095)."""

    goes_on: ClassVar[bool] = True
    most: Share = 0.9
    """Largest fraction of the solution that is shown, below 1, so that an answer at the solution's end is left to the
    policy.
    """
    column: str = "solution"
    """Column of the data that holds the solution."""

    def text(self, prompt: Prompt, share: float) -> str:
        return text_of(prompt, self.column)


@dataclass
class Strategy(Hint):
    """A strategy in front of the question, whole (as in NudgeRL, arXiv 2605.15726)."""

    column: str = "strategy"
    """Column of the data that holds the strategy, if ``say`` is empty."""
    say: Text = ""
    """Strategy that every prompt gets."""
    between: Text = "\n\n"
    """Text between the strategy and the question."""

    def text(self, prompt: Prompt, share: float) -> str:
        text = self.say or text_of(prompt, self.column)
        return text and text + self.between


PLUGINS = {"reference_hint": Reference(), "strategy_hint": Strategy()}
