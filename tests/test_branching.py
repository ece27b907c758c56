"""Requests that begin within others: what the loop makes of them, and that each is what it would be by itself."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import table_rows
from hand_made import Environment, decode_alone, full_logprobs
from test_loop import FakeGenerator, FakeRewards, completion, controller, prompts

from lit_grpo.methods.plans import find_plan, shipped_plans
from lit_grpo.plugins import Answer, Listener
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.buffer import RolloutBuffer
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import ReleaseRule
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.rollout.slots.kv.cache import KVBudget
from lit_grpo.types import Completion, Key, Prompt, Request, Rollout, SamplingParams

SAMPLING = SamplingParams(max_tokens=9)
FIRST: Key = ("a", 0, (0,))


class Forker(Listener):
    """Gives some answers at some steps, counted from 1, and others as completions end."""

    traits = frozenset({"forks"})

    def __init__(self, steps: dict[int, Answer], ends: dict[Key, Callable[[Completion], Answer]] | None = None) -> None:
        self.steps, self.ends, self.num_steps = steps, ends or {}, 0

    def on_step(self, events: StepEvents) -> Answer | None:
        self.num_steps += 1
        return self.steps.get(self.num_steps)

    def on_completion(self, completion: Completion) -> Answer | None:
        answer = self.ends.get(completion.request.key)
        return None if answer is None else answer(completion)


def fork(*paths: tuple[int, ...], of: Key = FIRST) -> Answer:
    return Answer(fork={of: paths})


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("plan", [*shipped_plans(), "points"])
def test_an_active_request_divides_and_its_tokens_are_sampled_once(plan: str, slots: int) -> None:
    points = (3,) if plan == "points" else ()
    generator = FakeGenerator(slots, {"a": [9, 4], "b": [2, 2]})
    forker = Forker({2: fork((0, 0), (0, 1))})
    loop = controller(generator, plan=find_plan("fcfs" if points else plan), points=points, listeners=[forker])
    (group, other), stats = loop.collect(prompts("a", "b"), 2, SAMPLING, seed=0)
    assert [each.completion.request.path for each in group.rollouts] == [(0,), (0, 0), (0, 1), (1,)]
    assert [each.completion.num_tokens for each in group.rollouts] == [9, 9, 9, 4]
    assert len(other.rollouts) == 2
    sampled = 9 + 7 + 7 + 4 + 2 + 2  # both began with 2 tokens of their parent
    assert stats.num_tokens == sum(stats.lengths) == sampled
    assert stats.num_preempted == 0 and not generator.remaining
    assert len({key for key, _ in stats.spans}) == 6


def test_a_fork_begins_with_what_its_parent_has_come_to_and_may_divide_itself() -> None:
    generator = FakeGenerator(8, {"a": [9]})
    forker = Forker({2: fork((0, 0)), 5: fork((0, 0, 0), of=("a", 0, (0, 0)))})
    (group,), stats = controller(generator, listeners=[forker]).collect(prompts("a"), 1, SAMPLING, seed=7)
    assert [each.completion.request.path for each in group.rollouts] == [(0,), (0, 0), (0, 0, 0)]
    assert {key[2]: request.prefix.num_tokens for key, request in generator.requests.items()} == {
        (0,): 2,
        (0, 0): 5,
        (0, 0, 0): 5,
    }
    assert stats.num_tokens == 9 + 7 + 4 and {each.seed for each in generator.requests.values()} == {7}


def test_what_has_ended_is_forked_and_its_group_is_whole_once() -> None:
    """Asked for as the last of the group ends, which would be whole then."""

    def branch(ended: Completion) -> Answer:
        prefix = ended.until(3)
        return Answer(submit=[Request(ended.request.prompt, (1, number), SAMPLING, 0, prefix) for number in range(2)])

    generator = FakeGenerator(2, {"a": [2, 5]})
    rewards = FakeRewards(generator)
    forker = Forker({}, {("a", 0, (1,)): branch})
    (group,), stats = controller(generator, rewards, listeners=[forker]).collect(prompts("a"), 2, SAMPLING, seed=0)
    assert [each.completion.request.path for each in group.rollouts] == [(0,), (1,), (1, 0), (1, 1)]
    assert len(rewards.submitted) == 1 and stats.num_tokens == sum(stats.lengths) == 2 + 5 + 2 + 2


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            {3: fork((0, 0), of=("a", 0, (1,)))},
            r"forks \('a', 0, \(1,\)\), which is not being decoded; submit requests",
        ),
        ({2: fork((0, 0)), 4: fork((0, 0))}, r"\(0, 0\)\) is in work already; give each sample a path of its own"),
        ({3: fork((1,))}, r"Sample \(1,\) of \('a', 0\) has ended; give each sample a path of its own"),
        (
            {3: Answer(submit=[Request(prompts("a")[0], (4,), SAMPLING, 0, completion(None, 9))])},  # pyrefly: ignore[bad-argument-type]
            r"sample \(4,\) of prompt 'a' has 9 tokens, and sampling.max_tokens 9 allows no 10",
        ),
    ],
)
def test_forks_that_cannot_be_are_refused(answers: dict[int, Answer], message: str) -> None:
    generator = FakeGenerator(8, {"a": [9, 1]})
    with pytest.raises(ValueError, match=message):
        controller(generator, listeners=[Forker(answers)]).collect(prompts("a"), 2, SAMPLING, seed=0)
    assert not generator.remaining


def test_forks_are_in_checkpoints_and_go_on_in_the_next_rollout() -> None:
    generator = FakeGenerator(8, {"a": [9], "b": [4]})
    buffer = RolloutBuffer(ReleaseRule(num_groups=1, leftovers="keep", max_staleness=1))
    forker = Forker({2: fork((0, 0))})
    groups, first = controller(generator, buffer=buffer, listeners=[forker]).collect(prompts("a", "b"), 1, SAMPLING, 0)
    assert [group.prompt.prompt_id for group in groups] == ["b"]
    buffer.end_update()
    restored = RolloutBuffer(buffer.rule)
    restored.load_state_dict(buffer.state_dict())
    assert [(each.path, each.prefix.num_tokens) for each in restored.unfinished] == [((0,), 4), ((0, 0), 4)]
    second = controller(generator, buffer=restored).run(restored.ready)
    (group,) = restored.take()
    assert [each.completion.num_tokens for each in group.rollouts] == [9, 9]
    assert sum(first.lengths) + sum(second.lengths) == first.num_tokens + second.num_tokens == 9 + 7 + 4


# ---- with the slots -----------------------------------------------------------------------------------

PROMPTS = [Prompt("a", (2, 3, 4), ""), Prompt("b", (9,), ""), Prompt("c", tuple(range(2, 30)), "")]
TURNS = SamplingParams(max_tokens=24, max_observed=12)


@pytest.fixture
def make(policy: Any, policy_folder: Path) -> Callable[..., SlotGenerator]:
    def make_generator(num_slots: int = 3, kv_tokens: int | None = None) -> SlotGenerator:
        generator = SlotGenerator(num_slots)
        generator.start(PolicySpec(policy, load_tokenizer(str(policy_folder))))
        generator.load_weights(policy.named_parameters(), 0)
        if kv_tokens is not None:
            assert generator.budget is not None
            size = generator.budget.bytes_per_token
            generator.budget = KVBudget(kv_tokens * size, size, 8192)
        return generator

    return make_generator


class RandomForks(Environment):
    """Answers turns, and forks at random what is decoded, what is away and what has ended, up to a width.

    Attributes:
        begun: What each fork was asked to begin with, as far as that is known beforehand.
        forked: The keys of all.
    """

    traits = frozenset({"forks"})

    def __init__(self, seed: int, width: int = 12) -> None:
        super().__init__(most_delay=5)
        self.width, self._random = width, random.Random(seed)
        self.begun: dict[Key, Sequence[int]] = {}
        self.forked: set[Key] = set()
        self._numbers: dict[tuple[str, int], int] = {}

    def _path(self, key: Key) -> tuple[int, ...] | None:
        number = self._numbers.setdefault(key[:2], 0)
        if number >= self.width or self._random.random() > 0.15:
            return None
        self._numbers[key[:2]] += 1
        return (*key[2], number)

    def _within(self, request: Request, tokens: Any, least: int) -> list[Request]:
        path = self._path(request.key)
        if path is None or tokens.num_tokens <= least:
            return []
        prefix = tokens.until(self._random.randrange(least, tokens.num_tokens))
        if prefix.num_sampled == TURNS.max_tokens:
            return []
        made = Request(request.prompt, path, request.sampling, request.seed, prefix)
        self.forked.add(made.key)
        self.begun[made.key] = prefix.token_ids_T.tolist()
        return [made]

    def on_step(self, events: Any) -> Answer:
        answer = super().on_step(events)
        ended = {each.request.key for each in events.finished}
        forks = {key: [path] for key in self.ledger.decoding if key not in ended and (path := self._path(key))}
        self.forked |= {(*key[:2], path) for key, (path,) in forks.items()}
        submit = [
            each
            for entry in self.ledger.awaiting_env.values()
            for each in self._within(entry.request, entry.request.prefix, 1)
        ]
        return Answer(resume=answer.resume, fork=forks, submit=submit)

    def on_completion(self, completion: Completion) -> Answer:
        super().on_completion(completion)
        return Answer(submit=self._within(completion.request, completion, 1))


@pytest.mark.parametrize(
    ("plan", "num_slots", "kv_tokens", "seed"),
    table_rows(
        [("short_last", 3, None, 0), ("short_last", 3, None, 6), ("points", 4, None, 2), ("lpt", 8, 140, 6)],
        [("short_last", 3, None, 0), ("lpt", 8, 140, 6)],
    ),
)
def test_each_fork_is_what_it_would_be_by_itself(
    plan: str, num_slots: int, kv_tokens: int | None, seed: int, make: Any, policy: Any
) -> None:
    points = (2, 5) if plan == "points" else ()
    forks = RandomForks(seed)
    loop = RolloutLoop(
        make(num_slots, kv_tokens), plan=find_plan("lpt" if points else plan), listeners=[forks], points=points
    )
    groups, stats = loop.collect(PROMPTS, 2, TURNS, seed=0)
    found = {each.completion.request.key: each.completion for group in groups for each in group.rollouts}
    assert forks.begun.keys() <= found.keys() and len(found) > 12
    assert sum(stats.lengths) == stats.num_tokens or kv_tokens is not None
    assert check_forks(found, forks.begun, policy, make(1)) > 0


def check_forks(found: Mapping[Key, Completion], begun: Mapping[Key, Sequence[int]], policy: Any, alone: Any) -> int:
    """Compare what was sampled with a float64 forward of the whole, and forks with themselves alone.

    Returns:
        How many observed tokens forks have begun with.
    """
    double, num_observed = copy.deepcopy(policy).double(), 0
    for key, each in found.items():
        sampled_T = each.trained_T
        assert sampled_T.tolist() == (each.versions_T >= 0).tolist()
        expected_T = full_logprobs(double, Rollout(each.request.prompt, each))
        assert torch.allclose(each.logprobs_T[sampled_T], expected_T[sampled_T], atol=1e-5)
        if key in begun:
            parent = found[(*key[:2], key[2][:-1])].until(len(begun[key]))
            own = each.until(len(begun[key]))
            assert own.token_ids_T.tolist() == begun[key] == parent.token_ids_T.tolist()
            assert own.segments == parent.segments
            assert torch.equal(own.logprobs_T, parent.logprobs_T)
            assert decode_alone(alone, each.request.after(parent)).token_ids_T.tolist() == each.token_ids_T.tolist()
            num_observed += own.num_observed
    return num_observed
