"""Lower bounds on decode steps, beside all schedules of small cases."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from lit_grpo.scheduling.plans.plan import memory_bound, slot_bound


def least_steps(lengths: list[int], num_slots: int) -> int:
    """Try every assignment of completions to slots."""
    deals = itertools.product(range(num_slots), repeat=len(lengths))
    return min(max(np.bincount(lanes, weights=lengths)) for lanes in deals)


def least_steps_in_memory(lengths: list[int], prompts: list[int], groups: list[int], slots: int, kv: int) -> int:
    """Try every schedule: in each step any set of unfinished completions whose KV tokens fit, the others keep theirs
    nowhere, as if they were set aside."""
    numbers = range(len(lengths))

    def held(done: tuple[int, ...], chosen: tuple[int, ...]) -> int:
        shared = {groups[number]: prompts[number] for number in chosen}
        return sum(done[number] + 1 for number in chosen) + sum(shared.values())

    @functools.cache
    def steps(done: tuple[int, ...]) -> int:
        left = [number for number in numbers if done[number] < lengths[number]]
        if not left:
            return 0
        choices = (
            chosen for size in range(1, slots + 1) for chosen in itertools.combinations(left, size)
            if held(done, chosen) <= kv
        )  # fmt: skip
        return 1 + min(steps(tuple(done[n] + (n in chosen) for n in numbers)) for chosen in choices)

    return steps((0,) * len(lengths))


def test_the_bound_is_the_longest_or_the_share_of_a_slot_or_two_of_a_crowd() -> None:
    assert slot_bound(np.array([9, 1, 1]), 3) == 9
    assert slot_bound(np.array([5, 5, 5, 2]), 4) == 5
    assert slot_bound(np.array([4, 3, 3, 3, 3]), 3) == 6  # two of four in one slot: 3 + 3, where 16 / 3 gives 6
    assert slot_bound(np.array([5, 5, 5]), 2) == 10  # pigeonhole; the longest is 5, the share 7.5
    assert slot_bound(np.array([4, 4, 4, 4, 4]), 2) == 12
    assert slot_bound(np.array([]), 2) == 0


def test_no_schedule_takes_fewer_steps_than_the_bound() -> None:
    rng = np.random.default_rng(0)
    tight = 0
    for _ in range(60):
        num_slots = int(rng.integers(1, 4))
        lengths = rng.integers(1, 20, rng.integers(1, 7)).tolist()
        best = least_steps(lengths, num_slots)
        assert slot_bound(np.array(lengths), num_slots) <= best
        tight += slot_bound(np.array(lengths), num_slots) == best
    assert tight >= 40


def test_no_schedule_within_a_kv_budget_takes_fewer_steps_than_the_bound() -> None:
    rng = np.random.default_rng(0)
    above_slots = 0
    for _ in range(40):
        groups = sorted(rng.integers(0, 2, 4).tolist())
        prompts = [[3, 1][group] for group in groups]
        lengths = rng.integers(1, 5, 4).tolist()
        kv = max(np.add(prompts, lengths)) + int(rng.integers(0, 4))
        bound = memory_bound(groups, np.array(prompts), np.array(lengths), 3, kv)
        assert bound <= least_steps_in_memory(lengths, prompts, groups, 3, kv)
        above_slots += bound > slot_bound(np.array(lengths), 3)
    assert above_slots >= 10
