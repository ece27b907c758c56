"""``python -m lit_grpo simulate``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.baseline_plans import FIXED_SLOT, FULL_GROUP
from lit_grpo.methods.plans import shipped_plans
from lit_grpo.tools.commands.simulate import main

SMALL = "lognormal_mild:prompts=2,group=4,max_tokens=40"


def rows(printed: str) -> dict[str, list[str]]:
    """The table's cells by plan."""
    lines = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in printed.splitlines() if "│" in line]
    return {name: cells for name, *cells in lines}


def write_trace(path: Path) -> Path:
    """Two batches on which longest first takes 5 + 4 steps with two slots and true lengths, first come 6 + 4."""
    batches = {0: [4, 1, 2, 3], 1: [4]}
    records = [
        {"prompt_id": "a", "visit": step, "sample_id": sample, "prompt_tokens": 2, "tokens": tokens, "step": step}
        for step, lengths in batches.items()
        for sample, tokens in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(record | {"predicted": 5 - record["tokens"]}) + "\n" for record in records))
    return path


def test_all_plans_that_have_a_name_are_told_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--trace", SMALL, "--slots", "4"])
    printed = capsys.readouterr().out
    assert list(rows(printed)) == list(shipped_plans())
    assert "8 completions" in printed and "4 slots" in printed


def test_batches_of_a_recorded_trace_are_decoded_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "run.jsonl")
    main(["--trace", str(trace), "--slots", "2", "--plans", "fcfs", "lpt", "--step_cost", "1000,0,0"])
    table = rows(capsys.readouterr().out)
    # steps, over the bound of 5 + 4, bubble ratio, mean completion, peak KV tokens, seconds
    assert table["fcfs"] == ["10", "1.111", "0.300", "3.6", "7", "10.000"]
    assert table["lpt"] == ["9", "1.000", "0.222", "4.2", "8", "9.000"]


def test_batches_are_foretold_with_errors_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    for num_batches in (1, 8):  # which are alike but for the errors
        records = [
            {"prompt_id": str(sample), "visit": step, "sample_id": 0, "prompt_tokens": 2, "step": step}
            | {"tokens": 3 * sample % 47 + 1}
            for step in range(num_batches)
            for sample in range(32)
        ]
        trace = tmp_path / f"{num_batches}.jsonl"
        trace.write_text("".join(json.dumps(record) + "\n" for record in records))
        main(["--trace", str(trace), "--slots", "6", "--plans", "lpt", "--noise", "0.7"])
        steps.append(int(rows(capsys.readouterr().out)["lpt"][0].replace(",", "")))
    assert steps[1] != 8 * steps[0]


def test_recorded_predictions_can_be_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "run.jsonl")  # they say the opposite, so that longest first is shortest first
    main(["--trace", str(trace), "--slots", "2", "--plans", "lpt", "--noise", "recorded"])
    assert rows(capsys.readouterr().out)["lpt"][0] == "10"


def test_plans_that_follow_lengths_go_behind_a_probe(capsys: pytest.CaptureFixture[str]) -> None:
    trace = "lognormal_heavy:prompts=1,group=32,seed=3"
    main(["--trace", trace, "--slots", "8", "--plans", "fcfs", "lpt", "--noise", "0.35", "--probe_tokens", "32"])
    said = capsys.readouterr().out
    assert "fcfs " in said and "lpt after 32 tokens" in said


@pytest.mark.parametrize("text", ["", "0", "32,8", "8,,9", "many"])
def test_a_probe_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--probe_tokens", text])
    assert "is no probe: give ascending numbers of tokens, such as 32 or 64,128" in capsys.readouterr().err


def test_several_traces_and_a_kv_budget(capsys: pytest.CaptureFixture[str]) -> None:
    traces = ["--trace", "bimodal:prompts=4,max_tokens=64", "--trace", "truncated:prompts=4,max_tokens=64"]
    main([*traces, "--slots", "8", "--kv_tokens", "400", "--noise", "0.7", "--plans", "lpt"])
    printed = capsys.readouterr().out
    assert printed.count("8 slots, 400 KV tokens") == 2 and "set aside" in printed
    main([*traces[:2], "--slots", "8", "--plans", "lpt"])
    assert "set aside" not in capsys.readouterr().out


def test_the_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "picture.png"
    main(["--trace", SMALL, "--slots", "4", "--plans", "fcfs", "lpt", "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"The picture is in {picture}." in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--plans ltp", "--plans ltp: there is none; give one of fcfs, sjf, lpt, short_last, balanced, infinite_sampl"),
        ("--plans balanced:epsilon=2", "--plans balanced:epsilon=2: epsilon must be above 0 and below 1, not 2"),
        (f"--plans {FIXED_SLOT} --slots 999", "The plan FixedSlot deals 512 jobs onto 999 slots, of which some would"),
        (
            f"--plans {FULL_GROUP}",
            "The plan FullGroup decodes everything at once, and 512 jobs wait for 64 slots: g",
        ),
        ("--noise -0.5", "argument --noise: -0.5 is no spread: give a number from 0 to 20, none or recorded."),
        ("--noise recorded", "lognormal_heavy has rows without predicted: give --noise a number or none."),
        ("--slots 0", "The number of slots is 0: an engine has from 1 to 1,048,576."),
        ("--kv_tokens 9", "A KV budget of 9 tokens is too small for the longest completion of lognormal_heavy with"),
        ("--step_cost 1,2", "argument --step_cost: '1,2' is no cost (there are 2 numbers): give three times in"),
    ],
)
def test_a_mistake_ends_with_one_sentence_and_code_2(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments.split())
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {sentence}") and captured.err.count("\n") == 1 and not captured.out


def test_the_subcommand_starts_without_torch() -> None:
    code = (
        "import runpy, sys; sys.argv = ['lit_grpo', 'simulate', '--plans', 'lpt', '--slots', '32']\n"
        "runpy.run_module('lit_grpo', run_name='__main__')\n"
        "print([name for name in ('torch', 'lightning', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "lpt" in rows(done.stdout) and done.stdout.splitlines()[-1] == "[]"
