"""TTRL (arXiv 2504.16084): the answer that most completions of a group give is taken for the right one.

A completion gets 1 where its answer is that of the majority, else 0; the data needs no answers. The majority is the
answer with the most votes. Completions without an answer have no vote, and get 0. Where two answers have the most
votes, or the first has less than ``least_share`` of all completions, there is no label, and the reward says nothing
(None): such a group is trained on by other rewards alone, or not at all.

**Where the majority is wrong, its answer is learned**, and the right one unlearned: with two answers, whichever is more
likely than a half grows (``tests/test_majority_vote.py``). With many wrong answers most of those still get their 0
rightly, which TTRL calls a lucky hit. Where the data has answers, ``majority/right`` says how often the label is right,
and ``majority/reward_right`` how many rewards are. One completion alone is its own majority: validate by another
reward, or with ``model.eval_num_generations``.

What deviates: answers are compared as text, not as mathematics; a tie has no label, where TTRL's code takes the first;
there is no second sample of votes beyond the group. ECHO's trees, pruning and clipping are the plug-in ``echo_tree``.

Evidence: all groups of five by enumeration, in ``tests/test_majority_vote.py``. On the demo, where the majority is
right about as often as not, it unlearns: held-out exact match is 25 points below GRPO's, on ``knights`` 32
(docs/methods.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from lit_grpo.limits import Limit
from lit_grpo.plugins import Plugin
from lit_grpo.rewards.builtin import compile_pattern, last_answer
from lit_grpo.rewards.function import RewardFunction


@dataclass
class MajorityVote(Plugin):
    r"""Brings the reward ``majority_vote``.

    For example, with the true accuracy beside it, which is not trained on; the second line may be left out::

        rollout: {plugins: [{majority_vote: {pattern: 'answer is (\S+)'}}]}
        model: {rewards: [{function: exact_match, weight: 0}]}
    """

    pattern: str | None = None
    """Regular expression; group 1 of its last match is a completion's answer, and a completion without a match has
    none. By default the whole completion is the answer.
    """
    least_share: Annotated[float, Limit(ge=0, le=1)] = 0.0
    """Min fraction of a group's completions that the majority must have."""
    weight: Annotated[float, Limit(finite=True)] = 1.0
    """Weight of the reward."""
    answer_column: str = "answer"
    """Column of the data with true answers, which only metrics use."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pattern is not None:
            compile_pattern("pattern", self.pattern, needs_group=True)

    def setup(self) -> None:
        self._rewards = [RewardFunction.of(Majority(self), "majority_vote", self.weight)]

    @property
    def rewards(self) -> Sequence[RewardFunction]:
        return self._rewards


class Majority:
    """Scores a group by its majority."""

    def __init__(self, rule: MajorityVote) -> None:
        self.rule = rule
        self._pattern = None if rule.pattern is None else compile_pattern("pattern", rule.pattern, needs_group=True)

    def __call__(
        self,
        completions: Sequence[str | list[dict[str, Any]]],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, Sequence[Any]], None],
        **columns: Sequence[Any],
    ) -> list[float | None]:
        answers = [self.answer_of(_text(completion)) for completion in completions]
        label, share = majority(answers)
        label = label if share >= self.rule.least_share else None
        values = [None if label is None else float(answer == label) for answer in answers]
        log_extra("majority_label", [label] * len(answers))
        log_metric("majority/share", share)
        log_metric("majority/labelled", float(label is not None))
        truth = next(iter(columns.get(self.rule.answer_column, ())), None)
        if label is not None and truth is not None:
            true = [float(answer == str(truth).strip()) for answer in answers]
            log_metric("majority/right", float(label == str(truth).strip()))
            agreeing = [value == rightly for value, rightly in zip(values, true, strict=True)]
            log_metric("majority/reward_right", sum(agreeing) / len(agreeing))
        return list(values)

    def answer_of(self, completion: str) -> str | None:
        return last_answer(self._pattern, completion) or None


def majority(answers: Sequence[str | None]) -> tuple[str | None, float]:
    """Return the answer that most have, None where two have as many or none has one, and its share of all."""
    votes = Counter(answer for answer in answers if answer is not None).most_common(2)
    if not votes:
        return None, 0.0
    (answer, most), tied = votes[0], len(votes) > 1 and votes[1][1] == votes[0][1]
    return None if tied else answer, most / len(answers)


def _text(completion: str | list[dict[str, Any]]) -> str:
    """Return the text of a completion: of a conversation, that of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


PLUGINS = {"majority_vote": MajorityVote()}
