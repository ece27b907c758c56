"""Traces of completion lengths, made up and recorded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lit_grpo.tools.simulation.known import KnownLengths, lengths_of
from lit_grpo.tools.simulation.traces import FAMILIES, load_trace, noisy, synthetic_trace

GOOD = {"prompt_id": "a", "sample_id": 0, "prompt_tokens": 3, "tokens": 9}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_lengths_within_the_limit_that_follow_from_the_seed(family: str) -> None:
    trace = synthetic_trace(f"{family}:prompts=5,group=7,max_tokens=200,seed=3")
    assert len(trace) == 35 and trace.lengths.dtype == np.int64
    assert trace.lengths.min() >= 1 and trace.lengths.max() <= 200
    assert trace.group.tolist() == [prompt for prompt in range(5) for _ in range(7)]
    assert all(len(set(trace.prompt_tokens[trace.group == group])) == 1 for group in range(5))
    same = synthetic_trace(f"{family}:seed=3,max_tokens=200,group=7,prompts=5")
    assert (trace.lengths == same.lengths).all() and (trace.prompt_tokens == same.prompt_tokens).all()
    other = synthetic_trace(f"{family}:prompts=5,group=7,max_tokens=200,seed=4")
    assert (trace.lengths != other.lengths).any()


def test_negative_noise_is_told_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^The noise is -0\.1: .* so give 0 or more\.$"):
        noisy(np.array([1.0]), -0.1)


def test_lengths_of_a_trace_are_true_without_noise_and_within_the_limit_with_it() -> None:
    trace = synthetic_trace("truncated:prompts=4,group=8,max_tokens=50")
    jobs = trace.jobs
    assert lengths_of(trace, 0.0).estimate(jobs[::-1]).tolist() == trace.lengths[::-1].tolist()
    estimates = lengths_of(trace, 2.0)
    assert estimates.informative and estimates.estimate(jobs).max() == 50 and estimates.estimate(jobs).min() >= 1
    nothing = lengths_of(trace, None)
    assert not nothing.informative and set(nothing.estimate(jobs)) == {50}


def test_a_recorded_trace_keeps_order_groups_and_batches(tmp_path: Path) -> None:
    rows = [
        GOOD | {"sample_id": 1, "tokens": 7, "step": 4, "predicted": 6.5},
        {"prompt_id": "b", "sample_id": 0, "prompt_tokens": 5, "tokens": 2, "step": 3, "predicted": 2, "reward": 1},
        GOOD | {"step": 4, "predicted": 8},
        GOOD | {"visit": 1, "step": 5, "predicted": 1},
    ]
    trace = load_trace(str(write(tmp_path / "run.jsonl", *rows, "")))
    assert trace.keys == [("a", 0, (1,)), ("b", 0, (0,)), ("a", 0, (0,)), ("a", 1, (0,))]
    assert trace.group.tolist() == [0, 1, 0, 2]
    assert trace.lengths.tolist() == [7, 2, 9, 9] and trace.prompt_tokens.tolist() == [3, 5, 3, 3]
    assert set(trace.max_tokens) == {9}
    assert trace.predicted is not None and trace.predicted.tolist() == [6.5, 2, 8, 1]
    batches = trace.batches()
    assert [batch.keys for batch in batches] == [[("b", 0, (0,))], [("a", 0, (1,)), ("a", 0, (0,))], [("a", 1, (0,))]]
    assert batches[1].predicted is not None and batches[1].predicted.tolist() == [6.5, 8]


def test_a_trace_without_steps_is_one_batch_and_has_no_predictions_unless_in_all_rows(tmp_path: Path) -> None:
    trace = load_trace(str(write(tmp_path / "run.jsonl", GOOD | {"predicted": 3}, GOOD | {"sample_id": 1})))
    assert len(trace.batches()) == 1 and trace.predicted is None


def test_tokens_are_read_where_all_rows_have_them_and_a_prompt_from_its_first_row(tmp_path: Path) -> None:
    rows = [
        GOOD | {"tokens": 2, "token_ids": [5, 6], "prompt_token_ids": [1, 2, 3], "step": 1},
        GOOD | {"tokens": 1, "token_ids": [7], "sample_id": 1, "step": 2},
        {"prompt_id": "b", "sample_id": 0, "prompt_tokens": 5, "tokens": 1, "token_ids": [8], "step": 2},
    ]
    trace = load_trace(str(write(tmp_path / "run.jsonl", *rows)))
    assert trace.texts == [((1, 2, 3), (5, 6)), ((1, 2, 3), (7,)), ((), (8,))]
    assert trace.batches()[1].texts == trace.texts[1:]
    assert load_trace(str(write(tmp_path / "run.jsonl", *rows, GOOD | {"visit": 1}))).texts is None


def test_what_was_recorded_before_anything_was_known_counts_as_its_limit(tmp_path: Path) -> None:
    rows = GOOD | {"tokens": 5, "predicted": None}, GOOD | {"sample_id": 1, "tokens": 9, "predicted": 4}
    trace = load_trace(str(write(tmp_path / "run.jsonl", *rows)))
    assert trace.predicted is not None
    assert KnownLengths(trace.jobs, trace.predicted).estimate(trace.jobs).tolist() == [9, 4]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{'a': 1}", 'line 2: "{\'a\': 1}" is no JSON (Expecting property name enclosed in double quotes): give one'),
        ([1], "line 2: '[1]' is no JSON object: give one with prompt_id, sample_id, prompt_tokens, tokens."),
        ({"prompt_id": "a", "sample_id": 1, "tokens": 2}, "line 2: prompt_tokens is missing: give"),
        (GOOD | {"prompt_id": 7}, "line 2: prompt_id is 7: give text in quotes."),
        (GOOD | {"tokens": 0}, "line 2: tokens is 0: give a whole number from 1 to"),
        (GOOD | {"tokens": 2.5}, "line 2: tokens is 2.5: give a whole number from 1 to"),
        (GOOD | {"sample_id": True}, "line 2: sample_id is True: give a whole number from 0 to"),
        (GOOD | {"visit": -1}, "line 2: visit is -1: give a whole number from 0 to"),
        (GOOD | {"sample_id": 1, "predicted": -3}, "line 2: predicted is -3: give the tokens expected, from above 0"),
        (GOOD | {"sample_id": 1, "token_ids": "abc"}, "line 2: token_ids is 'abc': give a list of whole numbers"),
        (GOOD | {"sample_id": 1, "token_ids": [1, -2]}, "line 2: token_ids is [1, -2]: give a list of whole"),
        (GOOD | {"sample_id": 1, "prompt_token_ids": [1]}, "line 2: prompt_token_ids has 1 tokens, but 3 are counted"),
        (GOOD, "line 2: prompt_id, visit and sample_id ('a', 0, 0) are those of line 1: count visit up"),
    ],
)  # fmt: skip
def test_a_bad_row_is_told_with_file_line_field_value_and_remedy(tmp_path: Path, row: object, sentence: str) -> None:
    path = write(tmp_path / "run.jsonl", GOOD, row)
    with pytest.raises(ValueError) as error:
        load_trace(str(path))
    assert str(error.value).startswith(f"{path}, {sentence}")


def test_an_empty_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no rows"):
        load_trace(str(write(tmp_path / "run.jsonl", "")))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("lognormal", "'lognormal' is neither a file nor a family of traces: the families are lognormal_mild,"),
        ("bimodal:slots=3", "The trace 'bimodal:slots=3' sets 'slots': the fields are prompts, group, max_tokens,"),
        ("bimodal:group=0", "The trace 'bimodal:group=0' sets group to '0': give a whole number from 1 to"),
        ("bimodal:seed=x", "The trace 'bimodal:seed=x' sets seed to 'x': give a whole number from 0 to"),
        ("bimodal:group", "The trace 'bimodal:group' sets group to '': give a whole number from 1 to"),
    ],
)
def test_a_bad_spec_is_told_with_what_there_is(source: str, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        load_trace(source)
    assert str(error.value).startswith(sentence)
