"""The demo task: its arithmetic, its splits and its lengths."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import pytest

from lit_grpo.rewards.builtin import ExactMatch
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.tasks.arithmetic import ALPHABET, ANSWER_PATTERN, Remainder, demonstration, draw_exercise, working


def draw(count: int, seed: int = 0) -> list[Remainder]:
    rng = random.Random(seed)
    return [draw_exercise(rng, "train", 39, 18) for _ in range(count)]


def test_the_reward_pattern_reads_the_last_number_only_when_the_completion_has_ended_there() -> None:
    exact = ExactMatch(pattern=ANSWER_PATTERN)
    assert exact("265%47=218%47=171%47=124%47=077%47=030", answer="030") == 1.0
    assert exact("030", answer="030") == 1.0
    assert exact("265%47=218%47=171", answer="030") == 0.0
    assert exact("030%47=", answer="030") == 0.0
    assert exact("265%030", answer="030") == 0.0


def test_rows_are_the_same_each_time_and_differ_by_seed() -> None:
    rows = list(ArithmeticRows(num_rows=50, seed=3).rows())
    assert rows == list(ArithmeticRows(num_rows=50, seed=3).rows())
    assert rows != list(ArithmeticRows(num_rows=50, seed=4).rows())


@pytest.mark.nightly
def test_rows_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    code = "from lit_grpo.tasks import ArithmeticRows; print([r['prompt'] for r in ArithmeticRows(num_rows=5).rows()])"
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == f"{[row['prompt'] for row in ArithmeticRows(num_rows=5).rows()]}\n"


def test_rows_are_unique_and_no_line_of_a_validation_working_is_ever_seen_in_training() -> None:
    lines = {}
    for split in ("train", "validation"):
        rows = list(ArithmeticRows(num_rows=2000, split=split).rows())
        assert len({row["prompt"] for row in rows}) == 2000
        lines[split] = set()
        for row in rows:
            number, divisor = map(int, re.findall(r"\d+", row["prompt"]))
            assert row["num_steps"] == number // divisor
            assert int(row["answer"]) == number % divisor and row["working"] == working(Remainder(number, divisor))
            text = row["prompt"] + working(Remainder(number, divisor))
            lines[split].update(text.split("=")[:-1])
    assert not lines["train"] & lines["validation"]


def test_the_alphabet_covers_prompts_and_demonstrations() -> None:
    rng = random.Random(0)
    seen = {c for e in draw(500) for c in e.prompt + demonstration(e, rng, hasty=0.3, impatient=0.3)}
    assert seen == set(ALPHABET)


def test_more_rows_than_there_are_exercises_are_refused() -> None:
    with pytest.raises(ValueError, match="num_rows is 1000000, but the train split has only"):
        ArithmeticRows(num_rows=10**6)
