"""What is in flight, and whether another fits beside it, against a count of every step to come."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from lit_grpo.scheduling.flight import InFlight, piece_sizes, prompt_room, smallest_budget
from lit_grpo.scheduling.jobs import Job, NoLengths
from lit_grpo.types import Key, Span


class Told(NoLengths):
    """Lengths that are told beforehand."""

    def __init__(self, lengths: dict[Key, int]) -> None:
        self.lengths = lengths

    def estimate(self, jobs: Sequence[Job]) -> np.ndarray:
        return np.array([self.lengths[job.key] for job in jobs], dtype=np.float64)


def job(sample: int, prompt: str = "a", prompt_tokens: int = 20, max_tokens: int = 400) -> Job:
    return Job((prompt, 0, (sample,)), prompt_tokens, max_tokens)


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
        first, new = [job(sample) for sample in range(number)], job(number)
        in_flight = InFlight(10, Told(lengths), None)
        for each in first:
            assert in_flight.take(each)
        in_flight.step = rng.randint(0, 30)
        expected = most_held([*first, new], [in_flight.step] * number + [0], lengths)
        in_flight.kv_tokens = rng.choice([expected - 1, expected, expected + 50])
        fits = expected <= in_flight.kv_tokens
        assert in_flight.take(new) == fits
        decided[fits] += 1
    assert min(decided.values()) > 40


def test_anything_fits_where_nothing_is_active() -> None:
    in_flight = InFlight(2, Told({("a", 0, (0,)): 400}), kv_tokens=10)
    assert in_flight.take(job(0))


def test_a_job_that_was_set_aside_goes_on_with_its_tokens() -> None:
    in_flight = InFlight(2, NoLengths(), None)
    in_flight.take(job(0))
    in_flight.take(job(1, "b"))
    in_flight.step = 7
    in_flight.set_aside(("b", 0, (1,)))
    assert in_flight.progress() == {("a", 0, (0,)): 7}
    in_flight.step = 9
    in_flight.take(job(1, "b"))
    in_flight.step = 12
    assert in_flight.progress() == {("a", 0, (0,)): 12, ("b", 0, (1,)): 10}
    in_flight.finish(("b", 0, (1,)))
    in_flight.finish(("a", 0, (0,)))
    assert len(in_flight) == 0
    assert list(in_flight.spans) == [
        (("b", 0, (1,)), Span(1, 0, 7, 1)),
        (("b", 0, (1,)), Span(1, 9, 12, 1)),
        (("a", 0, (0,)), Span(0, 0, 12, 0)),
    ]


def test_the_smallest_budget_is_a_prompt_and_a_whole_completion() -> None:
    assert smallest_budget(17, 100) == 32 + 100
