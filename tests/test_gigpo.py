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


def test_the_state_of_a_turn_is_what_was_observed_right_before_it() -> None:
    assert states(episode(0, 1.0, [START, DOOR, KEY], ()).completion) == [START, DOOR, KEY]
    cut = Completion(Request(PROMPT, (0,), SamplingParams()), [3, 4, 5, 6], [0.0] * 4, [0, 1, OBSERVED, 1], "stop")
    assert states(cut) == [(), (5,)]  # two versions of one turn


def test_turns_are_compared_with_those_that_began_in_the_same_state() -> None:
    first = episode(0, 1.0, [START, DOOR], [2.0, 2.0])  # returns 4 and 2
    second = episode(1, 0.0, [START, DOOR], [-3.0, 4.0])  # returns 1 and 4
    third = episode(2, 0.0, [START, KEY], [-3.0, 4.0])  # returns 1 and 4
    credit = GiGPO(gamma=1.0).credit(group(first, second, third), [0.5, -0.25, -0.25])
    assert credit == [[0.5 + 2, 0.5 - 1], [-0.25 - 1, -0.25 + 1], [-0.25 - 1, -0.25]]
    halved = GiGPO(weight=0.5, gamma=1.0).credit(group(first, second, third), [0.5, -0.25, -0.25])
    assert halved == [[0.5 + 1, 0.5 - 0.5], [-0.25 - 0.5, -0.25 + 0.5], [-0.25 - 0.5, -0.25]]


def test_scaled_turns_are_divided_by_the_deviations_of_those_compared() -> None:
    members = [episode(n, 0.0, [START], [value]) for n, value in enumerate((4.0, 1.0, 1.0))]
    credit = GiGPO(scale=True).credit(group(*members), [0.0, 0.0, 0.0])
    start = math.sqrt(3.0) + 1e-4
    assert [value for (value,) in credit] == pytest.approx([2 / start, -1 / start, -1 / start])


def test_an_episode_without_a_reward_takes_no_part() -> None:
    members = [
        episode(n, reward, [START], [value]) for n, (reward, value) in enumerate([(1, 4), (math.nan, 9), (0, 2)])
    ]
    first, _, third = GiGPO().credit(group(*members), [0.5, math.nan, -0.5])
    assert (first, third) == ([0.5 + 1], [-0.5 - 1])


def test_without_rewards_of_turns_the_last_turn_has_that_of_the_rollout() -> None:
    members = [episode(0, 1.0, [START, DOOR], ()), episode(1, 0.0, [START, DOOR], ())]
    credit = GiGPO(gamma=0.5).credit(group(*members), [0.0, 0.0])
    assert credit == [[0.25, 0.5], [-0.25, -0.5]]


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
