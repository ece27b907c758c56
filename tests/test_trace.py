"""TRACE: which anchors a group goes on from, by brute force, and what its predictor learns."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made import Environment, make_rollout
from test_trees import PROMPTS, SAMPLING, Found, by_prompt, sampler, tokens

from lit_grpo.methods.trace import ContrastiveTree, anchors, divided, features
from lit_grpo.plugins import GroupBatch, fresh
from lit_grpo.types import (
    EMPTY,
    OBSERVED,
    Completion,
    PassRule,
    Prompt,
    Request,
    Rollout,
    RolloutGroup,
    Trajectory,
    alone,
)

PASSES = PassRule("r")


@pytest.fixture(scope="module")
def collect(policy_folder: Path) -> Callable[..., tuple[Found, Any]]:
    """Samples groups of so many first paths, with an environment and these listeners."""
    sample = sampler(policy_folder)
    return lambda num_slots, size, *listeners: sample(num_slots, size, Environment(3), *listeners)


# ---- the division ----------------------------------------------------------------------------------------


def mixed(chance: float, number: int) -> float:
    """That so many outcomes are not all the same: 1 less the chances that all or none pass."""
    outcomes = itertools.product((True, False), repeat=number)
    return sum(
        math.prod(chance if passed else 1 - chance for passed in each) for each in outcomes if len(set(each)) == 2
    )


@pytest.mark.parametrize("seed", range(30))
def test_no_other_division_has_more_groups_with_both_outcomes(seed: int) -> None:
    rng = random.Random(seed)
    chances = [rng.choice([0.02, 0.5, 0.98, rng.random()]) for _ in range(rng.randint(1, 4))]
    numbers, budget = [rng.randint(1, 4) for _ in chances], rng.randint(0, 5)

    def worth(more: tuple[int, ...] | list[int]) -> float:
        return sum(mixed(p, n + m) for p, n, m in zip(chances, numbers, more, strict=True))

    divisions = [each for each in itertools.product(range(budget + 1), repeat=len(chances)) if sum(each) == budget]
    found = divided(chances, numbers, budget)
    assert sum(found) == budget
    assert worth(found) == pytest.approx(max(map(worth, divisions)), abs=1e-12)


# ---- in a rollout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [2, 32])
def test_a_group_goes_on_from_its_anchors_by_the_division(num_slots: int, collect: Any) -> None:
    worker = fresh(ContrastiveTree(width=20, window=4))
    worker.chances = lambda features: 0.1 + 0.8 * (np.abs(features[:, -1]) % 1)  # by the number of tokens, to have some
    found, stats = collect(num_slots, 8, worker)
    for prompt, members in by_prompt(found).items():
        assert len(members) == 20
        first = [found[key] for key in members if len(key[2]) == 1]
        ids = next(each.token_ids for each in PROMPTS if each.prompt_id == prompt)
        turns = [anchor for path in first for anchor in anchors(path)[1:]]
        roots = [anchors(path)[0] for path in first]
        assert all(not anchor.num_tokens for anchor in roots)
        chances = worker.chances(np.array([features(ids, anchor, 4) for anchor in [*turns, EMPTY]])).tolist()
        more = divided(chances, [1] * len(turns) + [8], 12)
        expected = sorted((anchor.num_tokens, number) for anchor, number in zip(turns, more, strict=False) if number)
        counts: dict[tuple[Any, int], int] = {}
        for key in members:
            if len(key[2]) == 1:
                continue
            parent, branch = found[(*key[:2], key[2][:-1])], found[key]
            begins = [anchor.num_tokens for anchor in anchors(parent)[1:]]
            shared = max(
                (place for place in begins if branch.token_ids_T[:place].equal(parent.token_ids_T[:place])), default=0
            )
            counts[key[2][:-1], shared] = counts.get((key[2][:-1], shared), 0) + 1
        filled = sum(number for (_, shared), number in counts.items() if not shared)
        assert filled == more[-1]
        assert sorted((shared, number) for (_, shared), number in counts.items() if shared) == expected
    saved = worker.metrics(alone)["rollout/branched_tokens_saved"]
    assert saved > 0
    sampled = sum(each.num_sampled for each in found.values())
    assert stats.num_tokens == sampled - saved


def test_what_is_sampled_does_not_depend_on_the_slots(collect: Any) -> None:
    few, many = (tokens(collect(slots, 8, fresh(ContrastiveTree(20)))[0]) for slots in (2, 32))
    assert few == many and len(few) == 60


# ---- what is learned ----------------------------------------------------------------------------------------


def path(number: int, said: int, heard: int, tail: int) -> Completion:
    """Two turns, of which the second begins after an observed token that says how it ends."""
    request = Request(PROMPTS[0], (number,), SAMPLING)
    return Completion(request, [said, heard, tail], [-0.1] * 3, [0, OBSERVED, 0], "stop")


def batch(rng: random.Random, visit: int) -> list[RolloutGroup]:
    """Whoever hears 7 passes nine times in ten, whoever hears 8 one time in ten."""
    prompt = Prompt("a", (2, 3, 4), "", visit=visit)
    rollouts: list[Rollout] = []
    for number in range(16):
        heard = rng.choice([7, 8])
        passed = float(rng.random() < (0.9 if heard == 7 else 0.1))
        rollout = make_rollout([2, 3, 4], [5], passed, sample_id=number)
        rollout.completion = path(number, rng.choice([5, 6]), heard, rng.choice([9, 10]))
        rollout.rewards = {"r": passed}
        rollouts.append(rollout)
    return [RolloutGroup(prompt, rollouts)]


def learn(worker: ContrastiveTree, num_batches: int) -> dict[str, float]:
    rng, logs = random.Random(0), {}
    worker.on_rollout_start(None)  # pyrefly: ignore[bad-argument-type]
    for visit in range(num_batches):
        logs = worker.on_update_end(GroupBatch(batch(rng, visit), visit, PASSES, lambda value: [value]))
    return logs


def chances(worker: ContrastiveTree) -> list[float]:
    turns = [anchors(path(0, 5, heard, 9))[1] for heard in (7, 8)]
    return worker.chances(np.array([features((2, 3, 4), each, 32) for each in [*turns, EMPTY]])).tolist()


def test_it_learns_which_turns_pass() -> None:
    worker = fresh(ContrastiveTree())
    assert chances(worker) == [0.5, 0.5, 0.5]
    logs = learn(worker, 12)
    good, bad, root = chances(worker)
    assert good > 0.75 and bad < 0.25 and 0.35 < root < 0.65
    assert logs["trace/explained"] > 0.15  # half of the rows are the prompt's, which explain nothing
    assert math.isnan(logs["trace/contrast"])


def test_a_checkpoint_keeps_what_was_learned() -> None:
    worker, other = fresh(ContrastiveTree()), fresh(ContrastiveTree())
    learn(worker, 3)
    other.load_state_dict(worker.state_dict())
    assert chances(other) == chances(worker) != [0.5] * 3


def test_members_without_a_reward_teach_nothing() -> None:
    groups = batch(random.Random(0), 0)
    for rollout in groups[0].rollouts:
        rollout.reward = math.nan
    worker = fresh(ContrastiveTree())
    worker.on_rollout_start(None)  # pyrefly: ignore[bad-argument-type]
    assert worker.on_update_end(GroupBatch(groups, 0, PASSES, lambda value: [value])) == {}
    assert chances(worker) == [0.5] * 3


def test_ranks_learn_as_one() -> None:
    """Two ranks with a group each end as one that has both, and log the same."""
    rng = random.Random(1)
    first, second = batch(rng, 0), batch(rng, 1)
    alone, ranks = fresh(ContrastiveTree()), fresh(ContrastiveTree())
    for worker in (alone, ranks):
        worker.on_rollout_start(None)  # pyrefly: ignore[bad-argument-type]
    theirs = iter([[row for each in second[0].rollouts for row in ranks._rows(each, PASSES)], []])
    logged = alone.on_update_end(GroupBatch([*first, *second], 0, PASSES, lambda value: [value]))
    together = ranks.on_update_end(GroupBatch(first, 0, PASSES, lambda value: [value, next(theirs)]))
    assert together["trace/explained"] == pytest.approx(logged["trace/explained"])
    assert chances(ranks) == pytest.approx(chances(alone))


def test_anchors_are_what_a_path_had_come_to_as_its_turns_began() -> None:
    versions = [OBSERVED, 0, 0, OBSERVED, OBSERVED, 1, 2, OBSERVED]
    found = anchors(Trajectory(range(8), [0.0] * 8, versions))
    assert [each.num_tokens for each in found] == [1, 5]
    assert anchors(EMPTY) == []


def test_features_tell_tokens_their_order_and_their_places_apart() -> None:
    def of(*ids: int, window: int = 2) -> bytes:
        return features((2,), Trajectory(ids, [0.0] * len(ids), [0] * len(ids)), window).tobytes()

    assert of(5, 6, 7) != of(5, 6, 8) and of(5, 6, 7) != of(5, 7, 6)
    assert of(5, 6, 7, 8) == of(6, 5, 7, 8)  # what is before the last tokens counts without order
    assert of(5, 6, 7, 8) != of(5, 6, 7, 8, 8)
