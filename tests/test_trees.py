"""EPTree, TreePO and ARPO: where completions fork, and what their tokens are trained on with, by brute force."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_policy, table_rows
from hand_made import Environment, credited, make_rollout, relative_error
from test_learner import make_learner, ragged_groups

from lit_grpo.methods.arpo import AEPO, ARPO
from lit_grpo.methods.eptree import EPTree, step_signals
from lit_grpo.methods.treepo import TreePO, relative_advantages
from lit_grpo.plugins import fresh
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import OBSERVED, Completion, Key, Prompt, Request, RolloutGroup, SamplingParams, alone
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.plugin import Batch

PROMPTS = [Prompt("a", (2, 3, 4), ""), Prompt("b", (9,), ""), Prompt("c", tuple(range(2, 30)), "")]
SAMPLING = SamplingParams(max_tokens=24, max_observed=12)
Found = dict[Key, Completion]


@pytest.fixture(scope="module")
def collect(policy_folder: Path) -> Callable[..., tuple[Found, Any]]:
    return sampler(policy_folder)


def sampler(policy_folder: Path) -> Callable[..., tuple[Found, Any]]:
    """What samples groups in so many slots, with these listeners."""
    policy: Any = random_policy()

    def sample(num_slots: int, size: int, *listeners: Any) -> tuple[Found, Any]:
        generator = SlotGenerator(num_slots)
        generator.start(PolicySpec(policy, load_tokenizer(str(policy_folder))))
        generator.load_weights(policy.named_parameters(), 0)
        groups, stats = RolloutLoop(generator, plan="short_last", listeners=listeners).collect(
            PROMPTS, size, SAMPLING, 0
        )
        return {each.completion.request.key: each.completion for group in groups for each in group.rollouts}, stats

    return sample


def tokens(found: Found) -> dict[Key, list[int]]:
    return {key: completion.token_ids_T.tolist() for key, completion in found.items()}


def common(first: Completion, second: Completion) -> int:
    pairs = zip(first.token_ids_T.tolist(), second.token_ids_T.tolist(), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(first.num_tokens, second.num_tokens))


# ---- EPTree -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [2, 16])
@pytest.mark.parametrize("settings", [EPTree(2, 1, 2), EPTree(1, 3, 1), EPTree(3, 2, 1)])
def test_trees_fork_at_their_least_likely_tokens(settings: EPTree, num_slots: int, collect: Any) -> None:
    worker = fresh(settings)
    found, stats = collect(num_slots, 3, worker)
    begun_with: dict[Key, int] = {}
    for root in [key for key in found if len(key[2]) == 1]:
        members, forked = [root], set[tuple[Key, int]]()
        for _ in range(settings.rounds):
            places = [
                (float(found[key].logprobs_T[place]), order, place, key)
                for order, key in enumerate(members)
                for place in range(begun_with.get(key, 0) + 1, found[key].num_tokens - 1)
                if (key, place) not in forked
            ]
            chosen = sorted(places)[: settings.tokens]
            new: list[Key] = []
            for _, _, place, key in chosen:
                forked.add((key, place))
                taken = sum((*each[:2], each[2][:-1]) == key for each in begun_with)
                for number in range(taken, taken + settings.branches):
                    child = (*key[:2], (*key[2], number))
                    begun_with[child] = place
                    new.append(child)
                    assert found[child].until(place).token_ids_T.tolist() == found[key].token_ids_T[:place].tolist()
                    assert torch.equal(found[child].logprobs_T[:place], found[key].logprobs_T[:place])
            members += new
    assert begun_with.keys() | {key for key in found if len(key[2]) == 1} == found.keys()
    saved = sum(begun_with.values())
    assert stats.num_tokens == sum(each.num_tokens for each in found.values()) - saved
    expected = {"rollout/branched_share": len(begun_with) / len(found), "rollout/branched_tokens_saved": saved}
    assert worker.metrics(alone) == pytest.approx(expected) and saved > 0


@pytest.mark.parametrize("seed", range(20))
def test_step_signals_are_their_formula_token_by_token(seed: int) -> None:
    rng = random.Random(seed)
    leaves = [[rng.randint(0, 1) for _ in range(rng.randint(0, 6))] for _ in range(rng.randint(2, 9))]
    rewards = [math.nan if rng.random() < 0.2 else rng.random() for _ in leaves]
    counted = [number for number, reward in enumerate(rewards) if not math.isnan(reward)]
    found = step_signals([np.array(leaf, dtype=np.int64) for leaf in leaves], rewards)

    def less_the_others(number: int) -> float:
        others = [rewards[other] for other in counted if other != number]
        return rewards[number] - statistics.fmean(others)

    def below(beginning: list[int]) -> list[int]:
        return [number for number in counted if leaves[number][: len(beginning)] == beginning]

    def value(beginning: list[int]) -> float:
        return statistics.fmean(less_the_others(number) for number in below(beginning))

    def through(beginning: list[int]) -> int:
        return sum(leaf[: len(beginning)] == beginning for leaf in leaves)

    for number in counted if len(counted) > 1 else []:
        leaf = leaves[number]
        for place in range(len(leaf)):
            beginning = leaf[: place + 1]
            above = next(  # where the node of the token begins: the longest beginning that more leaves pass through
                (end for end in range(place, 0, -1) if through(leaf[:end]) > through(beginning)), 0
            )
            parent = value(leaf[:above]) if above else value([])
            expected = (value(beginning) - value([]) + value(beginning) - parent) / math.sqrt(len(below(beginning)))
            assert found[number][place] == pytest.approx(expected, abs=1e-12)


def test_only_sampled_tokens_are_credited() -> None:
    completion = Completion(Request(PROMPTS[0], (0,), SAMPLING), [5, 6, 7], [0.0] * 3, [0, OBSERVED, 0], "stop")
    rollout, other = make_rollout([5], [9], 1.0), make_rollout([5], [8], 0.0, sample_id=1)
    rollout.completion = completion
    found = credited(EPTree(), RolloutGroup(PROMPTS[0], [rollout, other]), [0.0, 0.0])
    assert found == [[2.0, 2.0], [-2.0]]


# ---- TreePO -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "width", "segment"), [(1, 8, 4), (2, 7, 3), (3, 16, 2), (4, 4, 4)])
def test_paths_divide_after_segments_up_to_the_width(size: int, width: int, segment: int, collect: Any) -> None:
    worker = fresh(TreePO(width, segment))
    found, stats = collect(16, size, worker)
    for prompt in PROMPTS:
        members = {key: each for key, each in found.items() if key[0] == prompt.prompt_id}
        assert len(members) == width
        for key, completion in members.items():
            if len(key[2]) > 1:
                parent = members[(*key[:2], key[2][:-1])]
                assert common(completion, parent) >= segment or key in filled(members, segment)
    assert (worker.metrics(alone)["rollout/branched_tokens_saved"] > 0) == (width > size)
    saved = worker.metrics(alone)["rollout/branched_tokens_saved"]
    assert stats.num_tokens == sum(each.num_tokens for each in found.values()) - saved


def filled(members: Found, segment: int) -> set[Key]:
    """Those that share no segment with their parents: what filled the width."""
    return {
        key
        for key, each in members.items()
        if len(key[2]) > 1 and common(each, members[(*key[:2], key[2][:-1])]) < segment
    }


def test_what_is_sampled_does_not_depend_on_the_slots(collect: Any) -> None:
    one, two, many = (tokens(collect(slots, 2, fresh(TreePO(10, 3)))[0]) for slots in (1, 3, 32))
    assert one == two == many and len(many) == 30


def test_segments_count_sampled_tokens_and_compare_what_was_observed() -> None:
    def member(number: int, observed: int) -> Completion:
        versions = [0, OBSERVED, 0, 0]
        return Completion(Request(PROMPTS[0], (number,), SAMPLING), [5, observed, 6, 7], [0.0] * 4, versions, "stop")

    apart = relative_advantages([member(0, 8), member(1, 9)], [1.0, 0.0], segment=2)
    together = relative_advantages([member(0, 8), member(1, 8), member(2, 9)], [1.0, 0.0, 0.5], segment=2)
    assert apart == [0.5, -0.5]  # nothing but the prompt is common
    assert together == pytest.approx([0.5, -0.5, 0.0])
    assert relative_advantages([member(0, 8), member(1, 8)], [1.0, 0.0], segment=1) == [0.5, -0.5]


def test_segments_that_nothing_fills_are_whitened_dr_grpo() -> None:
    gradients = []
    for whitened in (True, False):
        groups = ragged_groups()
        learner, steps = make_learner(
            plugins=[TreePO(width=16, segment=10_000)], advantages=Advantages("grpo", scale="none")
        )
        if not whitened:
            learner, steps = make_learner(plugins=[ByHand()], advantages=Advantages("grpo", scale="none"))
        learner.learn(groups)
        gradients.append(steps.gradients[0])
    assert relative_error(*gradients) < 1e-6 and gradients[0].norm() > 0


class ByHand(TreePO):
    """The run's own advantages, whitened over tokens."""

    def on_batch(self, batch: Batch) -> None:
        own = [torch.full((each.completion.num_trained,), each.advantage) for each in batch.rollouts]
        for rollout, advantages_N in zip(batch.rollouts, batch.whitened(own), strict=True):
            if advantages_N is not None:
                batch.set("token_advantage", rollout, advantages_N)


# ---- ARPO and AEPO ------------------------------------------------------------------------------------


def entropy(completion: Completion, start: int, most: int) -> float:
    """By hand: the mean of -log p of up to ``most`` sampled tokens from a place on."""
    values = []
    for place in range(start, min(start + most, completion.num_tokens)):
        if completion.versions_T[place] == OBSERVED:
            break
        values.append(-float(completion.logprobs_T[place]))
    return statistics.fmean(values)


@pytest.mark.parametrize("settings", [ARPO(32, 2, 0.5, 0.4), AEPO(32, 3, 0.3, 0.6)])
@pytest.mark.parametrize("num_slots", table_rows([3, 32], [3]))
def test_turns_branch_by_the_formula(settings: ARPO, num_slots: int, collect: Any) -> None:
    worker = fresh(settings)
    found, _ = collect(num_slots, 8, Environment(3), worker)
    expected: dict[Key, int] = {}
    todo = [(key, 0, 0) for key in found if len(key[2]) == 1]
    while todo:
        key, begun_with, in_a_row = todo.pop()
        completion, number = found[key], 0
        starts = [begin for begin, _, _ in completion.places_of_turns]
        for turn, start in enumerate(starts[1:], 2):
            if start <= begun_with:
                continue
            upto = completion.until(starts[turn] if turn < len(starts) else completion.num_tokens)
            rise = entropy(upto, start, settings.tokens) - entropy(completion, starts[0], settings.tokens)
            draw = random.Random(f"0/{key}/{turn}").random()
            if type(settings) is ARPO:
                branches = min(max(draw - settings.alpha * rise, 0), 1) <= settings.threshold
            else:
                held = max(0, 1 - 0.05 * in_a_row)
                branches = min(max((draw + settings.alpha * rise) * held, 0), 1) >= settings.threshold
            in_a_row = in_a_row + 1 if branches else 0
            if branches:
                child = (*key[:2], (*key[2], number))
                number += 1
                expected[child] = start
                todo.append((child, start, in_a_row))
                assert found[child].token_ids_T[:start].tolist() == completion.token_ids_T[:start].tolist()
    branched = {key for key, each in found.items() if len(key[2]) > 1 and expected.get(key)}
    fresh_ones = {key for key in found if len(key[2]) > 1} - branched
    assert expected.keys() == branched and len(branched) > 3
    assert all(len(members) == 32 for members in by_prompt(found).values()) and fresh_ones
    assert len(branched) / len(found) == pytest.approx(worker.metrics(alone)["rollout/branched_share"])


def test_turns_that_all_have_room_branch_alike_in_any_slots(collect: Any) -> None:
    few, many = (tokens(collect(slots, 8, Environment(3), fresh(ARPO(24, 2, 0.5, 0.4)))[0]) for slots in (3, 32))
    assert few == many and len(many) == 72


def by_prompt(found: Found) -> dict[str, list[Key]]:
    return {prompt.prompt_id: [key for key in found if key[0] == prompt.prompt_id] for prompt in PROMPTS}


# ---- all ----------------------------------------------------------------------------------------------
