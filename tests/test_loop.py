"""The rollout loop, with a generator and rewards that are written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lit_grpo.plugins import Answer, Listener, ObservationPoint, Plugin, fresh
from lit_grpo.policy.weights import PolicyWeights
from lit_grpo.rewards import RewardRunner
from lit_grpo.rollout.buffer import RolloutBuffer
from lit_grpo.rollout.generator import Capacity, Observation, StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import Leftovers, ReleaseRule
from lit_grpo.rollout.weights.tensors import SyncReport
from lit_grpo.scheduling.jobs import Job
from lit_grpo.scheduling.jobs import Lengths as JobLengths
from lit_grpo.scheduling.plans.plan import PLANS, Plan, Queue
from lit_grpo.types import Completion, Key, Prompt, Request, RolloutGroup, SamplingParams

Lengths = dict[str, list[int]]


class FakeGenerator:
    """Decodes completions of given lengths, by prompt and sample, and notes what it is asked."""

    abilities: frozenset[str] = frozenset()
    version = 0
    feature_points = ()
    keeps_ended = one_by_one = False
    num_likeliest = 0

    def __init__(self, slots: int, lengths: Lengths) -> None:
        self.slots, self.lengths = slots, lengths
        self.remaining: dict[Key, int] = {}
        self.requests: dict[Key, Request] = {}
        self.log: list[tuple[str, Any]] = []
        self.fail_at_step = self.fail_at_submit = -1
        self.num_steps = 0

    def start(self, policy: Any) -> None: ...

    def weights(self) -> PolicyWeights:
        return PolicyWeights(torch.nn.Linear(1, 1), merged=False)  # pyrefly: ignore[bad-argument-type]

    def load_weights(self, weights: Any, version: int) -> SyncReport:
        return SyncReport()

    def invalidate_weights(self) -> None: ...

    def sleep(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...

    def expect(self, prompts: Iterable[Prompt]) -> None: ...

    def capacity(self) -> Capacity:
        return Capacity(self.slots, self.slots - len(self.remaining))

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        assert len(requests) <= self.capacity().free_slots
        for request in requests:
            assert request.key not in self.remaining
            self.remaining[request.key] = self.lengths[request.key[0]][request.path[0]] - request.prefix.num_tokens
            self.requests[request.key] = request
        self.log.append(("submit", [(request.key[0], *request.path) for request in requests]))
        if self.fail_at_submit == 0:
            raise KeyboardInterrupt
        self.fail_at_submit -= 1

    def step(self) -> StepEvents:
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise KeyboardInterrupt
        active = len(self.remaining)
        assert active, "a step with nothing in flight"
        finished = []
        for key in list(self.remaining):
            self.remaining[key] -= 1
            if not self.remaining[key]:
                del self.remaining[key]
                finished.append(completion(self.requests[key], self.lengths[key[0]][key[2][0]]))
        return StepEvents(active, active, finished=finished[::-1])

    def release(self, prompts: Iterable[Prompt]) -> None:
        self.log.append(("release", [prompt.prompt_id for prompt in prompts]))

    def abort(self, keys: Iterable[Key]) -> list[Request]:
        keys = set(keys)
        if keys:
            self.log.append(("abort", sorted((key[0], *key[2]) for key in keys)))
        return [self.stopped(key) for key in keys if key in self.remaining]

    def stopped(self, key: Key) -> Request:
        """A request with the tokens that it has come to."""
        request = self.requests[key]
        count = self.lengths[key[0]][key[2][0]] - self.remaining.pop(key)
        return request.after(completion(request, count))


class FakeRewards(RewardRunner):
    """Notes each group, and how many completions were in flight when it came."""

    def __init__(self, generator: FakeGenerator) -> None:
        self.generator = generator
        self.submitted: list[tuple[str, int]] = []
        self.num_gathered = self.num_closed = 0

    def submit(self, *groups: RolloutGroup) -> None:
        for group in groups:
            self.submitted.append((group.prompt.prompt_id, len(self.generator.remaining)))
            for rollout in group.rollouts:
                rollout.reward = float(rollout.completion.request.path[0])

    def gather(self, groups: Iterable[RolloutGroup] | None = None) -> None:
        self.num_gathered += 1

    def close(self) -> None:
        self.submitted.clear()
        self.num_closed += 1


def completion(request: Request, length: int) -> Completion:
    tokens = torch.zeros(length, dtype=torch.int64)
    return Completion(request, tokens, tokens.float(), tokens, "stop")


def prompts(*names: str) -> list[Prompt]:
    return [Prompt(name, (1, 2), name) for name in names]


def controller(generator: FakeGenerator, rewards: FakeRewards | None = None, **options: Any) -> RolloutLoop:
    listeners = [] if rewards is None else [rewards]
    return RolloutLoop(generator, listeners=[*listeners, *options.pop("listeners", [])], **options)


LENGTHS = {"a": [9, 1, 4], "b": [1, 1, 1], "c": [2, 7, 3]}
SAMPLING = SamplingParams(max_tokens=9)


@pytest.mark.parametrize("slots", [1, 2, 4, 64])
def test_groups_are_whole_and_in_the_order_of_prompts_and_samples(slots: int) -> None:
    generator = FakeGenerator(slots, LENGTHS)
    groups, stats = controller(generator).collect(prompts("c", "a", "b"), 3, SAMPLING, seed=5)
    assert [group.prompt.prompt_id for group in groups] == ["c", "a", "b"]
    for group in groups:
        assert [r.completion.request.path[0] for r in group.rollouts] == [0, 1, 2]
        assert [r.completion.num_tokens for r in group.rollouts] == LENGTHS[group.prompt.prompt_id]
        assert all(r.prompt is group.prompt and r.completion.request.seed == 5 for r in group.rollouts)
    assert stats.num_tokens == 29
    assert not generator.remaining


def test_every_request_is_admitted_once_and_slots_are_refilled_at_every_step() -> None:
    generator = FakeGenerator(2, LENGTHS)
    _, stats = controller(generator).collect(prompts("a", "b", "c"), 3, SAMPLING, seed=0)
    submits = [keys for what, keys in generator.log if what == "submit"]
    assert submits == [
        [("a", 0), ("a", 1)],
        [("a", 2)],
        [("b", 0)],
        [("b", 1)],
        [("b", 2)],
        [("c", 0)],
        [("c", 1)],
        [("c", 2)],
    ]
    assert stats.num_steps == 16  # a0 (9 steps), then c1 (7), beside the others one after another
    assert stats.num_tokens == 29


def test_a_group_is_rewarded_when_it_is_whole_while_others_still_decode() -> None:
    generator = FakeGenerator(3, LENGTHS)
    rewards = FakeRewards(generator)
    groups, _ = controller(generator, rewards).collect(prompts("a", "b", "c"), 3, SAMPLING, seed=0)
    assert [name for name, _ in rewards.submitted] == ["b", "a", "c"]
    assert rewards.submitted[0][1] > 0
    assert rewards.num_gathered == 1
    assert [rollout.reward for rollout in groups[0].rollouts] == [0.0, 1.0, 2.0]


def test_an_interrupt_aborts_what_is_in_flight_and_the_next_rollout_is_complete() -> None:
    generator = FakeGenerator(3, LENGTHS)
    generator.fail_at_step = 3
    rollouts = controller(generator)
    with pytest.raises(KeyboardInterrupt):
        rollouts.collect(prompts("a", "b"), 3, SAMPLING, seed=0)
    assert generator.log[-2:] == [("abort", [("a", 0), ("a", 2), ("b", 1)]), ("release", ["a", "b"])]
    assert generator.capacity().free_slots == 3
    groups, _ = rollouts.collect(prompts("a", "b"), 3, SAMPLING, seed=0)
    assert [len(group.rollouts) for group in groups] == [3, 3]


def test_an_interrupt_drops_the_groups_that_are_being_rewarded() -> None:
    generator = FakeGenerator(3, LENGTHS)
    generator.fail_at_step = 5
    rewards = FakeRewards(generator)
    with pytest.raises(KeyboardInterrupt):
        controller(generator, rewards).collect(prompts("b", "a"), 3, SAMPLING, seed=0)
    assert rewards.submitted == [] and rewards.num_gathered == 0 and rewards.num_closed == 1


def test_the_same_visit_of_a_prompt_twice_is_refused_and_another_visit_is_not() -> None:
    generator = FakeGenerator(3, LENGTHS)
    with pytest.raises(ValueError, match="the same visit of a prompt twice"):
        controller(generator).collect(prompts("a", "a"), 3, SAMPLING, seed=0)
    assert generator.log == []
    again = Prompt("a", (1, 2), "a", visit=1)
    groups, _ = controller(generator).collect([*prompts("a"), again], 3, SAMPLING, seed=0)
    assert [group.prompt.visit for group in groups] == [0, 1]


def test_a_plan_that_hands_out_nothing_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stingy(Queue):
        def admit(self, free_slots: int, fits: Any = None) -> list[Job]:
            return []

    @dataclass(frozen=True)
    class StingyPlan(Plan):
        def queue(self, lengths: JobLengths, num_slots: int) -> Queue:
            return Stingy(lengths, num_slots)

    monkeypatch.setitem(PLANS, "stingy", StingyPlan())
    with pytest.raises(RuntimeError, match="The plan stingy admits none, while 3 requests wait and no slot decodes"):
        RolloutLoop(FakeGenerator(2, LENGTHS), plan="stingy").collect(prompts("a"), 3, SAMPLING, seed=0)


def test_bubble_ratio_is_the_share_of_slot_steps_without_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(number**2 for number in range(1000))  # each step takes longer than the one before
    monkeypatch.setattr("lit_grpo.rollout.loop.time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    generator = FakeGenerator(2, {"a": [1, 2, 3]})
    _, stats = controller(generator).collect(prompts("a"), 3, SAMPLING, seed=0)
    assert stats.num_steps == 4  # two slots busy for two steps, one for two
    assert stats.bubble_ratio == 0.25
    metrics = stats.metrics()
    assert metrics["rollout/bubble_ratio"] == 0.25
    assert 0.25 < metrics["perf/bubble_ratio"] < 0.5
    assert metrics["rollout/steps"] == 4 and metrics["rollout/tokens"] == 6
    assert metrics["time/rollout_s"] > 4


class Once(Listener):
    """Answers the first group that is whole, and notes all that it hears."""

    def __init__(self, answer: Answer) -> None:
        self.answer: Answer | None = answer
        self.heard: list[str] = []

    def on_completion(self, completion: Completion) -> None:
        self.heard.append(f"{completion.request.key[0]}{completion.request.path[0]} {completion.finish_reason}")

    def on_drop(self, request: Request) -> None:
        self.heard.append(f"{request.key[0]}{request.path[0]} dropped with {request.prefix.num_tokens}")

    def on_group(self, group: RolloutGroup) -> Answer | None:
        self.heard.append(f"whole {group.prompt.prompt_id} {len(group.rollouts)}")
        answer, self.answer = self.answer, None
        return answer

    def on_rollout_end(self, failed: bool) -> None:
        self.heard.append("failed" if failed else "end")


@pytest.mark.parametrize("slots", [3, 4])  # the last sample waits, or decodes
def test_a_listener_may_leave_a_request_out_of_its_group(slots: int) -> None:
    listener = Once(Answer(drop=[("b", 0, (1,))]))
    generator = FakeGenerator(slots, {"a": [2, 2], "b": [5, 9]})
    groups, stats = controller(generator, listeners=[listener]).collect(prompts("a", "b"), 2, SAMPLING, seed=0)
    assert [[r.completion.request.path for r in group.rollouts] for group in groups] == [[(0,), (1,)], [(0,)]]
    assert stats.num_steps == 5 and not generator.remaining
    said = f"b1 dropped with {2 if slots == 4 else 0}"
    assert listener.heard == ["a0 stop", "a1 stop", "whole a 2", said, "b0 stop", "whole b 1", "end"]


class DropsAtOnce(Listener):
    """Drops samples of a group at the first step."""

    def __init__(self, *samples: int) -> None:
        self.samples = samples

    def on_step(self, events: StepEvents) -> Answer:
        samples, self.samples = self.samples, ()
        return Answer(drop=[("a", 0, (sample,)) for sample in samples])


@pytest.mark.parametrize(("samples", "num_steps"), [((0,), 1 + 5 + 5 + 3), ((1, 2), 2 + 3), ((0, 1, 2), 1 + 3)])
def test_a_slot_that_a_listener_frees_is_filled_and_what_was_dropped_while_it_waited_takes_none(
    samples: tuple[int, ...], num_steps: int
) -> None:
    generator = FakeGenerator(1, {"a": [2, 5, 5, 3]})
    (group,), stats = controller(generator, listeners=[DropsAtOnce(*samples)]).collect(prompts("a"), 4, SAMPLING, 0)
    assert len(group.rollouts) == 4 - len(samples) and stats.num_steps == num_steps
    assert sum(stats.lengths) == stats.num_tokens == num_steps


def test_a_listener_may_ask_for_more_of_a_group() -> None:
    more = Request(prompts("b")[0], (2,), SAMPLING)
    listener = Once(Answer(submit=[more]))
    generator = FakeGenerator(4, {"a": [2, 2], "b": [5, 9, 3]})
    groups, _ = controller(generator, listeners=[listener]).collect(prompts("a", "b"), 2, SAMPLING, seed=0)
    assert [[r.completion.num_tokens for r in group.rollouts] for group in groups] == [[2, 2], [5, 9, 3]]


@pytest.mark.parametrize("leftovers", ["keep", "discard"])
def test_what_is_unfinished_at_a_release_goes_on_from_its_prefix_or_begins_anew(leftovers: Leftovers) -> None:
    generator = FakeGenerator(6, {"a": [2, 3], "b": [9, 9], "c": [1, 1]})
    rule = ReleaseRule(num_groups=1, leftovers=leftovers, max_staleness=1 if leftovers == "keep" else 0)
    rollouts = controller(generator, buffer=RolloutBuffer(rule))
    first, stats = rollouts.collect(prompts("a", "b"), 2, SAMPLING, seed=0)
    assert [group.prompt.prompt_id for group in first] == ["a"] and stats.num_steps == 3
    assert [request.prefix.num_tokens for request in rollouts.buffer.unfinished] == [3, 3]
    rollouts.buffer.end_update()
    stats = rollouts.run(rollouts.buffer.ready)
    assert stats.num_steps == (6 if leftovers == "keep" else 9)
    assert [r.completion.num_tokens for r in rollouts.buffer.take()[0].rollouts] == [9, 9]


@dataclass
class Looking(Plugin):
    """Looks at hidden states."""

    at: int = 2

    def setup(self) -> None:
        self.seen: list[Any] = []

    @property
    def observes(self) -> ObservationPoint:
        return ObservationPoint(self.at)

    def on_step(self, events: StepEvents) -> None:
        here = [each for each in events.observations if each.num_tokens == self.at]
        self.seen += [(each.num_tokens, key) for each in here for key in each.keys]


class Showing(FakeGenerator):
    def step(self) -> StepEvents:
        has = {key: self.lengths[key[0]][key[2][0]] - left for key, left in self.remaining.items()}
        events = super().step()
        at = {point: [key for key, count in has.items() if count == point] for point in self.feature_points}
        shown = {point: np.zeros((len(keys), 1), np.float32) for point, keys in at.items() if keys}
        events.observations = [Observation(at[point], point, features) for point, features in shown.items()]
        return events


def test_several_look_at_hidden_states_each_at_its_own_point() -> None:
    first, second = fresh(Looking(1)), fresh(Looking(3))
    generator = Showing(2, {"a": [2, 5], "b": [4, 4]})
    RolloutLoop(generator, listeners=[first, second]).collect(prompts("a", "b"), 2, SAMPLING, 0)
    keys = [("a", 0, (0,)), ("a", 0, (1,)), ("b", 0, (0,)), ("b", 0, (1,))]
    assert sorted(first.seen) == [(1, key) for key in keys] and sorted(second.seen) == [(3, key) for key in keys[1:]]
