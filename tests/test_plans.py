"""The order in which waiting requests are handed out."""

from __future__ import annotations

import random

import torch

from lit_grpo.scheduling.plans import FirstCome
from lit_grpo.types import Completion, Prompt, Request, SamplingParams


def requests(prompt_id: str, count: int) -> list[Request]:
    return [Request(Prompt(prompt_id, (1, 2), ""), sample, SamplingParams()) for sample in range(count)]


def test_first_come_hands_out_in_the_order_of_arrival_whatever_the_group() -> None:
    plan = FirstCome()
    plan.add(requests("a", 3))
    plan.add(requests("b", 2))
    assert [r.key[::2] for r in plan.admit(4)] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    plan.add(requests("c", 1))
    assert [r.key[::2] for r in plan.admit(4)] == [("b", 1), ("c", 0)]


def test_first_come_hands_out_never_more_than_asked_and_nothing_for_no_slots() -> None:
    plan = FirstCome()
    plan.add(requests("a", 5))
    assert plan.admit(0) == []
    assert len(plan.admit(2)) == 2
    assert len(plan) == 3
    assert len(plan.admit(99)) == 3
    assert len(plan) == 0
    assert plan.admit(1) == []


def test_first_come_does_not_reorder_by_what_has_finished() -> None:
    plan = FirstCome()
    first, second, third = requests("a", 3)
    plan.add([first, second, third])
    assert plan.admit(1) == [first]
    nothing = torch.empty(0, dtype=torch.int64)
    plan.finish(Completion(first, nothing, nothing.float(), nothing, "length"))
    assert len(plan) == 2
    assert plan.admit(2) == [second, third]


def test_first_come_loses_and_repeats_nothing() -> None:
    rng = random.Random(0)
    for _ in range(20):
        plan, added, handed = FirstCome(), [], []
        for number in range(rng.randint(1, 30)):
            new = requests(f"p{number}", rng.randint(0, 5))
            plan.add(iter(new))
            added += new
            handed += plan.admit(rng.randint(0, 6))
            assert len(plan) == len(added) - len(handed)
        handed += plan.admit(10_000)
        assert handed == added
