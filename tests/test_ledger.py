"""Unfinished requests, and whether another fits beside those that decode, against a count of every step to come."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from lit_grpo.scheduling.jobs import Job, NoLengths
from lit_grpo.scheduling.layouts import Blocks, Pieces, piece_sizes, prompt_room
from lit_grpo.scheduling.ledger import RETRY_STEPS, RequestLedger
from lit_grpo.types import Key, Prompt, Request, SamplingParams, Span, Trajectory


class Told(NoLengths):
    """Lengths that are told beforehand."""

    def __init__(self, lengths: dict[Key, int]) -> None:
        self.lengths = lengths

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        return np.array([self.lengths[job.key] for job in jobs], dtype=np.float64)


def request(sample: int, prompt: str = "a", prompt_tokens: int = 20, max_tokens: int = 400) -> Request:
    return Request(Prompt(prompt, (1,) * prompt_tokens, ""), (sample,), SamplingParams(max_tokens=max_tokens))


def make(num_slots: int, lengths: NoLengths, kv_tokens: int | None, *requests: Request) -> RequestLedger:
    """A ledger in which requests are queued."""
    ledger = RequestLedger()
    ledger.begin(num_slots, lengths, Pieces(), kv_tokens)
    enter(ledger, *requests)
    return ledger


def enter(ledger: RequestLedger, *requests: Request, away: Sequence[Request] = ()) -> None:
    for each in (*requests, *away):
        ledger.ask(each)
    ledger.enter([*requests, *away], {each.key: each for each in away})


def tokens(count: int) -> Trajectory:
    return Trajectory([5] * count, [-0.5] * count, [3] * count)


def room(num_tokens: int, max_tokens: int) -> int:
    """The KV tokens that a completion's pieces take."""
    total = 0
    for size in piece_sizes(max_tokens):
        if total >= num_tokens:
            break
        total += size
    return total


def most_held(jobs: list[Job], has: list[int], lengths: dict[Key, int]) -> int:
    """Count every step to come: each job grows by a token a step until it has its length."""
    prompts = sum({each.group: prompt_room(each.prompt_tokens) for each in jobs}.values())
    peak = 0
    for step in range(1, 401):
        tokens = [
            had + step for each, had in zip(jobs, has, strict=True) if had + step <= max(lengths[each.key], had + 1)
        ]
        peak = max(peak, sum(room(count, 400) for count in tokens))
    return peak + prompts


def test_a_request_is_admitted_exactly_where_every_step_to_come_fits() -> None:
    rng, decided = random.Random(0), {1: 0, 0: 0}
    for _ in range(200):
        number = rng.randint(1, 6)
        lengths: dict[Key, int] = {("a", 0, (sample,)): rng.randint(1, 400) for sample in range(number + 1)}
        asked = [request(sample) for sample in range(number + 1)]
        ledger = make(10, Told(lengths), None, *asked)
        assert ledger.admit(number) == asked[:-1]
        ledger.step = rng.randint(0, 30)
        jobs = [entry.job for entry in ledger.groups["a", 0].values()]
        expected = most_held(jobs, [ledger.step] * number + [0], lengths)
        ledger.kv_tokens = rng.choice([expected - 1, expected, expected + 50])
        fits = expected <= ledger.kv_tokens
        assert len(ledger.admit(1)) == fits
        decided[fits] += 1
    assert min(decided.values()) > 40


def test_what_was_refused_is_asked_for_again_once_something_has_left_or_some_steps_later() -> None:
    first, second = request(0), request(1)
    ledger = make(2, NoLengths(), 500, first, second)
    ledger.step = 1
    assert ledger.admit(2) == [first]
    ledger.kv_tokens = 5000  # there is room from here on
    ledger.step = RETRY_STEPS - 1
    assert ledger.admit(1) == []
    ledger.step = RETRY_STEPS
    assert ledger.admit(1) == [second]
    ledger = make(2, NoLengths(), 500, first, second)
    ledger.step = 1
    assert ledger.admit(2) == [first]
    ledger.remove(first.key)
    assert ledger.admit(1) == [second]


def test_a_request_that_was_preempted_goes_on_with_its_tokens_before_all_others() -> None:
    first, second, third = request(0), request(1, "b"), request(2, "b")
    ledger = make(2, NoLengths(), None, first, second, third)
    assert ledger.admit(2) == [first, second]
    ledger.step = 7
    ledger.preempt(second.after(tokens(7)))
    assert ledger.progress() == {first.key: 7} and ledger.may_admit(("b", 0)) and not ledger.may_admit(("a", 0))
    ledger.step = 9
    assert [each.prefix.num_tokens for each in ledger.admit(1)] == [7]
    ledger.step = 12
    assert ledger.progress() == {first.key: 12, second.key: 10}
    for each in (second, first, third):
        ledger.remove(each.key)
    assert not ledger.groups and ledger.requests == [] and ledger.num_queued == 0
    assert list(ledger.spans) == [
        (second.key, Span(1, 0, 7, 1)),
        (second.key, Span(1, 9, 12, 1)),
        (first.key, Span(0, 0, 12, 0)),
    ]


def test_the_youngest_have_to_leave_where_the_next_step_would_not_fit_and_one_stays() -> None:
    asked = [request(0, "a", 10), request(1, "a", 10), request(0, "b", 20)]
    ledger = RequestLedger()
    ledger.begin(3, NoLengths(), Blocks(), None)
    enter(ledger, *asked)
    assert ledger.admit(3) == asked
    ledger.step = 4
    assert ledger.kv_tokens_held() == 3 * 5 + 10 + 20
    _, second, third = (each.key for each in asked)
    for kv_tokens, leaving in [(45, []), (44, [third]), (20, [third]), (19, [third, second]), (1, [third, second])]:
        ledger.kv_tokens = kv_tokens
        assert ledger.overflow() == leaving


def test_those_leave_that_a_count_of_each_step_finds_though_steps_are_looked_at_together() -> None:
    """Requests end, others come, and memory grows and shrinks, in steps in which it is enough and in others."""
    rng, num_left, num_whole = random.Random(0), 0, 0
    for _ in range(20):
        asked = [request(sample, rng.choice("abc"), 20) for sample in range(12)]
        ledger = make(6, Told({each.key: 30 for each in asked}), 900, *asked)
        while ledger.groups:
            ledger.kv_tokens = max(rng.choice([ledger.kv_tokens or 0] * 9 + [700, 900]), 500)
            ledger.admit(6 - len(ledger.decoding))
            has = ledger.progress()
            rooms = [room(min(has[key] + 1, 400), 400) for key in ledger.decoding]
            expected: list[Key] = []
            while True:
                staying = [key for key in ledger.decoding if key not in expected]
                prompts = len({key[:2] for key in staying}) * prompt_room(20)
                if sum(rooms[: len(staying)]) + prompts <= ledger.kv_tokens or len(staying) == 1:
                    break
                expected.append(staying[-1])
            leaving = ledger.overflow()
            assert leaving == expected
            num_left, num_whole = num_left + len(leaving), num_whole + (not leaving)
            for key in leaving:
                ledger.preempt(ledger.request(key).after(tokens(has[key])))
            ledger.step += 1
            for key, count in ledger.progress().items():
                if rng.random() < 0.01 or count >= 400:
                    ledger.remove(key)
    assert num_left > 50 and num_whole > 500


def test_a_request_is_in_work_once() -> None:
    ledger = make(2, NoLengths(), None, request(0))
    with pytest.raises(ValueError, match=r"\('a', 0, \(0,\)\) is in work already; give each sample a path of its own"):
        ledger.ask(request(0))
    ledger.ask(request(1))
    with pytest.raises(ValueError, match=r"\('a', 0, \(1,\)\) is in work already"):
        ledger.enter([request(1), request(1)], {})


def test_a_request_that_has_been_asked_is_of_its_group_before_it_takes_part() -> None:
    """A plug-in that fills up a group once nothing of it is left sees the branches that an earlier answer has asked."""
    ledger = make(1, NoLengths(), None, request(0))
    ledger.ask(request(1))
    ledger.admit(1)
    ledger.remove(request(0).key)
    assert ledger.num_of(request(1).group) == 1


def test_what_comes_back_from_its_environment_is_first_and_what_has_never_been_queued_is_last() -> None:
    first, second, third = request(0), request(1), request(2)
    ledger = RequestLedger()
    ledger.begin(3, NoLengths(), Blocks(), None)
    enter(ledger, first, second, away=[third])
    assert ledger.admit(1) == [first] and list(ledger.awaiting_env) == [third.key] and ledger.num_queued == 1
    ledger.await_env(first.after(tokens(5)))
    assert not ledger.decoding and list(ledger.awaiting_env) == [third.key, first.key]
    ledger.resume(third)
    ledger.resume(first.after(tokens(6)))
    assert [ledger.admit(1)[0].path for _ in range(3)] == [(0,), (1,), (2,)] and not ledger.awaiting_env


def test_a_rollout_leaves_all_that_is_unfinished_for_the_next_one() -> None:
    first, second, third = request(0), request(1), request(2)
    ledger = make(1, NoLengths(), None, first, second, third)
    ledger.admit(1)
    ledger.await_env(first.after(tokens(3)))
    ledger.admit(1)
    entries = ledger.end([second.after(tokens(4))])
    assert [(each.state, each.request.prefix.num_tokens) for each in entries] == [
        ("awaiting_env", 3),
        ("queued", 4),
        ("queued", 0),
    ]
    before = ledger.copy()
    ledger.begin(1, NoLengths(), Blocks(), None)
    assert list(ledger.awaiting_env) == [first.key]  # a listener that held it is told at the beginning
    ledger.enter([each.request for each in entries], {key: each.request for key, each in ledger.awaiting_env.items()})
    assert [each.prefix.num_tokens for each in ledger.admit(1)] == [4] and list(ledger.awaiting_env) == [first.key]
    ledger.remove(second.key)
    assert [(each.request.prefix.num_tokens, each.state) for each in before.groups["a", 0].values()] == [
        (3, "awaiting_env"),
        (4, "queued"),
        (0, "queued"),
    ]
