"""The answer of a completion, by which the majority of several completions is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lit_grpo.rewards.builtin import compile_pattern
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.rewards.texts import last_answer
from lit_grpo.types import Prompt


@dataclass(frozen=True)
class Answers:
    """Comparison of answers.

    Args:
        of: Returns the answer in a completion's text to a prompt: an empty text without one, and None if answers to the
            prompt are not told apart.
        rule: The rule in words, or why there is none.
        exist: Whether there is a rule.
    """

    of: Callable[[Prompt, str], str | None]
    rule: str
    exist: bool


def find_answers(pattern: str | None, rewards: Sequence[RewardFunction], pass_reward: str) -> Answers:
    """Return how answers are told apart: by ``--answer``, or by rewards with a method ``answer_of``.

    Of several such rewards that apply to a prompt it is the one that decides whether a completion is correct, or else
    the first.

    Args:
        pattern: The value of ``--answer``, a regular expression; group 1 of its last match is the answer.
        rewards: Reward functions of the run.
        pass_reward: Name of the reward function that decides whether a completion is correct.

    Raises:
        ValueError: The pattern is no regular expression with a group.
    """
    if pattern is not None:
        compiled = compile_pattern("--answer", pattern, needs_group=True)
        rule = f"the answer is group 1 of --answer {pattern}"
        return Answers(lambda _, text: last_answer(compiled, text) or "", rule, exist=True)
    known = [one for one in rewards if hasattr(one.call, "answer_of")]
    known.sort(key=lambda one: one.name != pass_reward)
    if not known:
        rule = (
            f"Majority vote: not computed, because the reward {pass_reward} does not say which answer a completion "
            "gives; give --answer REGEX"
        )
        return Answers(lambda *_: None, rule, exist=False)

    def answer_of(prompt: Prompt, text: str) -> str | None:
        teller = next((one.call for one in known if one.applies_to(prompt)), None)
        return None if teller is None else getattr(teller, "answer_of")(text) or ""  # noqa: B009

    names = " or ".join(one.name for one in known)
    return Answers(answer_of, f"the answer is the text that the reward {names} compares", exist=True)


def majority_correct(answers: Sequence[str], correct: Sequence[bool]) -> float:
    """Return whether the answer that most completions of a row give is correct.

    Completions without an answer, which are empty, have no vote. If several answers have the most votes, one of them is
    taken at random, and the result is the chance that it is correct. An answer whose completions are not all correct,
    or not all wrong, counts by the fraction of them that is correct. Without any answer the result is 0.
    """
    votes = Counter(filter(None, answers))
    if not votes:
        return 0.0
    most = max(votes.values())
    first = [answer for answer, number in votes.items() if number == most]
    right = sum(is_right for answer, is_right in zip(answers, correct, strict=True) if answer in first)
    return right / (most * len(first))
