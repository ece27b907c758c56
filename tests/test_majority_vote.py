"""The vote of a group as its reward: what it gives, and what is learned where it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hand_made import make_module

from lit_grpo.methods.majority_vote import MajorityVote
from lit_grpo.plugins import fresh
from lit_grpo.rewards import exact_match
from lit_grpo.rewards.function import RewardFunction
from lit_grpo.rewards.runner import Surroundings, TrainerState, call_arguments
from lit_grpo.types import Completion, Prompt, Request, Rollout, RolloutGroup, SamplingParams


class Scored:
    """What the vote makes of a group, called as a run calls it."""

    def __init__(self, texts: Sequence[str], truth: Any = None, messages: bool = False, **fields: Any) -> None:
        conversation = [{"role": "user", "content": "?"}] if messages else None
        prompt = Prompt("a", (1,), "", {} if truth is None else {"answer": truth}, messages=conversation)
        requests = [Request(prompt, (number,), SamplingParams()) for number in range(len(texts))]
        rollouts = [
            Rollout(prompt, Completion(request, [1], [0.0], [0], "stop", text))
            for request, text in zip(requests, texts, strict=True)
        ]
        logged: list[tuple[str, float]] = []
        surroundings = Surroundings(TrainerState(), lambda name, value: logged.append((name, value)))
        (function,) = fresh(MajorityVote(**fields)).rewards
        (arguments,) = call_arguments(function, RolloutGroup(prompt, rollouts), surroundings)
        self.values: list[Any] = function.score(arguments, len(texts))
        self.metrics, self.extra = dict(logged), [rollout.extra for rollout in rollouts]


def test_the_answer_of_most_is_rewarded() -> None:
    scored = Scored(["5", " 4", "4 ", "6", "4"])
    assert scored.values == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert scored.metrics == {"majority/share": 0.6, "majority/labelled": 1.0}
    assert scored.extra == [{"majority_label": "4"}] * 5


@pytest.mark.parametrize(
    ("texts", "fields", "share"),
    [
        (["1", "1", "2", "2", "3"], {}, 0.4),  # a tie
        (["", " ", ""], {}, 0.0),  # nobody answers
        (["no"], {"pattern": "#(.*)"}, 0.0),
        (["1", "1", "2", "3"], {"least_share": 0.6}, 0.5),  # too few
    ],
)
def test_without_a_majority_the_reward_says_nothing(texts: list[str], fields: dict[str, Any], share: float) -> None:
    scored = Scored(texts, truth="1", **fields)
    assert scored.values == [None] * len(texts)
    assert scored.metrics == {"majority/share": share, "majority/labelled": 0.0}


@pytest.mark.parametrize("texts", [["7", "7", "8"], ["7"], ["7", "7"], ["7", "x", "7", "y", "z"]])
def test_where_the_majority_is_right_it_is_the_reward_by_the_true_answer(texts: list[str]) -> None:
    scored = Scored(texts, truth=7)
    assert scored.values == [exact_match(completion=text, answer=7) for text in texts]
    assert scored.metrics["majority/right"] == scored.metrics["majority/reward_right"] == 1.0


def test_where_the_majority_is_wrong_the_figures_say_so() -> None:
    scored = Scored(["5", "5", "5", "4"], truth="4")
    assert scored.values == [1.0, 1.0, 1.0, 0.0]
    assert (scored.metrics["majority/right"], scored.metrics["majority/reward_right"]) == (0.0, 0.0)
    lucky = Scored(["1", "1", "2", "3", "4", "5"], truth="9")
    assert lucky.values == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]  # four of six are given as the true answer would have them
    assert lucky.metrics["majority/reward_right"] == pytest.approx(4 / 6)


def test_a_module_is_scored_by_it_too() -> None:
    """Beside rewards of its own, or alone."""
    for rewards, names in (([], ["majority_vote"]), (["exact_match"], ["exact_match", "majority_vote"])):
        module = make_module("tiny", rewards=rewards)
        functions: Sequence[RewardFunction] = fresh(MajorityVote(weight=0.5)).rewards
        for _ in range(2):  # each run joins them
            module.join_rewards(functions)
        assert [function.name for function in module.rewards] == names
        assert module.settings.weights["majority_vote"] == 0.5 and module.settings.pass_rule.reward == names[0]
