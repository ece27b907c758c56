"""Requests of several turns: they wait away from their slots for what they observe, and their groups stay open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made import Environment, decode_alone, full_logprobs, observed

from lit_grpo.methods.plans import find_plan, shipped_plans
from lit_grpo.plugins import Answer, Listener, Resume
from lit_grpo.policy.loading import load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.rules import ReleaseRule
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.rollout.slots.kv.cache import KVBudget
from lit_grpo.scheduling.jobs import Job, NoLengths
from lit_grpo.types import EMPTY, Completion, Key, Prompt, Request, Rollout, SamplingParams

PROMPTS = [Prompt("a", (2, 3, 4), ""), Prompt("b", (9,), ""), Prompt("c", tuple(range(2, 30)), "")]
SAMPLING = SamplingParams(max_tokens=24, max_observed=12)
GROUP = 4


@pytest.fixture
def make(policy: Any, policy_folder: Path) -> Callable[..., SlotGenerator]:
    def make_generator(num_slots: int = 3, **options: Any) -> SlotGenerator:
        generator = SlotGenerator(num_slots, **options)
        generator.start(PolicySpec(policy, load_tokenizer(str(policy_folder))))
        generator.load_weights(policy.named_parameters(), 0)
        return generator

    return make_generator


def with_memory(generator: Any, kv_tokens: int) -> Any:
    """Give a generator memory for so many KV tokens."""
    size = generator.budget.bytes_per_token
    generator.budget = KVBudget(kv_tokens * size, size, 8192)
    return generator


@pytest.fixture(scope="module")
def expected(policy: Any, policy_folder: Path) -> dict[Key, Completion]:
    """Each trajectory by itself, turn after turn, without the loop."""
    generator = SlotGenerator(1)
    generator.start(PolicySpec(policy, load_tokenizer(str(policy_folder))))
    generator.load_weights(policy.named_parameters(), 0)
    requests = group_requests(PROMPTS, GROUP, SAMPLING, seed=0)
    return {request.key: decode_alone(generator, request) for request in requests}


def check(groups: Sequence[Any], expected: dict[Key, Completion]) -> None:
    rollouts = {each.completion.request.key: each.completion for group in groups for each in group.rollouts}
    assert rollouts.keys() == expected.keys()
    for key, completion in rollouts.items():
        other = expected[key]
        assert completion.token_ids_T.tolist() == other.token_ids_T.tolist()
        assert completion.versions_T.tolist() == other.versions_T.tolist()
        assert completion.text == other.text and completion.finish_reason == other.finish_reason
        assert torch.allclose(completion.logprobs_T, other.logprobs_T, atol=1e-5)


@pytest.mark.parametrize(
    ("plan", "most_delay"),
    [*((plan, 7) for plan in shipped_plans()), *((plan, delay) for plan in ("fcfs", "points") for delay in (0, 1, 60))],
)
def test_trajectories_are_what_they_are_one_by_one(
    plan: str, most_delay: int, make: Any, policy: Any, expected: dict[Key, Completion]
) -> None:
    """Whatever else is decoded meanwhile, in whatever order answers come."""
    points = (2, 5) if plan == "points" else ()
    environment = Environment(most_delay)
    loop = RolloutLoop(make(), plan=find_plan("lpt" if points else plan), listeners=[environment], points=points)
    groups, stats = loop.collect(PROMPTS, GROUP, SAMPLING, seed=0)
    check(groups, expected)
    assert sorted(environment.finished) == sorted(expected)  # each once, after its last turn
    assert sum(stats.lengths) == sum(completion.num_sampled for completion in expected.values())
    assert environment.most_away > 0 or most_delay == 0
    for group in groups:
        for rollout in group.rollouts:
            sampled_T = rollout.completion.versions_T >= 0
            expected_T = full_logprobs(policy, Rollout(group.prompt, rollout.completion))
            assert torch.allclose(rollout.completion.logprobs_T[sampled_T], expected_T[sampled_T], atol=1e-5)


def test_memory_counts_what_is_observed(make: Any, expected: dict[Key, Completion]) -> None:
    """With memory for two trajectories and not for three, no more are decoded at a time, and nothing is lost."""
    generator = with_memory(make(3), 130)
    groups, stats = RolloutLoop(generator, listeners=[Environment(3)]).collect(PROMPTS, GROUP, SAMPLING, seed=0)
    check(groups, expected)
    assert stats.kv_tokens_peak <= 130
    _, free = RolloutLoop(make(3), listeners=[Environment(3)]).collect(PROMPTS, GROUP, SAMPLING, seed=0)
    assert free.kv_tokens_peak > 130


def test_lengths_are_told_of_sampled_tokens(make: Any, expected: dict[Key, Completion]) -> None:
    class Told(NoLengths):
        points: tuple[int, ...] = (3,)

        def __init__(self) -> None:
            self.ended: dict[Key, int] = {}
            self.seen: list[Key] = []
            self.most = 0

        def finish(self, job: Job, num_tokens: int) -> None:
            assert job.key not in self.ended
            self.ended[job.key] = num_tokens

        def progress(self, num_tokens: Any) -> None:
            self.most = max([self.most, *num_tokens.values()])

        def observe(self, keys: Any, num_tokens: int, features: Any) -> None:
            assert num_tokens == 3
            self.seen += keys

    told, generator = Told(), with_memory(make(3), 130)
    RolloutLoop(generator, lengths=told, listeners=[Environment(3)]).collect(PROMPTS, GROUP, SAMPLING, seed=0)
    assert told.ended == {key: completion.num_sampled for key, completion in expected.items()}
    assert told.most <= SAMPLING.max_tokens
    assert sorted(set(told.seen)) == sorted(key for key, each in expected.items() if each.num_sampled > 3)


def short(completion: Completion) -> bool:
    return completion.finish_reason == "stop"


class Holder(Listener):
    """Holds every first turn, and does with them as a test says."""

    def __init__(self, act: Callable[[list[Completion]], Answer] | None = None) -> None:
        self.held: list[Completion] = []
        self._act = act

    def on_turn(self, completion: Completion) -> Answer | None:
        if len(completion.turns) > 1 or completion.request.key in {each.request.key for each in self.held}:
            return None
        self.held.append(completion)
        return Answer(hold=[completion.request.key])

    def on_idle(self) -> Answer | None:
        if self._act is None or not self.held:
            return None
        act, self._act = self._act, None
        return act(self.held)


def test_what_is_away_can_be_finished_and_dropped(make: Any) -> None:
    def act(held: list[Completion]) -> Answer:
        done, dropped = sorted(held, key=lambda each: each.request.path)
        over = done.request.after(done.followed_by([7, 7])).ended("stop", "over")
        return Answer(finish=[over], drop=[dropped.request.key])

    (group,), _ = RolloutLoop(make(), listeners=[Holder(act)]).collect(PROMPTS[:1], 2, SAMPLING, seed=0)
    (over,) = [rollout.completion for rollout in group.rollouts]
    assert (over.request.path, over.text, over.num_observed, over.finish_reason) == ((0,), "over", 2, "stop")


@pytest.mark.parametrize("points", [(), (2, 5)])
def test_requests_may_be_away_before_they_begin(points: tuple[int, ...], make: Any) -> None:
    """They go on after what they observe first, as one with that prefix does; with a probe too."""

    class Opening(Listener):
        waiting: Sequence[Request] = ()

        def on_requests(self, requests: Sequence[Request]) -> Sequence[Request]:
            self.waiting = requests
            return requests

        def on_idle(self) -> Answer:
            opened = [Resume(each.after(EMPTY.followed_by([5, 6, each.path[0] + 2]))) for each in self.waiting]
            self.waiting = ()
            return Answer(resume=opened)

    loop = RolloutLoop(make(), listeners=[Opening()], plan="lpt" if points else "fcfs", points=points)
    groups, stats = loop.collect(PROMPTS, GROUP, SAMPLING, seed=0)
    alone = make(1)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        completion = rollout.completion
        begun = EMPTY.followed_by([5, 6, completion.request.path[0] + 2])
        alone.submit([completion.request.after(begun)])
        while not (finished := alone.step().finished):
            pass
        assert completion.token_ids_T.tolist() == finished[0].token_ids_T.tolist()
        assert completion.num_observed == 3 and completion.segments[0].version is None
    assert sum(stats.lengths) == sum(each.completion.num_sampled for group in groups for each in group.rollouts)


def resuming(*requests: Request, how: Any = "go_on") -> Answer:
    return Answer(resume=[Resume(request, how) for request in requests])


def test_a_request_may_begin_again(make: Any) -> None:
    def act(held: list[Completion]) -> Answer:
        return resuming(*(each.request.after(EMPTY) for each in held), how="again")

    holder = Holder(act)
    groups, stats = RolloutLoop(make(), listeners=[holder]).collect(PROMPTS, 1, SAMPLING, seed=0)
    plain, _ = RolloutLoop(make()).collect(PROMPTS, 1, SAMPLING, seed=0)
    for group, other in zip(groups, plain, strict=True):
        ids = [each.rollouts[0].completion.token_ids_T.tolist() for each in (group, other)]
        assert ids[0] == ids[1]
    assert stats.num_discarded == sum(completion.num_sampled for completion in holder.held) > 0
    assert sum(stats.lengths) == sum(group.rollouts[0].completion.num_sampled for group in groups)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda held: Answer(hold=[held[0].request.key]), "has not just come to the end of a turn"),
        (lambda held: resuming(held[0].request), "put what is observed after them"),
        (
            lambda held: resuming(held[0].request.after(held[0].followed_by([3], [-1.0], 0))),
            "put what is observed after them",
        ),
        (
            lambda held: Answer(
                resume=[Resume(each.request.after(each.followed_by([3] * 13))) for each in held if short(each)]
            ),
            r"sampling.max_observed 12 allows no 13 that are observed",
        ),
        (lambda _: resuming(Request(PROMPTS[0], (9,), SAMPLING)), "is not away; hold it first"),
        (lambda _: Answer(finish=[Request(PROMPTS[0], (9,), SAMPLING).ended("stop")]), "is not away; hold it first"),
        (
            lambda _: Answer(resume=[Resume(Request(PROMPTS[0], (9,), SAMPLING), "rewritten")]),
            r"rewrites .* is not away; hold it first",
        ),
    ],
)
def test_answers_that_cannot_be_are_refused(act: Any, message: str, make: Any) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutLoop(make(), listeners=[Holder(act)]).collect(PROMPTS, GROUP, SAMPLING, seed=0)


def test_a_trajectory_at_its_limit_does_not_go_on(make: Any) -> None:
    class Stubborn(Listener):
        def on_turn(self, completion: Completion) -> Answer:
            return Answer(resume=[Resume(completion.request.after(completion.followed_by([3])))])

    with pytest.raises(ValueError, match=r"sampling.max_tokens 24 allows no 25 that are sampled"):
        RolloutLoop(make(), listeners=[Stubborn()]).collect(
            PROMPTS[:1], 1, SamplingParams(max_tokens=24, max_observed=99), 0
        )


def test_groups_with_a_member_away_stay_open_between_rollouts(make: Any, expected: dict[Key, Completion]) -> None:
    """What is away when enough groups are there stays in the buffer and its checkpoints, and goes on in the next."""
    rule = ReleaseRule(num_groups=1, leftovers="keep", max_staleness=9)
    buffer, generator = RolloutBuffer(rule), make()

    class Slow(Environment):
        """Answers for the first prompt at once, and for the others in the second rollout."""

        may_answer = False

        def on_turn(self, completion: Completion) -> Answer | None:
            tokens = observed(completion)
            if tokens is None:
                return None
            request = completion.request.after(completion.followed_by(tokens))
            if completion.request.prompt.prompt_id == "a" or self.may_answer:
                return Answer(resume=[Resume(request)])
            self.waiting[request.key] = (0, request)
            return Answer(hold=[request.key])

        def _answer(self) -> Answer:
            return super()._answer() if self.may_answer else Answer()

    slow = Slow()
    loop = RolloutLoop(generator, buffer, listeners=[slow])
    buffer.open(group_requests(PROMPTS, GROUP, SAMPLING, seed=0))
    first = loop.run(buffer.ready)
    groups = buffer.take()
    away = {request.key for request in buffer.away}
    assert away == slow.waiting.keys() and away
    buffer.end_update()
    restored = RolloutBuffer(rule)
    restored.load_state_dict(buffer.state_dict())
    assert {each.key for each in restored.away} == away
    assert {each.key for each in restored.unfinished} == {each.key for each in buffer.unfinished}

    slow.may_answer = True
    second = RolloutLoop(generator, restored, listeners=[slow]).run(lambda _: not restored.asks)
    restored.rule = ReleaseRule(num_groups=9, leftovers="keep", max_staleness=9)
    check([*groups, *restored.take()], expected)
    total = sum(completion.num_sampled for completion in expected.values())
    assert sum(first.lengths) + sum(second.lengths) == total


def test_what_is_away_and_too_old_begins_again(make: Any) -> None:
    rule = ReleaseRule(num_groups=1, leftovers="keep", max_staleness=1)
    buffer = RolloutBuffer(rule)
    holder = Holder()
    buffer.open(group_requests(PROMPTS[:1], 2, SAMPLING, seed=0))
    RolloutLoop(make(), buffer, listeners=[holder]).run(lambda _: len(holder.held) == 2)
    assert len(buffer.away) == 2 and not buffer.unfinished
    buffer.renew(1)
    assert len(buffer.away) == 2
    renewal = buffer.renew(2)
    assert not buffer.away and [request.prefix.num_tokens for request in buffer.unfinished] == [0, 0]
    assert renewal.num_discarded == sum(completion.num_tokens for completion in holder.held)


def test_an_interrupt_while_requests_are_away_leaves_nothing(make: Any) -> None:
    def act(_: list[Completion]) -> Answer:
        raise KeyboardInterrupt

    generator, buffer = make(), RolloutBuffer()
    with pytest.raises(KeyboardInterrupt):
        RolloutLoop(generator, buffer, listeners=[Holder(act)]).collect(PROMPTS[:1], 2, SAMPLING, seed=0)
    capacity = generator.capacity()
    assert capacity.free_slots == capacity.slots and not len(buffer)


def test_the_first_listener_that_answers_decides(make: Any) -> None:
    heard: list[str] = []

    class Deciding(Listener):
        def __init__(self, name: str, answer: Answer | None) -> None:
            self.name, self.answer = name, answer

        def on_turn(self, completion: Completion) -> Answer | None:
            heard.append(self.name)
            return self.answer

    loop = RolloutLoop(make(), listeners=[Deciding("none", None), Deciding("over", Answer()), Deciding("late", None)])
    (group,), _ = loop.collect(PROMPTS[:1], 1, SAMPLING, seed=0)
    assert heard == ["none", "over"] and len(group.rollouts) == 1


def test_prompts_of_what_was_finished_while_away_are_let_go(make: Any) -> None:
    def act(held: list[Completion]) -> Answer:
        return Answer(finish=[each.request.after(each).ended("stop", "over") for each in held])

    released: list[str] = []
    generator = make()
    release = generator.release

    def noted(prompts: Any) -> None:
        own = list(prompts)
        released.extend(prompt.prompt_id for prompt in own)
        release(own)

    generator.release = noted
    RolloutLoop(generator, listeners=[Holder(act)]).collect(PROMPTS, 2, SAMPLING, seed=0)
    assert set(released) == {prompt.prompt_id for prompt in PROMPTS}
    assert generator.capacity().kv_tokens_in_use == 0
