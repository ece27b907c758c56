"""Which rollouts are trained on: against all subsets, and in a learner."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hand_made import Unshaped, learning_batch, make_module, make_step
from test_learner import make_learner, ragged_groups

from lit_grpo.callbacks import RolloutScheduler
from lit_grpo.methods import make_plugins
from lit_grpo.methods.d3s import D3S, TokenShare
from lit_grpo.methods.members import MaxEntropy, RandomCompletions
from lit_grpo.methods.pods import MaxVariance
from lit_grpo.methods.shared.selection import max_variance_subset
from lit_grpo.plugins import Plugin, RunFacts
from lit_grpo.rollout.session import RolloutSession
from lit_grpo.types import Completion, Key, Prompt, Request, Rollout, RolloutGroup, SamplingParams
from lit_grpo.update.advantages.functions import group_advantages, leave_one_out_advantages
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.plugin import Batch

Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

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
        kept = values[chosen.numpy()].tolist()
        assert statistics.pvariance(kept) == pytest.approx(best, rel=1e-9, abs=1e-12)
        assert min(kept) == min(values) and max(kept) == max(values)  # neither the only loser nor winner is left out


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


def advantages(
    selection: Plugin,
    groups: list[RolloutGroup],
    size: int = 1,
    estimator: Estimator = group_advantages,
    entropies: Mapping[Key, torch.Tensor] = MappingProxyType({}),
    progress: float = 0.0,
) -> list[list[float]]:
    """As a learner on each of so many ranks makes them, by group."""
    given, batches = list[Any](), list[Batch]()

    def give(value: Any) -> list[Any]:
        given.append(value)
        raise InterruptedError

    for rank in range(size):
        part = learning_batch(groups[rank::size], lambda *_: entropies, progress=progress)
        for rollout in part.rollouts:
            rollout.advantage = 0.0
        batches.append(replace(part, rank=rank, estimate=partial(estimate, part, estimator)))
        estimate(part, estimator)
    if size > 1:  # what each rank has for the others, to begin with
        for batch in batches:
            with suppress(InterruptedError):
                selection.on_batch(replace(batch, all_gather=give).of(selection))
    for batch in batches:
        batch = replace(batch, all_gather=lambda _: given) if given else batch
        selection.on_batch(batch.of(selection))
    return [[rollout.advantage for rollout in group.rollouts] for group in groups]


def estimate(batch: Batch, estimator: Estimator, *_: Batch) -> None:
    """Give rollouts their advantages; those whose advantage is NaN are left out."""
    is_in_R = torch.tensor([not math.isnan(rollout.advantage) for rollout in batch.rollouts])
    rewards = batch.rewards.only(is_in_R)
    advantages_R = estimator(rewards.rewards_R, rewards.groups_R).masked_fill(rewards.rewards_R.isnan(), math.nan)
    for rollout, advantage in zip(batch.rollouts, advantages_R.tolist(), strict=True):
        rollout.advantage = advantage


def known(values: list[float]) -> dict[int, float]:
    return {place: round(value, 4) for place, value in enumerate(values) if value == value}


REWARDS = [[1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.2, 0.9, math.nan, 0.1, 0.4, 0.8], [1.0] * 6]


def test_statistics_are_of_the_kept_or_of_the_group() -> None:
    groups = groups_of(*REWARDS)
    kept = [known(values) for values in advantages(MaxVariance(2), groups)]
    half = 0.5 / (0.5**0.5 + 1e-4)
    assert kept[0][0] == round(half, 4) and list(kept[0].values()) == [round(half, 4), round(-half, 4)]
    assert kept[1].keys() == {1, 3} and list(kept[2].values()) == [0.0, 0.0]
    whole = [known(values) for values in advantages(MaxVariance(2, statistics="group"), groups)]
    everyone = [known(values) for values in advantages(Unshaped(), groups)]
    for part, all_of_it in zip(whole, everyone, strict=True):
        assert part == {place: all_of_it[place] for place in part} and len(part) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_extremes_of_a_batch_may_all_be_of_one_group(ranks: int) -> None:
    groups = groups_of([1.0] + [0.0] * 7, [0.5] * 8, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    found = advantages(D3S(2), groups, ranks)
    whole = advantages(Unshaped(), groups)
    flat, picked = (list(itertools.chain(*lists)) for lists in (whole, found))
    kept = [value for value in picked if value == value]
    assert len(kept) == 2 * 3
    best = float(np.array(list(itertools.combinations(flat, 6))).var(axis=1).max())
    assert statistics.pvariance(kept) == pytest.approx(best)
    assert all(a == b for a, b in zip(picked, flat, strict=True) if a == a)  # not normalized again
    assert not known(found[1])


def test_random_members_are_the_same_in_every_run_and_others_in_every_group() -> None:
    groups = groups_of(*[[float(n) for n in range(12)]] * 20)
    first = [tuple(known(values)) for values in advantages(RandomCompletions(4), groups)]
    assert first == [tuple(known(values)) for values in advantages(RandomCompletions(4), groups, 2)]
    assert all(len(members) == 4 for members in first) and len(set(first)) > 15


# ---- by entropy ----------------------------------------------------------------------------------------


def with_entropies(groups: list[RolloutGroup], *entropies: list[float]) -> dict[Key, torch.Tensor]:
    """Let completions tell these; those that tell none (NaN) get tokens of the entropies that are returned."""
    measured = {}
    for group, values in zip(groups, entropies, strict=True):
        for rollout, value in zip(group.rollouts, values, strict=True):
            rollout.completion.entropy = value
            if math.isnan(value):
                measured[rollout.completion.request.key] = torch.tensor([0.5, 0.7])
    return measured


def test_the_members_of_the_highest_mean_entropy_are_kept() -> None:
    groups = groups_of([1.0, 0.0, 1.0, 0.0, 1.0], [0.0, 1.0, math.nan, 1.0, 0.0])
    with_entropies(groups, [0.1, 0.3, 0.2, 0.3, 0.25], [0.9, 0.1, 5.0, 0.3, 0.2])
    found = advantages(MaxEntropy(2), groups)
    everyone = advantages(Unshaped(), groups)
    assert [list(known(values)) for values in found] == [[1, 3], [0, 3]]  # not the one without a reward
    for part, whole in zip(found, everyone, strict=True):
        assert known(part).items() <= known(whole).items()
    tied = groups_of([1.0, 0.0, 0.5, 0.2])
    with_entropies(tied, [0.4] * 4)
    assert list(known(advantages(MaxEntropy(3), tied)[0])) == [0, 1, 2]


def test_entropies_that_are_not_told_count_as_they_are_measured_where_a_rollout_may_be_chosen() -> None:
    groups = groups_of([1.0, 0.0, 1.0, 0.0, 1.0], [math.nan, 1.0, 0.0])
    measured = with_entropies(groups, [0.55, math.nan, 0.65, math.nan, 0.1], [math.nan, 0.0, 0.2])
    groups[0].rollouts[3].kept = False  # trained on before, with another part of its group
    selection, asked = MaxEntropy(2, statistics="kept"), list[Rollout]()

    def entropies(untold: Sequence[Rollout], what: str) -> dict[Key, torch.Tensor]:
        asked.extend(untold)
        return measured

    selection.on_batch(learning_batch(groups, entropies).of(selection))
    keys = {rollout.completion.request.key for rollout in asked}
    assert keys == {("train/0", 0, (1,))}  # neither the one that has been trained on nor the one without a reward
    found = advantages(selection, groups, entropies={key: measured[key] for key in keys})
    assert [list(known(values)) for values in found] == [[1, 2], [1, 2]]  # 0.6 and 0.65 of 0.55, 0.6, 0.65 and 0.1


def test_a_rollout_without_a_token_to_learn_from_comes_last() -> None:
    groups = groups_of([1.0, 0.0, 0.5])
    with_entropies(groups, [0.2, 9.0, 0.1])
    loud = groups[0].rollouts[1].completion
    nothing = Completion(
        loud.request, loud.token_ids_T, loud.logprobs_T, loud.versions_T, "stop", "", 9.0, torch.zeros(2).bool()
    )
    groups[0].rollouts[1].completion = nothing
    assert list(known(advantages(MaxEntropy(2), groups)[0])) == [0, 2]


# ---- the only loser ------------------------------------------------------------------------------------

RULES: dict[str, Plugin] = {
    "pods": MaxVariance(2, statistics="group"),
    "d3s": D3S(2),
    "max_entropy": MaxEntropy(2),
    "random_members": RandomCompletions(2),
}
LOSER_IS_QUIET = [0.9, 0.8, 0.7, 0.6, 0.1, 0.5]


@pytest.mark.parametrize("loser", [0.0, 1.0])  # the only winner, where it is 1
@pytest.mark.parametrize("rule", RULES)
def test_the_only_loser_counts_in_the_baseline_of_all_others_whoever_is_kept(rule: str, loser: float) -> None:
    """Leave-one-out over a group of six: the others' baselines are 4/5 and 1/5, its own is 1 or 0."""
    groups = groups_of(*[[1 - loser] * 4 + [loser, 1 - loser] for _ in range(12)])
    with_entropies(groups, *[LOSER_IS_QUIET for _ in groups])
    estimator = leave_one_out_advantages
    found = advantages(RULES[rule], groups, estimator=estimator)
    sign, kept = 1 - 2 * loser, [known(values) for values in found]
    for members in kept:
        assert all(value == (-sign if place == 4 else sign * 0.2) for place, value in members.items())
    assert sum(map(len, kept)) == 2 * 12
    is_kept = [4 in members for members in kept]
    if rule in ("pods", "d3s"):
        assert all(is_kept)
    if rule == "max_entropy":
        assert not any(is_kept)
    if rule == "random_members":
        assert any(is_kept) and not all(is_kept)


# ---- tokens --------------------------------------------------------------------------------------------


def test_tokens_with_the_largest_absolute_advantage_times_entropy_are_kept() -> None:
    (group,) = groups_of([1.0, 0.0, 0.5])
    entropies = torch.tensor([[0.5, 0.1], [0.3, 0.2]])  # scores 0.75, 0.15, 0.6, 0.4; where the advantage is 0, none
    for rollout, advantage in zip(group.rollouts, [1.5, -2.0, 0.0], strict=True):
        rollout.advantage = advantage
    keys = [rollout.completion.request.key for rollout in group.rollouts]
    step = make_step(group.rollouts, lambda *_: dict(zip(keys, entropies, strict=False)))
    TokenShare(1.0).on_minibatch(step)
    assert not any(rollout.columns for rollout in group.rollouts)
    TokenShare(0.5).on_minibatch(step)
    masks = [rollout.columns["mask"].tolist() for rollout in group.rollouts]
    assert masks == [[True, False], [True, True], [False, False]]


def test_where_all_tokens_are_kept_those_of_the_highest_entropy_are_trained_on_as_the_objective_says() -> None:
    gradients = []
    for plugins in ([TokenShare(1.0)], []):
        learner, steps = make_learner(objective=Objective(top_entropy_quantile=0.5), plugins=plugins)
        assert learner.learn(ragged_groups())["update/kept_share"] < 0.6
        gradients.append(steps.gradients[0])
    assert torch.equal(*gradients)


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_members_that_have_left_with_another_part_of_their_group_take_no_place(rule: str) -> None:
    (group,) = groups_of([1.0, 0.0, 0.9, 0.1, 0.5, 0.4])
    for rollout in group.rollouts[:2]:
        rollout.kept, rollout.trained_before = False, True
    with_entropies([group], [9.0, 9.0, 0.1, 0.2, 0.3, 0.4])
    (found,) = advantages(RULES[rule], [group])
    assert len(known(found).keys() - {0, 1}) == 2


FACTS = RunFacts(num_prompts=4, num_generations=8, max_tokens=16, updates_per_batch=1)
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("pods", {}, "keep is not set; give the number of completions of each group to learn from, 2 or more."),
    ("d3s", {"first_keep": 4}, "keep is not set; give the number"),
    ("random_members", {"keep": 9}, "keep is 9, but model.num_generations is 8; keep at most as many as are sampled."),
    ("d3s", {"keep": 4, "first_keep": 9}, "first_keep is 9, but model.num_generations is 8; keep at most"),
    ("d3s", {"keep": 4, "statistics": "kept"}, "it has no field 'statistics'; it has keep, first_keep, tokens"),
]


@pytest.mark.parametrize(("name", "fields", "sentence"), BAD)
def test_what_has_no_meaning_is_refused(name: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        RolloutSession(make_plugins([{name: fields}])).check(FACTS, [])
    assert str(error.value).startswith(f"rollout.plugins {name}: {sentence}")


def test_any_choice_of_completions_can_have_a_share_of_tokens() -> None:
    """By a class of a user's own that derives from both."""

    @dataclass
    class RandomTokens(TokenShare, RandomCompletions):
        pass

    selection = RandomTokens(2, first_tokens=0.5)
    assert selection.requirement("").needs == {"all_ranks"} and (
        selection.token_share(0.0),
        selection.token_share(1.0),
    ) == (0.5, 1.0)
    groups = groups_of([1.0, 0.0, 0.5, 0.2])
    assert known(advantages(selection, groups)[0]) == known(advantages(RandomCompletions(2), groups)[0])
    with pytest.raises(ValueError, match="keep must be"):
        RandomTokens(1)
    with pytest.raises(ValueError, match="tokens must be"):
        RandomTokens(2, tokens=2.0)


def test_a_scheduler_says_before_each_run_which_rollouts_a_module_learns_from() -> None:
    """What an earlier run had, or a user has set by hand, does not outlast it."""
    module, trainer = make_module("tiny"), SimpleNamespace(datamodule=None, strategy=None, callbacks=[])
    selections = []
    for plugins in (["d3s:keep=3,tokens=0.5"], [], ["pods:keep=2"]):
        RolloutScheduler(plugins=plugins).setup(trainer, module, "fit")  # pyrefly: ignore[bad-argument-type]
        selections.append([*module.settings.plugins])
    assert selections == [[D3S(3, tokens=0.5)], [], [MaxVariance(2)]]
    RolloutScheduler().setup(trainer, module, "validate")  # pyrefly: ignore[bad-argument-type]
    assert [*module.settings.plugins] == [MaxVariance(2)]
    with pytest.raises(ValueError, match=r"keep is 5, but model\.num_generations is 4"):
        module.set_plugins(MaxVariance(5))
