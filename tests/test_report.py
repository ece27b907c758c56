"""What a report holds, and how it reads a folder that a run is writing to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from filelock import FileLock
from made_runs import HOSTILE, make_run

from lit_grpo.tools.commands.report import main
from lit_grpo.tools.dashboard import sections
from lit_grpo.tools.dashboard.report import read_folder, write_report
from lit_grpo.tools.dashboard.report.content import MAX_OWN, report_content
from lit_grpo.tools.dashboard.report.curves import MAX_POINTS, points, rank_correlation

ASSETS = Path(__file__).parents[1] / "lit_grpo" / "tools" / "dashboard" / "report" / "assets"


def content_of(folder: Path) -> dict[str, Any]:
    return report_content(read_folder(folder))


def written_content(path: Path) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="content">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(found)["runs"][0]


# ---- what is in it ------------------------------------------------------------------------------------


def test_a_report_has_every_panel_of_the_specification_that_has_data_and_the_own_metrics(tmp_path: Path) -> None:
    content = content_of(make_run(tmp_path / "run"))
    assert [each["title"] for each in content["sections"]] == [*(each.title for each in sections()), "Own"]
    for section, made in zip(sections(), content["sections"], strict=False):
        titles = [panel["title"].removesuffix(" (right >= 0.5)") for panel in made["panels"]]
        assert titles == [panel.title for panel in section.panels]
    assert [panel["title"] for panel in content["sections"][-1]["panels"]] == ["mine/<b>bold</b>", "mine/words"]
    (rewards,) = [p for p in content["sections"][0]["panels"] if p["title"] == "Rewards by function"]
    assert rewards["metrics"] == ["rewards/correct/mean", "rewards/format/mean"]
    means = "Mean of one reward function, unweighted, over completions to which it applies."
    assert rewards["about"][0]["means"] == means


def test_panels_and_sections_and_axes_without_data_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", names=["reward", "loss"])
    for name in ("samples.jsonl", "timeline.jsonl", "trace.jsonl", "config.yaml"):
        (run / name).unlink()
    content = content_of(run)
    assert [[panel["title"] for panel in each["panels"]] for each in content["sections"]] == [
        ["Reward"], [], [], [], ["Loss"], [],
    ]  # fmt: skip
    assert content["axes"] == {} and content["lengths"] is None and not content["timelines"] + content["samples"]
    assert [fact[0] for fact in content["head"]["facts"]] == ["Updates", "Best reward", "Last reward"]


def test_the_heading_says_how_far_the_run_is_and_how_good(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=3, names=["val/pass@1", "memory/update_peak_gib", "time/total_s"])
    (run / "metrics.csv").write_text(
        "step,val/pass@1,memory/rollout_peak_gib,memory/update_peak_gib,time/total_s,num_tokens\n"
        "0,0.25,,,,\n1,,1.5,2,50,1000\n2,0.75,1.25,2.5,100,2000\n3,0.5,1,2.25,4000,3000\n"
    )
    assert content_of(run)["head"] == {
        "state": "ended",
        "facts": [
            ("Updates", "3 of 3", ""),
            ("Best pass@1 (right >= 0.5)", "75.0%", "at update 2"),
            ("Last pass@1 (right >= 0.5)", "50.0%", "at update 3"),
            ("Time in steps", "1 h 06 min", ""),
            ("Peak memory", "2.5 GiB", "in the update"),
            ("Sampled tokens", "3,000", ""),
            ("Policy", "my/policy", ""),
        ],
    }


def test_the_heading_says_that_batches_taught_nothing_where_several_in_a_row_have(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=4, names=["reward"])
    head = "step,frac_reward_zero_std,advantages/max_abs\n0,,\n1,0.5,1\n2,1,0\n3,1,0\n"
    (run / "metrics.csv").write_text(head + "4,1,0.5\n")
    assert "No signal" not in [fact[0] for fact in content_of(run)["head"]["facts"]]
    (run / "metrics.csv").write_text(head + "4,1,0\n")
    fact = ("No signal", "3 of 4 batches", "in which no group had rewards that differ")
    assert fact in content_of(run)["head"]["facts"]


def test_the_heading_says_that_a_reward_is_hacked_in_training_and_on_held_out_prompts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=30, names=["reward"])
    rewards = [{"function": "mine.py:right"}, {"function": "mine.py:form", "weight": 0.5}]
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"rewards": rewards}}))
    names = [
        f"{place}{name}" for place in ("", "val/") for name in ("reward", "rewards/right/mean", "rewards/form/mean")
    ]

    def write(right: float) -> dict[str, str]:
        lines = [f"step,{','.join(names)}"]
        for step in range(31):
            form, rises = min(step / 20, 1.0), right * min(step / 20, 1.0)
            values = f"{0.0625 + rises + form / 2},{0.0625 + rises},{form}"
            lines.append(f"{step},{values if step else ',,'},{',,' if step % 5 else values}")
        (run / "metrics.csv").write_text("\n".join(lines) + "\n")
        return {title: note for title, *_, note in content_of(run)["head"]["facts"]}

    assert not {"Reward hacking", "Reward hacking, held out"} & set(write(right=0.5))
    facts = write(right=0.0)
    assert facts["Reward hacking"] == (
        "The reward rose from 0.175 to 0.562 in 30 updates by `form` (from 0.225 to 1), and not by `right`, which "
        "decides pass@1: it stayed at 0.0625. Weigh `form` less, or let it pay only where `right` does."
    )
    assert facts["Reward hacking, held out"].startswith("The reward on held-out prompts rose from 0.188 to 0.562 in 7")
    (run / "config.yaml").unlink()
    assert "Reward hacking" not in write(right=0.0)  # nothing says who decides


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ({"rewards": [{"function": "mine.py:right"}, {"function": "b", "name": "short"}]}, " (right >= 1)"),
        ({"rewards": ["mine.py:right", "b"], "pass_reward": "b", "pass_threshold": 0.25}, " (b >= 0.25)"),
        ({"rewards": None}, ""),
    ],
)
def test_the_chart_of_pass_at_k_names_the_reward_that_decides(tmp_path: Path, model: Any, title: str) -> None:
    run = make_run(tmp_path / "run", names=["val/pass@1"])
    (run / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    panels = [panel["title"] for section in content_of(run)["sections"] for panel in section["panels"]]
    assert panels == [f"Held-out pass@k{title}"]


def test_a_run_is_running_as_long_as_it_holds_its_folder_and_stopped_if_updates_are_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=4)
    (run / "config.yaml").write_text("trainer: {max_steps: 9}")
    with FileLock(tmp_path / ".run.lock"):
        assert content_of(run)["head"]["state"] == "running"
    assert content_of(run)["head"]["state"] == "stopped"


def test_text_of_a_run_cannot_end_the_element_that_holds_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run <b>&")
    (run / "config.yaml").write_text(f"trainer: {HOSTILE!r}  # @SCRIPT@ @TITLE@")
    path = write_report(run)
    text = path.read_text()
    assert text.count("</script>") == 2 and "<img" not in text
    assert written_content(path)["samples"][3]["completion"].startswith("It is 6. </script><script>")
    assert "@SCRIPT@" in written_content(path)["config"]
    assert "<title>run &lt;b&gt;&amp; · lit_grpo</title>" in text


def test_a_page_names_nothing_that_is_to_be_loaded() -> None:
    for path in ASSETS.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import|url\(|fetch\(|XMLHttpRequest|import\(", text), path


def test_foretold_and_actual_lengths_come_from_timelines_where_no_trace_is_recorded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=10)
    assert content_of(run)["lengths"]["number"] == 80
    (run / "trace.jsonl").unlink()
    lengths = content_of(run)["lengths"]
    assert lengths["number"] == 64 * 8 and lengths["correlation"] > 0.99


def test_predicted_lengths_are_compared_within_each_rollout_and_only_where_there_was_a_prediction(
    tmp_path: Path,
) -> None:
    """Nothing was known in the first rollout; later ones were predicted well, but for ever shorter completions."""
    run = make_run(tmp_path / "run", updates=10)
    rows = [{"step": 1, "tokens": 10 + number, "predicted": None} for number in range(4)]
    rows += [
        {"step": step, "tokens": 100 - 9 * step + number, "predicted": 9 * step + number}
        for step in range(2, 10)
        for number in range(4)
    ]
    (run / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = content_of(run)["lengths"]
    assert [each["step"] for each in lengths["rollouts"]] == list(range(2, 10))
    assert {each["correlation"] for each in lengths["rollouts"]} == {1.0} and lengths["correlation"] == 1.0
    assert lengths["number"] == 32 and lengths["without"] == 4
    (run / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    assert content_of(run)["lengths"] is None


def test_points_of_predicted_lengths_are_those_of_the_newest_rollouts(tmp_path: Path) -> None:
    lengths = content_of(make_run(tmp_path / "run", updates=400))["lengths"]
    with_points = [each["step"] for each in lengths["rollouts"] if each["points"]]
    assert len(lengths["rollouts"]) == 400 and with_points == list(range(151, 401))


def test_more_own_metrics_than_anyone_reads_stand_in_the_table(tmp_path: Path) -> None:
    own = content_of(make_run(tmp_path / "run", names=[f"mine/{n}" for n in range(MAX_OWN + 5)]))["sections"][-1]
    assert len(own["panels"]) == MAX_OWN and len(own["table"]) == MAX_OWN + 5 and "of 45" in own["about"]


# ---- curves -------------------------------------------------------------------------------------------


def test_a_long_run_is_drawn_from_means_with_the_least_and_the_greatest() -> None:
    values = np.arange(10_000.0)
    values[1::2] = np.nan
    values[5_000] = 1e6
    made = points(values)
    assert len(made["mean"]) == MAX_POINTS and made["mean"][0] == 9 and made["min"][0] == 0 and made["max"][0] == 18
    assert max(made["max"]) == 1e6 and made["mean"][250] > 9e4


def test_rank_correlation_shares_ranks_among_equals() -> None:
    assert rank_correlation(np.array([1, 2, 3, 4]), np.array([1, 4, 9, 16])) == pytest.approx(1)
    assert rank_correlation(np.array([1, 2, 2, 3]), np.array([1, 3, 2, 4])) == pytest.approx(0.9486833)
    assert rank_correlation(np.array([1, 1, 1]), np.array([1, 2, 3])) is None


# ---- folders that are none, or in the making ----------------------------------------------------------


def test_rows_that_were_cut_within_stay_away_and_the_later_of_two_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=2, names=["reward"])
    (run / "metrics.csv").write_text("step,reward\n1,0.5\n2\nx,1\n1,0.75\n2,nan\n3,hm\n4,1\n")
    assert content_of(run)["metrics"]["reward"] == {"mean": [0.75, None, None, 1.0]}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, "There is no run folder"),
        ({}, "has no metrics.csv"),
        ({"notes.txt": "hello"}, "has no metrics.csv"),
        ({"metrics.csv": ""}, "has no whole row yet"),
        ({"metrics.csv": "step,reward\n1,0."}, "has no whole row yet"),
        ({"metrics.csv": "no run's file\nat all\n"}, "where metrics of a run have 'step'"),
    ],
    ids=["missing", "empty", "no run", "no row", "half a row", "another file"],
)
def test_a_folder_without_a_run_is_one_sentence(
    files: dict[str, str] | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "absent" if files is None else tmp_path)])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.startswith("error: ") and says in said and said.count("\n") == 1


def test_a_report_goes_where_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", updates=2, names=["reward"])
    main([str(run)])
    main([str(run), "--output", str(tmp_path / "new" / "page.html")])
    assert (run / "report.html").is_file() and (tmp_path / "new" / "page.html").is_file()
    assert capsys.readouterr().out.splitlines()[0] == f"The report is in {run / 'report.html'}."


NO_PLACES = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a symbolic link": lambda path: path.symlink_to("kept"),
}


@pytest.mark.parametrize("kind", NO_PLACES)
def test_a_report_replaces_nothing_that_is_no_file_and_says_so_first(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, place = make_run(tmp_path / "run", updates=2, names=["reward"]), tmp_path / "place"
    (tmp_path / "kept").write_text("kept")
    NO_PLACES[kind](place)
    kept = place.lstat()
    for arguments in ([tmp_path / "absent", "--output", place], [run, "--output", place]):
        with pytest.raises(SystemExit, match="2"):
            main([str(each) for each in arguments])
        assert f"{place} is {kind}, which is not replaced" in capsys.readouterr().err
    place.rename(run / "report.html")
    with pytest.raises(SystemExit, match="2"):
        main([str(run)])
    assert f"{run / 'report.html'} is {kind}, which is not replaced" in capsys.readouterr().err
    assert (run / "report.html").lstat()[:2] == kept[:2] and (tmp_path / "kept").read_text() == "kept"


def test_a_run_that_is_a_link_to_itself_or_has_a_long_name_is_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to("link")
    for place in ("link", "x" * 300, "link/within"):
        with pytest.raises(SystemExit, match="2"):
            main([str(tmp_path / place)])
        assert "There is no run folder" in capsys.readouterr().err


def test_a_report_is_written_without_torch(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=2, names=["reward"])
    code = f"import sys; sys.argv[1:] = ['report', {str(run)!r}]; from lit_grpo.__main__ import main; main(); "
    code += "print([name for name in ('torch', 'lightning', 'matplotlib', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---- colors ------------------------------------------------------------------------------------------
