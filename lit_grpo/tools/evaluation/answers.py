"""The answer of a completion, by which the majority of several completions is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lit_grpo.rewards.builtin import compile_pattern, last_answer
from lit_grpo.rewards.function import RewardFunction


@dataclass(frozen=True)
class Answers:
    """How answers are told apart.

    Args:
        of: Returns the answer of a completion's text, None or an empty text without one; None if answers cannot be told
            apart.
        rule: The rule in words, or why there is none.
    """

    of: Callable[[str], str | None] | None
    rule: str


def find_answers(pattern: str | None, rewards: Iterable[RewardFunction], pass_reward: str) -> Answers:
    """Return how answers are told apart: by ``--answer``, or by a reward with a method ``answer_of``.

    Of several such rewards it is the one that decides whether a completion is correct, or else the first.

    Args:
        pattern: The value of ``--answer``, a regular expression; group 1 of its last match is the answer.
        rewards: Reward functions of the run.
        pass_reward: Name of the reward function that decides whether a completion is correct.

    Raises:
        ValueError: The pattern is no regular expression with a group.
    """
    if pattern is not None:
        compiled = compile_pattern("--answer", pattern, needs_group=True)
        return Answers(lambda text: last_answer(compiled, text), f"the answer is group 1 of --answer {pattern}")
    for function in sorted(rewards, key=lambda one: one.name != pass_reward):
        answer_of: Callable[[str], str | None] | None = getattr(function.call, "answer_of", None)
        if answer_of is not None:
            return Answers(answer_of, f"the answer is the text that the reward {function.name} compares")
    return Answers(
        None,
        f"none, because the reward {pass_reward} does not say which answer a completion gives; give --answer REGEX",
    )


def majority_correct(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return whether the answer that most completions of a row give is correct.

    Completions without an answer have no vote. If several answers have the most votes, one of them is taken at random,
    and the result is the chance that it is correct. An answer whose completions are not all correct, or not all wrong,
    counts by the fraction of them that is correct. Without any answer the result is 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    first = [answer for answer, number in votes.items() if number == most]
    right = sum(is_right for answer, is_right in zip(answers, correct, strict=True) if answer in first)
    return right / (most * len(first))
