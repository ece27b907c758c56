"""Which rollouts are learnt from: against all subsets, and in a learner."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch

from lit_grpo.types import Completion, Prompt, Request, Rollout, RolloutGroup, SamplingParams
from lit_grpo.update.advantages.estimator import GroupRewards
from lit_grpo.update.advantages.functions import group_advantages
from lit_grpo.update.selection import Selection, max_variance_subset

KINDS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "binary": lambda rng, n: rng.integers(0, 2, n).astype(float),
    "one loser": lambda rng, n: np.array([0.0] + [1.0] * (n - 1))[rng.permutation(n)],
    "few values": lambda rng, n: rng.choice([0.0, 0.1, 1.0, -3.0], n),
    "equal": lambda rng, n: np.full(n, 0.7),
    "far from zero": lambda rng, n: 1e6 + rng.standard_normal(n),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_subset_of_the_largest_variance_is_one_of_all_subsets(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    number = int(rng.integers(2, 12))
    values = KINDS[kind](rng, number)
    for size in range(2, number + 1):
        chosen = max_variance_subset(torch.tensor(values), size)
        assert len(set(chosen.tolist())) == len(chosen) == size
        best = max(statistics.pvariance(some) for some in itertools.combinations(values.tolist(), size))
        assert statistics.pvariance(values[chosen.numpy()].tolist()) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_of_two_rewards_half_of_each_is_kept_where_there_are_so_many() -> None:
    rewards = torch.tensor([1.0] * 9 + [0.0] * 7)
    assert rewards[max_variance_subset(rewards, 6)].tolist() == [1.0] * 3 + [0.0] * 3
    one_right = torch.tensor([0.0] * 7 + [1.0])
    assert 7 in max_variance_subset(one_right, 4).tolist()  # the only winner stays
    assert 7 in max_variance_subset(1 - one_right, 4).tolist()  # and so does the only loser


def groups_of(*rewards: list[float]) -> list[RolloutGroup]:
    groups = []
    for number, values in enumerate(rewards):
        prompt = Prompt(f"train/{number}", (5,), "")
        requests = [Request(prompt, (n,), SamplingParams()) for n in range(len(values))]
        two = torch.ones(2), torch.zeros(2), torch.zeros(2).long()
        completions = [Completion(request, two[0].long(), *two[1:], "stop") for request in requests]
        members = zip(completions, values, strict=True)
        groups.append(RolloutGroup(prompt, [Rollout(prompt, c, {"right": r}, r) for c, r in members]))
    return groups


class RanksInTurn:
    """Ranks that are computed one after another, twice: the first time what they gather is noted."""

    own = 0

    def __init__(self, size: int) -> None:
        self.given: list[Any] = [None] * size

    def gather(self, value: Any) -> list[Any]:
        self.given[self.own] = value
        return [value] if None in self.given else self.given


def advantages(selection: Selection, groups: list[RolloutGroup], size: int = 1) -> list[list[float]]:
    """As a learner on each of so many ranks makes them, by group."""
    ranks: Any = RanksInTurn(size)
    found: dict[int, list[float]] = {}
    for own in [*range(size), *range(size)]:
        ranks.own, part = own, groups[own::size]
        rollouts = [rollout for group in part for rollout in group.rollouts]
        advantages_R = selection.advantages(
            GroupRewards.of(part, ["right"]), rollouts, lambda r: group_advantages(r.rewards_R, r.groups_R), ranks
        )
        of_groups = advantages_R.split([len(group.rollouts) for group in part])
        found |= {own + n * size: advantages_N.tolist() for n, advantages_N in enumerate(of_groups)}
    return [found[n] for n in range(len(groups))]


def known(values: list[float]) -> dict[int, float]:
    return {place: round(value, 4) for place, value in enumerate(values) if value == value}


REWARDS = [[1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.2, 0.9, math.nan, 0.1, 0.4, 0.8], [1.0] * 6]


def test_statistics_are_of_the_kept_or_of_the_group() -> None:
    groups = groups_of(*REWARDS)
    kept = [known(values) for values in advantages(Selection("max_variance", 2), groups)]
    half = 0.5 / (0.5**0.5 + 1e-4)
    assert kept[0][0] == round(half, 4) and list(kept[0].values()) == [round(half, 4), round(-half, 4)]
    assert kept[1].keys() == {1, 3} and list(kept[2].values()) == [0.0, 0.0]
    whole = [known(values) for values in advantages(Selection("max_variance", 2, "group"), groups)]
    everyone = [known(values) for values in advantages(Selection(), groups)]
    for part, all_of_it in zip(whole, everyone, strict=True):
        assert part == {place: all_of_it[place] for place in part} and len(part) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_extremes_of_a_batch_may_all_be_of_one_group(ranks: int) -> None:
    groups = groups_of([1.0] + [0.0] * 7, [0.5] * 8, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    found = advantages(Selection("batch_variance", 2), groups, ranks)
    whole = advantages(Selection(), groups)
    flat, picked = (list(itertools.chain(*lists)) for lists in (whole, found))
    kept = [value for value in picked if value == value]
    assert len(kept) == 2 * 3
    best = max(statistics.pvariance(some) for some in itertools.combinations(flat, 6))
    assert statistics.pvariance(kept) == pytest.approx(best)
    assert all(a == b for a, b in zip(picked, flat, strict=True) if a == a)  # not normalised again
    assert not known(found[1])


def test_random_members_are_the_same_in_every_run_and_others_in_every_group() -> None:
    groups = groups_of(*[[float(n) for n in range(12)]] * 20)
    first = [tuple(known(values)) for values in advantages(Selection("random", 4), groups)]
    assert first == [tuple(known(values)) for values in advantages(Selection("random", 4), groups, 2)]
    assert all(len(members) == 4 for members in first) and len(set(first)) > 15


def test_all_keeps_everyone() -> None:
    groups = groups_of(*REWARDS)
    rewards = GroupRewards.of(groups, ["right"])
    expected = group_advantages(rewards.rewards_R, rewards.groups_R)
    found = torch.tensor(list(itertools.chain(*advantages(Selection(), groups))))
    assert torch.equal(found.nan_to_num(9), expected.nan_to_num(9))


@pytest.mark.parametrize("rule", ["max_variance", "batch_variance", "random"])
def test_members_that_have_left_with_another_part_of_their_group_take_no_place(rule: Any) -> None:
    (group,) = groups_of([1.0, 0.0, 0.9, 0.1, 0.5, 0.4])
    for rollout in group.rollouts[:2]:
        rollout.kept, rollout.learnt = False, True
    (found,) = advantages(Selection(rule, 2, "group"), [group])
    assert len(known(found).keys() - {0, 1}) == 2


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"rule": "best", "keep": 4},
        "selection.rule must be one of all, max_variance, batch_variance, random, not 'best'.",
    ),
    ({"rule": "random"}, "selection.rule is random and selection.keep is None"),
    ({"keep": 4}, "selection.rule is all and selection.keep is 4"),
    ({"rule": "random", "keep": 1}, "selection.keep must be at least 2, not 1"),
    (
        {"rule": "batch_variance", "keep": 4, "statistics": "kept"},
        "selection.statistics must be group for rule batch_variance, not 'kept'.",
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), BAD)
def test_what_has_no_meaning_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        Selection(**fields)
    assert sentence in str(error.value)


def test_a_subset_larger_than_its_group_is_refused() -> None:
    Selection("random", 8).check(8)
    with pytest.raises(ValueError, match=r"selection\.keep is 9, but model\.num_generations is 8; keep at most"):
        Selection("random", 9).check(8)
