"""GiGPO: turns that began in the same state are compared, by worked examples and by brute force."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest

from lit_grpo.methods.gigpo import GiGPO, states
from lit_grpo.types import OBSERVED, Completion, Prompt, Request, Rollout, RolloutGroup, SamplingParams

PROMPT = Prompt("a", (1, 2), "")
START, DOOR, KEY = (), (7, 7), (8,)


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


def test_an_episode_without_a_reward_takes_no_part() -> None:
    members = [
        episode(n, reward, [START], [value]) for n, (reward, value) in enumerate([(1, 4), (math.nan, 9), (0, 2)])
    ]
    first, _, third = GiGPO().credit(group(*members), [0.5, math.nan, -0.5])
    assert (first, third) == ([0.5 + 1], [-0.5 - 1])


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_formula(seed: int) -> None:
    """Turn by turn, over all pairs."""
    rng = random.Random(seed)
    members = []
    for sample in range(6):
        observed = [START, *(rng.choice([DOOR, KEY, (9,)]) for _ in range(rng.randint(0, 4)))]
        members.append(episode(sample, rng.random(), observed, [rng.random() for _ in observed]))
    advantages, gamma = [rng.random() for _ in members], 0.9
    found = []
    for member, advantage in zip(members, advantages, strict=True):
        mine: list[float] = []
        for t, state in enumerate(states(member.completion)):
            same = [
                sum(gamma**k * reward for k, reward in enumerate(other.turn_rewards[u:]))
                for other in members
                for u, its in enumerate(states(other.completion))
                if its == state
            ]
            value = sum(gamma**k * reward for k, reward in enumerate(member.turn_rewards[t:]))
            mine.append(advantage + 0.7 * (value - statistics.fmean(same)))
        found.append(mine)
    credit = GiGPO(weight=0.7, gamma=gamma).credit(group(*members), advantages)
    assert [len(turns) for turns in credit] == [len(turns) for turns in found]
    for turns, expected in zip(credit, found, strict=True):
        assert turns == pytest.approx(expected)


def test_rewards_that_are_not_one_a_turn_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Sample \(3,\) of prompt 'a' has 2 turns and 1 rewards of turns; the environ"
    ):
        GiGPO().credit(group(episode(3, 1.0, [START, DOOR], [1.0])), [0.0])
