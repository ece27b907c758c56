"""Which completions are stopped early: the head that foretells success, and the choice among a group."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hand_made import alone, plugin
from test_loop import SAMPLING, FakeGenerator, prompts

from lit_grpo.budgets.subsets import nearest_subset
from lit_grpo.methods.arrol import Arrol, QualityHead, calibration_error, is_left_whole, within_auc
from lit_grpo.plugins import GroupBatch, RunFacts, fresh
from lit_grpo.rollout.generator import Observation, StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.types import Completion, PassRule, RolloutGroup

AT = 2
NAMES = [name for name in "abcdefghijklmnop" if not is_left_whole((name, 0))]
WHOLE = next(f"w{n}" for n in range(100) if is_left_whole((f"w{n}", 0)))


class ShowingGenerator(FakeGenerator):
    """Shows of each completion that has come to ``AT`` tokens and goes on whether it is ``good``."""

    def __init__(self, slots: int, lengths: dict[str, list[int]], good: dict[str, list[int]]) -> None:
        super().__init__(slots, lengths)
        self.good = good

    def step(self) -> StepEvents:
        has = {key: self.lengths[key[0]][key[2][0]] - left for key, left in self.remaining.items()}
        events = super().step()
        if keys := [key for key, count in has.items() if count == AT]:
            features = np.stack([shown(self.good[name][path[0]]) for name, _, path in keys])
            events.observations = [Observation(keys, AT, features)]
        return events


def shown(good: float) -> np.ndarray:
    return np.array([2.0 * good - 1, 0.5, 0.1, -1.0], dtype=np.float32)


def make_pruner(*, proven: bool, keep: float = 0.5) -> Arrol:
    """A pruner whose head has seen that the first feature tells all, or that it tells nothing."""
    pruner = fresh(Arrol(AT, keep, 0.5))
    for _ in range(6):
        good = np.tile([0, 1, 0, 1, 1, 0, 0, 1], 4)
        success = good if proven else np.repeat([0, 1], 16)
        groups = np.arange(32) % 16 // 2 if not proven else np.arange(32) // 8
        teach(pruner.head, np.stack([shown(each) for each in good]), success, groups)
    assert pruner.head.proven == proven
    return pruner


def teach(head: QualityHead, features: np.ndarray, success: np.ndarray, groups: np.ndarray) -> None:
    head.learn(features, success, groups, np.ones(len(success)), np.zeros(0))


def collect(pruner: Arrol, slots: int, lengths: dict[str, list[int]], good: dict[str, list[int]]) -> Any:
    loop = RolloutLoop(ShowingGenerator(slots, lengths, good), listeners=[pruner], points=(AT,))
    size = len(next(iter(lengths.values())))
    groups, stats = loop.collect(prompts(*lengths), size, SAMPLING, seed=0)
    assert sum(stats.lengths) == stats.num_tokens  # what was dropped among it
    return {
        group.prompt.prompt_id: [rollout.completion.request.path[0] for rollout in group.rollouts] for group in groups
    }


def reward(groups: list[RolloutGroup], good: dict[str, list[int]]) -> None:
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward = float(good[group.prompt.prompt_id][rollout.completion.request.path[0]])
            rollout.rewards = {"good": rollout.reward}


@pytest.mark.parametrize("seed", range(40))
def test_the_chosen_subset_is_the_best_of_all_of_its_size(seed: int) -> None:
    random = np.random.RandomState(seed)
    size_of_all, share = random.randint(2, 11), random.choice([0.25, 0.5, 0.9])
    chances = random.choice(random.randint(0, 101, 5) / 100, size_of_all)
    stays = random.rand(size_of_all) < 0.3
    others = np.flatnonzero(~stays).tolist()
    size = random.randint(0, len(others) + 1)
    chosen = nearest_subset(chances, stays, size, share)
    assert chosen[stays].all() and chosen.sum() == stays.sum() + size

    def off(rows: Any) -> float:
        return abs(chances[[*np.flatnonzero(stays), *rows]].sum() - share * (stays.sum() + size))

    best = min(off(rows) for rows in combinations(others, size))
    assert off([row for row in others if chosen[row]]) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("slots", [4, 64])  # a slot is given up at the point, or all decode at once
def test_survivors_are_balanced_and_one_group_in_eight_is_left_whole(slots: int) -> None:
    names = [*NAMES[:3], WHOLE]
    good = {names[0]: [1] * 5 + [0] * 3, names[1]: [0] * 7 + [1], names[2]: [1] * 8, WHOLE: [1, 0] * 4}
    pruner = make_pruner(proven=True)
    groups = collect(pruner, slots, {name: [9, 8, 7, 6, 9, 8, 7, 6] for name in names}, good)
    successes = [sum(good[name][path] for path in groups[name]) for name in names]
    assert [len(groups[name]) for name in names] == [4, 4, 4, 8]
    assert successes == [2, 1, 4, 4]
    figures = pruner.metrics(alone)
    assert figures["rollout/pruned_completions"] == 12
    assert figures["rollout/discarded_tokens"] == 12 * (AT + 1)
    assert 0 < figures["rollout/pruned_tokens_saved"] <= 12 * (9 - AT - 1)


def test_nobody_is_dropped_before_the_head_is_proven() -> None:
    good = {name: [1, 0] * 4 for name in NAMES}
    for pruner in (make_pruner(proven=False), fresh(Arrol(AT, 0.5, 0.5))):
        groups = collect(pruner, 8, {name: [6] * 8 for name in NAMES}, good)
        assert all(len(group) == 8 for group in groups.values())
        assert pruner.metrics(alone)["rollout/pruned_completions"] == 0


@pytest.mark.parametrize("ended", [0, 1, 2, 5])
def test_two_survive_at_least_and_what_has_ended_stays(ended: int) -> None:
    name = NAMES[0]
    lengths, good = {name: [1] * ended + [8] * (6 - ended)}, {name: [1, 0, 1, 0, 1, 0]}
    (group,) = collect(make_pruner(proven=True, keep=0.0), 64, lengths, good).values()
    assert len(group) == max(ended, 2) and group[:ended] == list(range(ended))


def test_a_completion_of_whom_nothing_finite_is_known_stays() -> None:
    name = NAMES[0]
    good: Any = {name: [math.nan, 1, 0, 1, 0, 1]}
    (group,) = collect(make_pruner(proven=True, keep=0.01), 64, {name: [8] * 6}, good).values()
    assert 0 in group and len(group) == 2


def test_a_member_that_ends_as_it_comes_to_the_point_is_no_longer_dropped() -> None:
    name = NAMES[0]
    good = {name: [1] * 6}
    (group,) = collect(make_pruner(proven=True, keep=0.01), 64, {name: [AT + 1] * 5 + [8]}, good).values()
    assert group == [0, 1, 2, 3, 4, 5]  # five have ended, and one of one goes on


def test_what_pruning_does_to_the_mean_reward_is_measured_where_it_is_not_done() -> None:
    pruner, good = make_pruner(proven=True), {WHOLE: [1, 1, 1, 1, 1, 1, 0, 0]}
    loop = RolloutLoop(ShowingGenerator(64, {WHOLE: [8] * 8}, good), listeners=[pruner], points=(AT,))
    groups, _ = loop.collect(prompts(WHOLE), 8, SAMPLING, seed=0)
    reward(groups, good)
    assert pruner.on_update_end(GroupBatch(groups, 1, PassRule("good"), alone))[
        "pruning/reward_shift"
    ] == pytest.approx(0.5 - 0.75)


def test_nothing_is_trained_on_what_is_replayed() -> None:
    states = []
    for replays in (False, True):
        pruner, good = make_pruner(proven=True), {WHOLE: [1, 1, 1, 1, 1, 1, 0, 0]}
        loop = RolloutLoop(ShowingGenerator(64, {WHOLE: [8] * 8}, good), listeners=[pruner], points=(AT,))
        groups, _ = loop.collect(prompts(WHOLE), 8, SAMPLING, seed=0)
        reward(groups, good)
        if replays:
            old = groups[0].rollouts[0]
            request = replace(old.completion.request, path=(-1,))
            completion = Completion.of(request, old.completion, "stop")
            groups[0].rollouts.append(replace(old, completion=completion, reward=5.0, replayed=True))
        quality = pruner.on_update_end(GroupBatch(groups, 1, PassRule("good"), alone))
        states.append(repr(pruner.state_dict()) + repr(quality))
    assert states[0] == states[1]


def test_chances_are_those_of_a_plain_histogram() -> None:
    random, head = np.random.RandomState(0), QualityHead()
    true, seen = np.array([0.05, 0.35, 0.65, 0.95]), []
    for _ in range(40):
        kind = random.randint(0, 4, 200)
        success = (random.rand(200) < true[kind]).astype(int)
        seen.append(np.column_stack([kind, success]))
        teach(head, np.stack([shown(float(true[each])) for each in kind]), success, np.arange(200) // 8)
    rows = np.concatenate(seen)
    plain = [rows[rows[:, 0] == kind, 1].mean() for kind in range(4)]
    assert head.chances(np.stack([shown(each) for each in true])) == pytest.approx(plain, abs=0.04)
    figures = head.metrics()
    assert figures["pruning/active"] == 1 and figures["pruning/auc"] > 0.75
    assert figures["pruning/calibration_error"] < 0.05


def test_the_calibration_error_is_that_of_a_plain_histogram() -> None:
    random = np.random.RandomState(1)
    chances = random.rand(300)
    successes = (random.rand(300) < chances**2).astype(float)
    plain = 0.0
    for low in np.arange(20) / 20:
        mine = (chances >= low) & (chances < low + 0.05)
        if mine.any():
            plain += mine.sum() / 300 * abs(chances[mine].mean() - successes[mine].mean())
    assert calibration_error(chances, successes) == pytest.approx(plain)


def test_an_early_end_has_a_chance_of_its_own() -> None:
    head = QualityHead()
    assert head.early_chance == 0.5
    head.learn(np.empty((0, 4)), np.empty(0), np.empty(0, dtype=int), np.empty(0), np.array([True] * 8 + [False] * 2))
    assert head.early_chance == pytest.approx(9 / 12)


def test_the_auc_counts_pairs_of_a_group_alone() -> None:
    chances, success = np.array([0.9, 0.1, 0.2, 0.3, 0.5, 0.5]), np.array([1, 0, 1, 0, 1, 0])
    auc, error = within_auc(chances, success, np.array([0, 0, 1, 1, 2, 2]))
    assert auc == pytest.approx(0.5)  # right, wrong, even
    assert error == pytest.approx(math.sqrt(3 * 3 / 12) / 3)
    assert within_auc(chances, np.ones(6), np.zeros(6)) == (0.5, math.inf)
    random = np.random.RandomState(0)
    aucs = [within_auc(random.rand(16), np.arange(16) % 2, np.zeros(16))[0] for _ in range(2000)]
    _, error = within_auc(random.rand(16), np.arange(16) % 2, np.zeros(16))
    assert np.std(aucs) == pytest.approx(error, rel=0.05)


def test_what_is_saved_goes_on_as_if_it_had_not_been() -> None:
    random, head = np.random.RandomState(0), QualityHead()
    batches = [
        (random.randn(64, 300).astype(np.float32), random.randint(0, 2, 64), np.arange(64) // 8) for _ in range(6)
    ]
    for batch in batches[:3]:
        teach(head, *batch)
    other = QualityHead()
    other.load_state_dict(head.state_dict())
    for batch in batches[3:]:
        assert other.chances(batch[0]).tolist() == head.chances(batch[0]).tolist()
        teach(head, *batch)
        teach(other, *batch)
    assert repr(other.state_dict()) == repr(head.state_dict()) and other.proven == head.proven


def test_the_plug_in_says_when_completions_are_dropped() -> None:
    arrol = plugin("arrol")
    assert arrol == Arrol(512, 0.5, 0.5) and arrol.needs == {"whole_rollouts", "separate_completions"}
    plugin("arrol:at=24,keep=0.25").check(RunFacts(2, 3, 26, 1))
    for max_tokens, num_generations, sentence in (
        (513, 8, r"at is 512, and sampling\.max_tokens is 513: 511 is the largest"),
        (1024, 2, "needs groups of 3 or more, of which two stay, and num_generations is 2"),
    ):
        with pytest.raises(ValueError, match=sentence):
            arrol.check(RunFacts(2, num_generations, max_tokens, 1))
