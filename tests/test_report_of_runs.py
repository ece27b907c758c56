"""A report of several runs: names, settings that differ, final figures, and runs that lack something."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock
from made_runs import HOSTILE, make_run

from lit_grpo.tools.commands.report import main
from lit_grpo.tools.dashboard.report import read_folder
from lit_grpo.tools.dashboard.report.comparison import differences, labels
from lit_grpo.tools.dashboard.report.page import page_content


def content_of(*folders: Path) -> dict[str, Any]:
    return page_content([read_folder(folder, may_be_new=True) for folder in folders])


def written(path: Path) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="content">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(found)


def stopped(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1
    return said


# ---- settings that differ -----------------------------------------------------------------------------


def test_only_fields_that_differ_are_listed_as_on_the_command_line() -> None:
    def config(slots: int, rewards: list[Any], **optimizer: Any) -> dict[str, Any]:
        generator = {"class_path": "lit_grpo.rollout.slots.SlotGenerator", "init_args": {"num_slots": slots}}
        model = {"generator": generator, "optimizer": optimizer, "rewards": rewards, "dtype": "float32"}
        return {"run": {"name": f"n{slots}", "dir": "runs"}, "model": model, "seed_everything": 0}

    one = config(8, [{"function": "a.py:f", "weight": 1.0}], lr=1e-3, betas=[0.9, 0.95])
    other = config(16, [{"function": "a.py:f", "weight": 0.5}, {"function": "b"}], lr=1e-3, betas=[0.9, 0.99])
    assert differences([one, other]) == [
        ("model.generator.num_slots", ["8", "16"]),
        ("model.optimizer.betas", ["[0.9, 0.95]", "[0.9, 0.99]"]),
        ("model.rewards.0.weight", ["1.0", "0.5"]),
        ("model.rewards.1.function", [None, "b"]),
    ]
    assert differences([one, one, one]) == []
    assert differences([one, {}]) == []  # the settings of the second were not recorded
    assert [field for field, _ in differences([one, {}, other])] == [field for field, _ in differences([one, other])]


def test_a_field_that_one_run_has_and_null_that_another_has_differ() -> None:
    assert differences([{"model": {"lora": None}}, {"model": {"lora": {"r": 8}}}]) == [
        ("model.lora", ["null", None]),
        ("model.lora.r", [None, "8"]),
    ]


def test_a_long_value_is_cut_and_control_characters_are_made_visible() -> None:
    ((_, values),) = differences([{"a": "x" * 1000}, {"a": "\x1b[2J"}])
    assert values == ["x" * 300 + " …", "\\x1b[2J"]


# ---- names --------------------------------------------------------------------------------------------


def test_runs_with_the_same_name_are_called_by_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("a/demo", "b/demo", "b/other"):
        make_run(Path(place), updates=2, names=["reward"])
    runs = [read_folder(Path(place)) for place in ("a/demo", "b/demo", "b/other")]
    assert labels(runs) == ["a/demo", "b/demo", "other"]
    assert [run["name"] for run in page_content(runs)["runs"]] == ["a/demo", "b/demo", "other"]


def test_a_run_that_is_given_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", updates=2, names=["reward"])
    said = stopped([str(run), str(tmp_path / "." / "run" / ".." / "run")], capsys)
    assert "is given twice; give each run once." in said
    assert not (tmp_path / "report.html").exists()


# ---- final figures ------------------------------------------------------------------------------------


def test_final_figures_stand_side_by_side_and_what_a_run_has_not_logged_is_a_dash(tmp_path: Path) -> None:
    one, other = (make_run(tmp_path / name, updates=3, names=["reward"]) for name in ("one", "other"))
    (one / "metrics.csv").write_text(
        "step,reward,val/pass@1,memory/rollout_peak_gib,memory/update_peak_gib,time/total_s,num_tokens\n"
        "0,,0.25,,,,\n1,0.1,,1.5,2,50,1000\n2,0.3,0.75,1.25,2.5,100,2000\n3,0.5,0.5,1,2.25,4000,3000\n"
    )
    (other / "metrics.csv").write_text("step,reward,val/pass@1\n0,,0\n1,0.25,\n2,0.75,0.125\n")
    figures = content_of(one, other)["comparison"]["figures"]
    assert dict(zip(figures["columns"], zip(*figures["rows"], strict=True), strict=True)) == {
        "Updates": (("3 of 3", ""), ("2 of 3", "")),
        "First pass@1": (("25.0%", "at update 0"), ("0.0%", "at update 0")),
        "Best pass@1": (("75.0%", "at update 2"), ("12.5%", "at update 2")),
        "Last pass@1": (("50.0%", "at update 3"), ("12.5%", "at update 2")),
        "Reward, last quarter": (("0.5", ""), ("0.75", "")),
        "Sampled tokens": (("3,000", ""), None),
        "Time in steps": (("1 h 06 min", ""), None),
        "Peak memory": (("2.5 GiB", "in the update"), None),
    }


def test_runs_with_different_scores_say_which_score_is_whose(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", updates=2, names=["val/pass@1"])
    other = make_run(tmp_path / "other", updates=2, names=["reward"])
    figures = content_of(one, other)["comparison"]["figures"]
    assert figures["columns"][1] == "First score"
    assert [row[1][1] for row in figures["rows"]] == ["val/pass@1 at update 0", "reward at update 0"]


# ---- runs that lack something -------------------------------------------------------------------------


def test_a_run_that_goes_on_and_one_that_has_logged_nothing_yet_are_compared(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", updates=4)
    young = tmp_path / "young"
    young.mkdir()
    half = make_run(tmp_path / "half", updates=2, names=["reward"])
    for name in ("samples.jsonl", "timeline.jsonl", "trace.jsonl", "config.yaml"):
        (half / name).unlink()
    with (half / "metrics.csv").open("a") as file:
        file.write("3,0.")
    with FileLock(tmp_path / ".young.lock"):
        content = content_of(whole, young, half)
    assert [run["head"]["state"] for run in content["runs"]] == ["ended", "running", "ended"]
    assert [run["rows"] for run in content["runs"]] == [5, 0, 3]
    compared = content["comparison"]
    assert compared["without_settings"] == [1, 2] and compared["settings"] == []
    assert compared["figures"]["rows"][1][0] == ("0", "") and compared["figures"]["rows"][1][1] is None
    titles = [panel["title"] for section in compared["sections"] for panel in section["metrics"]]
    assert titles[:2] == ["reward", "val/reward"] and "memory/capacity_gib" not in titles  # a limit is no curve
    json.dumps(content, allow_nan=False)


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, empty = make_run(tmp_path / "run", updates=2, names=["reward"]), tmp_path / "empty"
    empty.mkdir()
    assert f"{str(empty)!r} has no metrics.csv" in stopped([str(run), str(empty)], capsys)
    assert "There is no run folder" in stopped([str(run), str(tmp_path / "absent")], capsys)
    assert not (tmp_path / "report.html").exists()


# ---- the file -----------------------------------------------------------------------------------------


def test_a_report_of_several_runs_is_beside_the_first_and_nothing_of_a_run_ends_its_element(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_run(tmp_path / "a" / "one <b>", updates=2)
    other = make_run(tmp_path / "b" / "other", updates=2)
    (one / "config.yaml").write_text(yaml.safe_dump({"model": {"policy": HOSTILE}}))
    main([str(one), str(other)])
    path = tmp_path / "a" / "report.html"
    assert capsys.readouterr().out == f"The report is in {path}.\n"
    text = path.read_text()
    assert text.count("</script>") == 2 and "<img" not in text
    assert "<title>2 runs: one &lt;b&gt;, other · lit_grpo</title>" in text
    ((field, values),) = [row for row in written(path)["comparison"]["settings"] if row[0] == "model.policy"]
    assert values[0].startswith("</script><script>") and values[1] == "my/policy" and field == "model.policy"


@pytest.mark.nightly
def test_many_long_runs_are_a_file_of_a_few_megabytes(tmp_path: Path) -> None:
    first = make_run(tmp_path / "run0", updates=1000)
    rows = [{"step": step, "prompt_id": f"train/{step % 50}", "completion": "y" * 9000} for step in range(500)]
    (first / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = [first, *(shutil.copytree(first, tmp_path / f"run{number}") for number in range(1, 6))]
    main([*map(str, folders), "--output", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").stat().st_size < 6e6
