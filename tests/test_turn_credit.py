"""MT-GRPO and returns to go: by worked examples, by brute force in float64, and where they are plain GRPO."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hand_made import credited

from lit_grpo.compatibility import ONE_TURN, check_together
from lit_grpo.methods import make_plugins
from lit_grpo.methods.gigpo import GiGPO
from lit_grpo.methods.kevin import ReturnToGo
from lit_grpo.methods.mt_grpo import MTGRPO
from lit_grpo.plugins import Plugin, RunFacts
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.tasks import Catch
from lit_grpo.tasks.calculator import calculate
from lit_grpo.types import OBSERVED, Completion, Prompt, Request, Rollout, RolloutGroup, SamplingParams
from lit_grpo.update.objective.objective import Objective

PROMPT = Prompt("a", (1, 2), "")
START, KEY = (), (8,)
EPSILON = 1e-4


def episode(sample: int, reward: float, observed: Sequence[Sequence[int]], rewards: Sequence[float]) -> Rollout:
    """A rollout of turns of two tokens, before each of which something is observed; nothing before the first."""
    tokens, versions = [], []
    for state in observed:
        tokens += [*state, 3, 4]
        versions += [OBSERVED] * len(state) + [0, 0]
    request = Request(PROMPT, (sample,), SamplingParams())
    completion = Completion(request, tokens, [0.0] * len(tokens), versions, "stop")
    return Rollout(PROMPT, completion, {"r": reward}, reward, turn_rewards=tuple(rewards))


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(PROMPT, list(rollouts))


def episodes(*rewards: Sequence[float], outcomes: Sequence[float] | None = None) -> RolloutGroup:
    """A group whose turns earned these rewards."""
    return group(
        *(
            episode(n, 0.0 if outcomes is None else outcomes[n], [START, *[KEY] * (len(its) - 1)], its)
            for n, its in enumerate(rewards)
        )
    )


def test_without_weight_or_rewards_by_turn_it_is_plain_grpo() -> None:
    members = episodes([1.0, 4.0], [3.0, 2.0])
    assert credited(MTGRPO(weight=0.0), members, [0.7, -0.7]) == [[0.7, 0.7], [-0.7, -0.7]]
    silent = [episode(0, 1.0, [START, KEY], ()), episode(1, 0.0, [START, KEY], ())]
    assert credited(MTGRPO(), group(*silent), [0.7, -0.7]) == [[0.7, 0.7], [-0.7, -0.7]]


@pytest.mark.parametrize("seed", range(5))
def test_they_are_their_formulas(seed: int) -> None:
    """In float64, turn by turn."""
    rng = random.Random(seed)
    rewards = [[rng.random() for _ in range(rng.randint(1, 5))] for _ in range(6)]
    advantages = [rng.random() for _ in rewards]
    members = episodes(*rewards)

    def normal(value: float, others: list[float]) -> float:
        all_of = torch.tensor(others, dtype=torch.float64)
        return 0.0 if len(others) == 1 else float((value - all_of.mean()) / (all_of.std() + EPSILON))

    expected = [
        [advantage + normal(reward, [other[t] for other in rewards if t < len(other)]) for t, reward in enumerate(its)]
        for its, advantage in zip(rewards, advantages, strict=True)
    ]
    found = credited(MTGRPO(), members, advantages)
    for turns, wanted in zip(found, expected, strict=True):
        assert turns == pytest.approx(wanted, rel=1e-12)
    returns = [[sum(0.4**k * reward for k, reward in enumerate(its[t:])) for t in range(len(its))] for its in rewards]
    expected = [[normal(value, sum(returns, [])) for value in its] for its in returns]  # noqa: RUF017
    for turns, wanted in zip(credited(ReturnToGo(), members, advantages), expected, strict=True):
        assert turns == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("credit", [MTGRPO(scale=False), ReturnToGo(scale=False, gamma=0.0), GiGPO()])
def test_an_episode_without_a_reward_takes_no_part(credit: Plugin) -> None:
    members = episodes([4.0], [9.0], [2.0], outcomes=[1.0, math.nan, 0.0])
    first, _, third = credited(credit, members, [0.0, math.nan, 0.0])
    weight = getattr(credit, "weight", 1.0)
    assert (first, third) == ([weight], [-weight])


@pytest.mark.parametrize("credit", [GiGPO(), MTGRPO(), ReturnToGo()])
def test_rewards_that_are_not_one_a_turn_are_refused(credit: Plugin) -> None:
    with pytest.raises(ValueError, match=r"Sample \(3,\) of prompt 'a' has 2 turns and 1 rewards of turns; the envir"):
        credited(credit, group(episode(3, 1.0, [START, KEY], [1.0])), [0.0])


FACTS = RunFacts(num_prompts=4, num_generations=4, max_tokens=64, updates_per_batch=1, max_observed=64)


def test_rewards_of_turns_that_no_environment_gives_and_a_single_turn_are_refused() -> None:
    for told, message in (
        (
            {"tools": [calculate]},
            "mt_grpo needs a reward for each turn, .* environments has tools alone, without a method",
        ),
        ({"factory": Catch, "max_turns": 1}, "mt_grpo needs completions of several turns, but .* has max_turns 1"),
    ):
        with pytest.raises(ValueError, match=message):
            RolloutSession(make_plugins([{"environments": told}, "mt_grpo"])).check(FACTS, [])
    with pytest.raises(
        ValueError, match=r"ratio turn needs completions of several turns, .*; take ratio sequence, or add"
    ):
        check_together([*Objective(ratio="turn").parts, ONE_TURN])
