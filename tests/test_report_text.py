"""The report as text: figures first, curves with values, completions, and what to try next."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import table_rows
from made_runs import HOSTILE, make_run
from rich.cells import cell_len

from lit_grpo.tools.commands.report import main
from lit_grpo.tools.dashboard.report import read_folder
from lit_grpo.tools.dashboard.report.text import report_text, sparkline


def text_of(*folders: Path, width: int = 80, ascii_only: bool = False) -> str:
    return report_text([read_folder(each) for each in folders], width, ascii_only)


def validate(run: Path, *steps: int, text: str = "written") -> None:
    rows = [
        {"step": step, "prompt_id": f"validation/{number}", "prompt": f"{number}?", "tokens": 3, "finish": "stop"}
        | {"completion": f"{text} at {step} to {number}", "reward": number / 4, "columns/answer": str(number)}
        for step in steps
        for number in range(4)
    ]
    (run / "val_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("width", [80, 120])
def test_a_run_is_told_in_the_order_of_reading_within_the_width(width: int, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    validate(run, 0, 40)
    text = text_of(run, width=width)
    assert max(map(cell_len, text.splitlines())) <= width
    order = ["run: ended", "Updates ", "Last pass@1", "Curves, updates 0 to 40", "Completions", "What to try next"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    table = (run / "metrics.csv").read_text().splitlines()
    column = table[0].split(",").index("reward")
    first, last = (f"{float(table[row].split(',')[column]):.4g}" for row in (1, -1))
    assert re.search(rf"^reward +[▁-█]{{8,}} +{first} +{last} +\S+ +\S+$", text, re.MULTILINE)
    assert "validation at update 40, best and worst" in text
    assert re.findall(r"^  completion +(.*)$", text, re.MULTILINE) == ["written at 40 to 3", "written at 40 to 0"]
    advice = " ".join(text.split("What to try next")[1].split()).lstrip("─ ")
    assert re.match(r"1\. .*\(docs/\w+\.md, ", advice)


@pytest.mark.parametrize("width", table_rows([80, 120], [80]))
def test_two_runs_are_compared_side_by_side_within_the_width(width: int, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "a_run_with_a_long_name", updates=25)]
    (runs[1] / "config.yaml").write_text((runs[1] / "config.yaml").read_text().replace("my/policy", "another/policy"))
    for run in runs:
        validate(run, 20)
    text = text_of(*runs, width=width)
    assert max(map(cell_len, text.splitlines())) <= width
    order = ["Final figures", "Settings that differ", "Curves", "one: ended", "a_run_with_a_long_name: ended"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert re.search(r"Updates +40 of 40 +25 of 25", text)
    assert re.search(r"model\.policy +my/policy +another/policy", text)
    assert re.search(r"^reward\n  one +[▁-█]+ .*\n  a_run_with_a_long_name +[▁-█]+ ", text, re.MULTILINE)
    assert text.count("written at 20 to 3") == 2 and text.count("What to try next") == 2


CASES = {
    "nothing but metrics": ["samples.jsonl", "timeline.jsonl", "trace.jsonl", "config.yaml"],
    "no validation": [],
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_run_lacks_is_left_out(case: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=2, names=["reward"])
    for name in CASES[case]:
        (run / name).unlink()
    text = text_of(run)
    assert ("Completions" in text) == (case == "no validation") and "No metric calls for a change." in text
    assert ("samples of update 2, best and worst" in text) == (case == "no validation")


def test_text_without_unicode_has_none(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("one", "other")]
    assert text_of(*runs, ascii_only=True).isascii() or HOSTILE[-1] in text_of(*runs)
    assert sparkline(np.array([0.0, 1.0]), 8, "_#") == "_#"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0.0, 0.5, 1.0], "▁▅█"),
        ([2.0, 2.0], "▁▁"),
        ([np.nan, np.nan], ""),
        ([0.0, np.nan, 1.0], "▁ █"),
        ([0.0, np.nan, np.nan, np.nan, 1.0], "▁█"),  # a validation now and then
        ([-1e308, 1e308], "▁▁"),  # their difference is no number
        ([5.0], "▁"),
    ],
)
def test_a_curve_as_characters(values: list[float], line: str) -> None:
    assert sparkline(np.array(values), 8) == line


def test_a_long_curve_has_no_more_characters_than_there_is_room() -> None:
    line = sparkline(np.arange(10_000.0), 20)
    assert len(line) == 20 and line[0] == "▁" and line[-1] == "█" and "".join(sorted(line)) == line


HOSTILE_TEXTS = ["\x1b[2J\x9b31m\x07", "\u202eabc", "[bold]x[/bold]", "a\nb", "答案" * 60, "y" * 500, HOSTILE]


@pytest.mark.parametrize("text", table_rows(HOSTILE_TEXTS, [HOSTILE_TEXTS[0], HOSTILE_TEXTS[4]]))
def test_texts_of_a_run_are_shown_and_not_obeyed(text: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=3, names=["reward"])
    name = text.replace("\n", " ").replace('"', "").replace(",", "")[:200]
    (run / "metrics.csv").write_text(f"step,reward,rewards/{name}/mean\n1,1,2\n2,1e308,-1e308\n")
    validate(run, 2, text=text)
    settings = {"model": {"policy": text, "rewards": [{"function": text, "name": text}]}, "data": {"x": text}}
    (run / "config.yaml").write_text(json.dumps(settings))
    told = text_of(run)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", told)
    assert max(map(cell_len, told.splitlines())) <= 80
    other = make_run(tmp_path / "other", updates=2, names=["reward"])
    both = text_of(run, other)
    assert (
        not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", both)
        and max(map(cell_len, both.splitlines())) <= 80
    )


def test_the_command_prints_the_text_and_writes_nothing_but_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", updates=3, names=["reward"])
    monkeypatch.setenv("COLUMNS", "72")
    main([str(run), "--text"])
    said = capsys.readouterr().out
    assert "run: ended" in said and max(map(cell_len, said.splitlines())) == 72 and not (run / "report.html").exists()
    main([str(run), "--text", "--output", str(tmp_path / "new" / "report.txt")])
    assert (tmp_path / "new" / "report.txt").read_text() == said
    with pytest.raises(SystemExit, match="2"):
        main([str(run), "--text", "--open"])
    assert "leave one of them out" in capsys.readouterr().err


def test_text_is_written_without_torch_and_in_ascii_where_the_output_has_no_more(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=2, names=["reward"])
    (run / "samples.jsonl").unlink()
    code = (
        f"import sys; sys.argv[1:] = ['report', {str(run)!r}, '--text']; from lit_grpo.__main__ import main; main(); "
    )
    code += "print([name for name in ('torch', 'lightning', 'matplotlib', 'pandas') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env={"PYTHONIOENCODING": "ascii", "PATH": ""}
    )
    assert done.stdout.isascii() and done.stdout.splitlines()[-1] == b"[]" and b"run: ended -----" in done.stdout
