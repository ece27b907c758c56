"""The word problems: answers, splits, and what a reply is judged by."""

from __future__ import annotations

import re

import pytest

from lit_grpo.environments.calls import FORMATS, ToolCall, read_turn
from lit_grpo.environments.tools import Tool, named
from lit_grpo.tasks import WordProblemRows
from lit_grpo.tasks.calculator import calculate

QUESTION = re.compile(r"(\w+) has (\d+) (\w+) and \w+ (\d+) (.*)\. How many \3 does \1 have now\?")


def solved(question: str) -> tuple[int, int, int]:
    """Read a question; return its two numbers and the answer."""
    match = QUESTION.fullmatch(question)
    assert match is not None, question
    first, second = int(match[2]), int(match[4])
    return first, second, first + second if match[5] == "more" else first - second


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_answer_follows_from_its_question(split: str) -> None:
    rows = list(WordProblemRows(300, split).rows())  # pyrefly: ignore[bad-argument-type]
    answers = [solved(row["prompt"][-1]["content"])[2] for row in rows]
    assert [row["answer"] for row in rows] == [str(answer) for answer in answers]
    assert min(answers) >= 1
    more = sum("more" in row["prompt"][-1]["content"] for row in rows)
    assert 100 < more < 200


def test_examples_with_a_tool_call_it_as_it_can_be_called_and_say_what_it_answers() -> None:
    (row,) = WordProblemRows(1, tool=True).rows()
    (plain,) = WordProblemRows(1).rows()
    assert row["prompt"][-1] == plain["prompt"][-1] and row["answer"] == plain["answer"]
    *examples, _ = row["prompt"]
    assert [message["role"] for message in examples] == ["user", "assistant", "tool", "assistant"] * 2
    tools = named([Tool.of(calculate)])
    for called, said, reply in zip(examples[1::4], examples[2::4], examples[3::4], strict=True):
        (call,) = read_turn(called["content"], FORMATS["json"], tools).calls
        assert isinstance(call, ToolCall) and tools[call.name].function(**call.arguments) == said["content"]
        assert reply["content"] == said["content"]


def test_no_pair_of_numbers_is_in_both_splits_and_no_row_is_twice() -> None:
    pairs = {}
    for split in ("train", "validation"):
        questions = [row["prompt"][-1]["content"] for row in WordProblemRows(1000, split).rows()]
        assert len(set(questions)) == 1000
        pairs[split] = {(solved(question)[:2], "more" in question) for question in questions}
    assert not pairs["train"] & pairs["validation"]
    assert len(pairs["validation"]) > 20
