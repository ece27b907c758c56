"""The demo task: its arithmetic, its splits and its lengths."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from typing import Any

import pytest

from lit_grpo.rewards.builtin import ExactMatch
from lit_grpo.tasks import ArithmeticRows, DrawnRows
from lit_grpo.tasks.arithmetic import ALPHABET, ANSWER_PATTERN, Remainder, demonstration, draw_exercise, working


def draw(count: int, seed: int = 0) -> list[Remainder]:
    rng = random.Random(seed)
    return [draw_exercise(rng, "train", 39, 18) for _ in range(count)]


def test_a_working_is_a_chain_of_true_equations() -> None:
    assert Remainder(312, 47).prompt == "312%47="
    assert working(Remainder(312, 47)) == "265%47=218%47=171%47=124%47=077%47=030"
    assert working(Remainder(53, 39)) == "014"


def test_every_line_of_a_working_has_the_answer_of_the_exercise() -> None:
    for exercise in draw(3000):
        *lines, last = (exercise.prompt + working(exercise)).split("=")
        assert int(last) == exercise.number % exercise.divisor == int(exercise.answer)
        numbers = [int(line.split("%")[0]) for line in lines]
        assert [line.split("%")[1] for line in lines] == [str(exercise.divisor)] * exercise.num_steps
        assert [a - b for a, b in zip(numbers, [*numbers[1:], int(last)], strict=True)] == [
            exercise.divisor
        ] * exercise.num_steps


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
            assert int(row["answer"]) == number % divisor
            text = row["prompt"] + working(Remainder(number, divisor))
            lines[split].update(text.split("=")[:-1])
    assert not lines["train"] & lines["validation"]


def test_lengths_are_long_tailed() -> None:
    lengths = [len(working(exercise)) + 1 for exercise in draw(4000)]
    assert 20 <= sum(lengths) / len(lengths) <= 30
    assert max(lengths) >= 4 * sum(lengths) / len(lengths)
    assert max(lengths) <= 128


def test_most_of_the_crowd_is_hasty_and_then_wrong() -> None:
    rng = random.Random(0)
    exercises = [exercise for exercise in draw(4000) if exercise.num_steps > 1]
    answers = [demonstration(exercise, rng, hasty=0.6, impatient=0.1) for exercise in exercises]
    exact = ExactMatch(pattern=ANSWER_PATTERN)
    right = [exact(text, answer=exercise.answer) for text, exercise in zip(answers, exercises, strict=True)]
    assert 0.57 < sum("=" not in text for text in answers) / len(answers) < 0.63
    assert 0.28 < sum(map(bool, right)) / len(right) < 0.36


def test_the_alphabet_covers_prompts_and_demonstrations() -> None:
    rng = random.Random(0)
    seen = {c for e in draw(500) for c in e.prompt + demonstration(e, rng, hasty=0.3, impatient=0.3)}
    assert seen == set(ALPHABET)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": 0}, "num_rows must be at least 1, not 0"),
        ({"split": "test"}, "split must be train or validation, not 'test'"),
        ({"max_divisor": 50}, "max_divisor must be from 11 to 49, not 50"),
        ({"max_steps": 19}, "max_steps must be from 1 to 18, not 19"),
        ({"num_rows": 10**6}, "num_rows is 1000000, but the train split has only"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArithmeticRows(**arguments)  # pyright: ignore[reportArgumentType]


class Letters(DrawnRows):
    """One of three letters, under a prompt that is the same for all."""

    most_draws = 200

    def draw(self, rng: random.Random) -> dict[str, Any]:
        return {"prompt": "Which?", "answer": rng.choice("abc")}

    def key(self, row: dict[str, Any]) -> str:
        return row["answer"]


def test_rows_are_told_apart_by_their_key_and_end_where_no_further_one_is_found() -> None:
    assert sorted(row["answer"] for row in Letters(3, "train", 0).rows()) == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"^Letters has only 3 rows of the train split, and num_rows is 4"):
        list(Letters(4, "train", 0).rows())
