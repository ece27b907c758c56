"""Prompts that are both trained on and held out, and how the doctor quotes prompts."""

from __future__ import annotations

import pytest

from lit_grpo.data.overlap import shared_validation
from lit_grpo.tools.doctor.prompts import differing_parts
from lit_grpo.types import Prompt


def prompts(split: str, numbers: range) -> list[Prompt]:
    return [Prompt(f"{split}/{number}", (1, number), str(number)) for number in numbers]


@pytest.mark.parametrize(
    ("held_out", "said"),
    [
        (range(20), "20 of 20 prompts of data.validation are in data.train too"),
        (range(18, 38), "2 of 20 prompts of data.validation are in data.train too"),
        (range(19, 39), ""),  # one of twenty
        (range(20, 40), ""),
        (range(0), ""),
    ],
)
def test_validation_prompts_that_are_trained_on_are_counted_by_their_tokens(held_out: range, said: str) -> None:
    assert shared_validation({"train": prompts("train", range(20)), "validation": prompts("v", held_out)}) == said


def test_quotes_of_long_prompts_show_where_they_differ_and_end() -> None:
    system = "You are a careful assistant. Think step by step, and then answer. " * 3
    quotes = differing_parts([f"{system}What is {n} + {n}? <answer>" for n in range(3)], 60)
    assert len(set(quotes)) == 3 and all(f"{n} + {n}? <answer>" in quotes[n] for n in range(3))
    assert max(map(len, quotes)) <= 60
    long = differing_parts([f"Question {n}: {'word ' * 60}End {n}" for n in range(2)], 60)
    assert all(len(quote) <= 60 and f"Question {n}" in quote and f"End {n}" in quote for n, quote in enumerate(long))
    assert differing_parts(["1+1=", "1+2="], 60) == ['"1+1="', '"1+2="']
