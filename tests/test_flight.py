"""What is in flight, and whether another fits beside it, against a count of every step to come."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from lit_grpo.scheduling.flight import RETRY_STEPS, Flight
from lit_grpo.scheduling.jobs import Job, NoLengths
from lit_grpo.scheduling.layouts import Blocks, Pieces, piece_sizes, prompt_room
from lit_grpo.types import Key, Prompt, Request, SamplingParams, Span, Trajectory


class Told(NoLengths):
    """Lengths that are told beforehand."""

    def __init__(self, lengths: dict[Key, int]) -> None:
        self.lengths = lengths

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        return np.array([self.lengths[job.key] for job in jobs], dtype=np.float64)


def request(sample: int, prompt: str = "a", prompt_tokens: int = 20, max_tokens: int = 400) -> Request:
    return Request(Prompt(prompt, (1,) * prompt_tokens, ""), (sample,), SamplingParams(max_tokens=max_tokens))


def make(num_slots: int, lengths: NoLengths, kv_tokens: int | None, *requests: Request) -> tuple[Flight, list[Job]]:
    flight = Flight(num_slots, lengths, Pieces(), kv_tokens)
    return flight, flight.add(requests)


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


def test_a_job_is_taken_exactly_where_every_step_to_come_fits() -> None:
    rng, decided = random.Random(0), {True: 0, False: 0}
    for _ in range(200):
        number = rng.randint(1, 6)
        lengths = {("a", 0, (sample,)): rng.randint(1, 400) for sample in range(number + 1)}
        flight, jobs = make(10, Told(lengths), None, *(request(sample) for sample in range(number + 1)))
        for job in jobs[:-1]:
            assert flight.take(job)
        flight.step = rng.randint(0, 30)
        expected = most_held(jobs, [flight.step] * number + [0], lengths)
        flight.kv_tokens = rng.choice([expected - 1, expected, expected + 50])
        fits = expected <= flight.kv_tokens
        assert flight.take(jobs[-1]) == fits
        decided[fits] += 1
    assert min(decided.values()) > 40


def test_anything_fits_where_nothing_is_active() -> None:
    flight, jobs = make(2, Told({("a", 0, (0,)): 400}), 10, request(0))
    assert flight.take(jobs[0])


def test_what_was_refused_is_asked_for_again_once_something_has_left_or_some_steps_later() -> None:
    flight, (first, second) = make(2, NoLengths(), 500, request(0), request(1))
    flight.step = 1
    assert flight.asks_memory_again() and flight.take(first)
    assert not flight.take(second) and not flight.asks_memory_again()
    flight.step = RETRY_STEPS
    assert flight.asks_memory_again() and not flight.take(second)
    flight.step += 1
    assert not flight.asks_memory_again()
    flight.leave(first.key)
    assert flight.asks_memory_again() and flight.take(second)


def test_a_job_that_was_set_aside_goes_on_with_its_tokens() -> None:
    flight, (first, second) = make(2, NoLengths(), None, request(0), request(1, "b"))
    assert flight.take(first) and flight.take(second)
    flight.step = 7
    assert flight.wait(flight.request(second.key).after(tokens(7))) == second
    assert flight.progress() == {("a", 0, (0,)): 7} and flight.waits(("b", 0)) and not flight.waits(("a", 0))
    flight.step = 9
    flight.take(second)
    flight.step = 12
    assert flight.progress() == {("a", 0, (0,)): 12, ("b", 0, (1,)): 10}
    flight.leave(("b", 0, (1,)))
    flight.leave(("a", 0, (0,)))
    assert flight.active == [] and flight.requests == []
    assert list(flight.spans) == [
        (("b", 0, (1,)), Span(1, 0, 7, 1)),
        (("b", 0, (1,)), Span(1, 9, 12, 1)),
        (("a", 0, (0,)), Span(0, 0, 12, 0)),
    ]


def test_the_youngest_have_to_leave_where_the_next_step_would_not_fit_and_one_stays() -> None:
    flight = Flight(3, NoLengths(), Blocks(), None)
    jobs = flight.add([request(0, "a", 10), request(1, "a", 10), request(0, "b", 20)])
    assert all(flight.take(job) for job in jobs)
    flight.step = 4
    assert flight.kv_tokens_held() == 3 * 5 + 10 + 20
    _, second, third = (job.key for job in jobs)
    for kv_tokens, leaving in [(45, []), (44, [third]), (20, [third]), (19, [third, second]), (1, [third, second])]:
        flight.kv_tokens = kv_tokens
        assert flight.overflow() == leaving


def test_a_request_is_in_work_once() -> None:
    flight, _ = make(2, NoLengths(), None, request(0))
    with pytest.raises(ValueError, match=r"\('a', 0, \(0,\)\) is in work already; give each sample a path of its own"):
        flight.add([request(0)])
