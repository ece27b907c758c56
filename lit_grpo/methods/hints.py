"""Hints for prompts that nobody passes: the beginning of a solution (ADHint, arXiv 2512.13095), or a strategy.

The strategy is as in NudgeRL (arXiv 2605.15726).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, ClassVar, NamedTuple

from lit_grpo.budgets.rewriting import Rewriter, Rewriting
from lit_grpo.settings import check_number
from lit_grpo.types import PassRule, Prompt, RolloutGroup


class HintVisit(NamedTuple):
    """What one visit of a prompt brought, with which share of a hint; only finite rewards count."""

    prompt_id: str
    share: float
    rewards: list[float]
    num_passed: int

    @classmethod
    def of(cls, group: RolloutGroup, pass_rule: PassRule) -> HintVisit:
        """Take it from a group; what is replayed has been counted at an earlier visit."""
        rewarded = [each for each in group.rollouts if not each.replayed and math.isfinite(each.reward)]
        num_passed = sum(pass_rule.passes(each.rewards) for each in rewarded)
        share = group.prompt.extra.get("hint", 0.0)
        return cls(group.prompt.prompt_id, share, [each.reward for each in rewarded], num_passed)


@dataclass(frozen=True, slots=True)
class HintRecord:
    """What the visits of a prompt have shown so far; a visit without a reward does not count.

    Args:
        num_unsolved: Visits without a hint that nobody passed, one after another, up to the last visit.
        share: Which share of a hint the last visit had; 0 where it had none.
        pass_rate: Share of that visit's completions that passed; 0 where it had no hint.
    """

    num_unsolved: int = 0
    share: float = 0.0
    pass_rate: float = 0.0

    def after(self, visit: HintVisit) -> HintRecord:
        """Return it with a visit more."""
        if not visit.rewards:
            return self
        if visit.share:
            return HintRecord(0, visit.share, visit.num_passed / len(visit.rewards))
        return HintRecord(0 if visit.num_passed else self.num_unsolved + 1)


NEW = HintRecord()


@dataclass(frozen=True)
class Hint(Rewriting):
    """Which prompts get a hint, how much of it, and its text: here none.

    Once nobody has passed a prompt at ``after`` visits one after another, it is asked with a share ``begin`` of its
    hint. After a visit with a hint that somebody passed, the share falls by ``step``, and after one that nobody passed
    it rises by ``step``, up to ``most``. Where it has fallen to 0 the prompt is asked without a hint, and ``after``
    further visits that nobody passes bring the hint back. All completions of a visit have the same hint, so that groups
    compare like with like.

    A rule of your own is a dataclass that derives from it, and gives the text.

    Args:
        after: Visits one after another that nobody passed, before hints begin.
        begin: The share that is shown first.
        step: By how much it moves.
        most: The largest share.
    """

    goes_on: ClassVar[bool] = False
    """Whether the text is an answer. The share of its tokens then stands after the prompt, the policy goes on from
    there, and reward functions get both together as the completion. Otherwise all of it stands in front of the
    question, however small the share."""

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
        return super().needs | {"whole_groups"}

    def worker(self) -> Hinter:
        """Return what puts hints into prompts."""
        return Hinter(self)

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
            share: See :meth:`share`.

        Raises:
            ValueError: The prompt lacks what the text is taken from; the sentence goes on after the row's number.
        """
        return ""


class Hinter(Rewriter):
    """Puts hints into prompts, by what their earlier visits have shown; the same on every rank.

    Args:
        rule: Which prompts get how much of which text.
    """

    what = "hint"
    common = True

    def __init__(self, rule: Hint) -> None:
        self.rule = rule
        self.known: dict[str, HintRecord] = {}  # by the ids of prompts

    def largest(self, prompt: Prompt) -> Prompt:
        """Return a prompt with the largest share of its hint, or itself where it has none or no room for one."""
        return self.with_share(prompt, self.rule.most)

    def asked(self, prompt: Prompt) -> Prompt:
        """Return a prompt as it is asked now."""
        share = self.rule.share(self.known.get(prompt.prompt_id, NEW))
        return self.with_share(prompt, share) if share else prompt

    def with_share(self, prompt: Prompt, share: float) -> Prompt:
        """Return a prompt with such a share of its hint."""
        text = self.rule.text(prompt, share)
        if not isinstance(text, str):
            raise ValueError(f"gets a hint of type {type(text).__name__} from {type(self.rule).__name__}, not text")
        writer = self.writer
        hinted = writer.put_after(prompt, text, share) if self.rule.goes_on else writer.put_before(prompt, text)
        return prompt if hinted is prompt else replace(hinted, extra={"hint": share})

    def learnt(
        self,
        groups: Sequence[RolloutGroup],
        pass_rule: PassRule,
        version: int,
        gather: Callable[[Any], list[Any]],
    ) -> dict[str, float]:
        """Remember the visits of a batch, of all ranks."""
        own = [HintVisit.of(group, pass_rule) for group in groups]
        visits: list[HintVisit] = [visit for part in gather(own) for visit in part]
        for visit in visits:
            self.known[visit.prompt_id] = self.known.get(visit.prompt_id, NEW).after(visit)
        return hint_metrics(visits)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: a list of plain values for each prompt."""
        return {"known": {prompt_id: list(astuple(record)) for prompt_id, record in self.known.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.known = {prompt_id: HintRecord(*values) for prompt_id, values in state["known"].items()}


def hint_metrics(visits: Sequence[HintVisit]) -> dict[str, float]:
    """Return what is logged of a batch's visits on all ranks; NaN for what is of nothing."""
    hinted = [visit for visit in visits if visit.share]
    unhinted_rewards = [reward for visit in visits if not visit.share for reward in visit.rewards]
    metrics = {
        "hints/share_of_prompts": len(hinted) / len(visits) if visits else math.nan,
        "hints/reward_unhinted": _mean(unhinted_rewards),
    }
    if hinted:
        rewards = [reward for visit in hinted for reward in visit.rewards]
        metrics |= {
            "hints/mean_share": _mean([visit.share for visit in hinted]),
            "hints/pass_rate": sum(visit.num_passed for visit in hinted) / max(len(rewards), 1),
            "hints/reward_hinted": _mean(rewards),
        }
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


@dataclass(frozen=True)
class Reference(Hint):
    """The beginning of a solution that a column holds, in tokens (as in ADHint, arXiv 2512.13095).

    Args:
        column: Of the data.
        most: Below 1, so that an answer at the solution's end is left to the policy.
    """

    goes_on: ClassVar[bool] = True

    most: float = 0.9
    column: str = "solution"

    def text(self, prompt: Prompt, share: float) -> str:
        """The whole solution."""
        return text_of(prompt, self.column)


@dataclass(frozen=True)
class Strategy(Hint):
    """A strategy in front of the question, whole (as in NudgeRL, arXiv 2605.15726).

    Args:
        column: Of the data, whose text it is where ``say`` is empty.
        say: What every prompt gets.
        between: What stands between it and the question.
    """

    column: str = "strategy"
    say: str = ""
    between: str = "\n\n"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("say", "between"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be text, not {getattr(self, name)!r}; put it into quotes.")

    def text(self, prompt: Prompt, share: float) -> str:
        """The strategy, and what follows it."""
        text = self.say or text_of(prompt, self.column)
        return text and text + self.between


def text_of(prompt: Prompt, column: str) -> str:
    """Return the text of a column; an empty one where it has no value.

    Raises:
        ValueError: There is no such column, or it holds something else; to go on after the row's number.
    """
    if column not in prompt.columns:
        raise ValueError(f"has no column {column!r} (it has {', '.join(map(repr, prompt.columns)) or 'none'})")
    value = "" if prompt.columns[column] is None else prompt.columns[column]
    if not isinstance(value, str):
        raise ValueError(f"has no text in column {column!r}, but {value!r}")
    return value


PLUGINS = {"reference_hint": Reference(), "strategy_hint": Strategy()}
