"""GiGPO: turns that began in the same state are compared, by worked examples and by brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from lit_grpo.methods.gigpo import GiGPO
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


def test_rewards_that_are_not_one_a_turn_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Sample \(3,\) of prompt 'a' has 2 turns and 1 rewards of turns; the environ"
    ):
        GiGPO().credit(group(episode(3, 1.0, [START, DOOR], [1.0])), [0.0])
