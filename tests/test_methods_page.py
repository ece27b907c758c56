"""Methods beside plain GRPO: the figures of a run, gains with their intervals, what is kept, and the page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import methods
from benchmarks.learning_runs import Curves
from benchmarks.methods import METHODS, QUICK, SEEDS, TASKS, kept_rows, learning_run, main, summary
from benchmarks.report import versions
from lit_grpo.cli.parsing.sentences import shipped_config
from lit_grpo.methods import make_plugins, shipped
from scripts.methods_page import T_975, Gain, methods_page, newest, paired_gain, tables

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"


def curves(tokens: list[float], exact: list[float]) -> Curves:
    """Curves of these tokens and this exact match by update, NaN where nothing was validated."""
    tokens_U, one_U = np.array(tokens), np.ones(len(tokens))
    return Curves(np.array(exact), one_U, one_U, tokens_U, one_U, one_U, one_U, one_U, one_U, one_U)


def test_the_page_is_made_of_the_newest_result() -> None:
    assert PAGE.read_text() == methods_page(newest()), "run python -m scripts.methods_page > docs/methods.md"


def test_a_run_is_summed_up_to_its_budget_alone() -> None:
    nan = math.nan
    found = summary(curves([0, 10, 20, 30, 40], [0.2, nan, 0.6, nan, 0.8]), budget=30)
    assert found["end"] == pytest.approx(0.7)
    assert found["over_run"] == pytest.approx((20 * 0.4 + 10 * 0.65) / 30)
    assert found["updates"] == 3 and found["tokens"] == 40


def test_the_mean_over_a_run_is_that_of_its_straight_lines() -> None:
    draw = np.random.default_rng(0)
    tokens = np.concatenate([[0], draw.integers(1, 50, 12).cumsum()])
    exact, budget = draw.random(13), int(tokens[-2]) + 1
    found = summary(curves(tokens.tolist(), exact.tolist()), budget)
    fine = np.linspace(0, budget, 200_001)
    assert found["over_run"] == pytest.approx(float(np.interp(fine, tokens, exact).mean()), abs=1e-4)


def test_a_run_that_ends_early_stays_at_its_last_validation() -> None:
    found = summary(curves([0, 10], [0.5, 0.5]), budget=40)
    assert found["over_run"] == found["end"] == 0.5


@pytest.mark.parametrize("degrees", range(1, len(T_975) + 1))
def test_quantiles_are_those_of_students_t(degrees: int) -> None:
    x = torch.linspace(-T_975[degrees - 1], T_975[degrees - 1], 100_001, dtype=torch.float64)
    density = torch.distributions.StudentT(torch.tensor(float(degrees), dtype=torch.float64)).log_prob(x).exp()
    assert torch.trapezoid(density, x).item() == pytest.approx(0.95, abs=1e-4)


def test_an_interval_holds_the_true_gain_in_95_of_100_tries() -> None:
    draw = np.random.default_rng(1)
    hits = 0
    for _ in range(4000):
        common_S = draw.normal(0, 5, 3)  # what a seed does to both runs
        gain = paired_gain((common_S + 1 + draw.normal(0, 0.5, 3)).tolist(), common_S.tolist())
        hits += abs(gain.mean - 1) <= gain.reach
    assert hits / 4000 == pytest.approx(0.95, abs=0.012)


def test_a_method_gave_nothing_where_the_interval_has_0() -> None:
    words = [
        Gain(1.0, 2.0).word,
        Gain(2.0, 1.0).word,
        Gain(-2.0, 1.0).word,
        Gain(0.0, 0.0).word,
        Gain(1.0, math.nan).word,
    ]
    assert words == ["nothing", "more", "less", "nothing", "one seed"]
    assert [str(Gain(1.0, 2.0)), str(Gain(-1.0, math.nan))] == ["+1.0 ± 2.0", "-1.0"]


def row(method: str, seed: int, exact: float, **more: object) -> dict[str, object]:
    """A row of the demo."""
    figures = {"over_run": exact, "end": exact, "updates": 9, "late_length": 20.0, "tokens": 600, "cpu_s": 1.0}
    return {"task": "demo", "method": method, "seed": seed, "set": METHODS[method].told, **figures, **more}


def test_a_table_is_sorted_by_gain_with_plain_grpo_in_its_place() -> None:
    rows = [row("grpo", seed, 0.5 + seed / 100) for seed in SEEDS]
    rows += [row("pods", seed, 0.6 + seed / 100) for seed in SEEDS]
    rows += [row("greso", seed, exact) for seed, exact in zip(SEEDS, (0.4, 0.6, 0.3), strict=True)]
    rows += [row("rlep", 7, 0.9)]  # no run of plain GRPO has this seed
    lines = "\n".join(tables({"settings": {"demo": "", "knights": ""}, "rows": rows})).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    assert [(each[0], each[5]) for each in cells] == [("pods", "more"), ("grpo", "-"), ("greso", "nothing")]
    assert cells[0][1:5] == ["61.0", "+10.0 ± 0.0", "61.0", "+10.0 ± 0.0"]


def result_file(path: Path, task: str, rows: list[dict[str, object]]) -> Path:
    """Write a result file."""
    path.write_text(json.dumps({"versions": versions(), "settings": {"demo": task}, "rows": rows}))
    return path


def test_what_was_measured_is_kept_until_its_task_or_method_changes(tmp_path: Path) -> None:
    told = methods.shlex.join(QUICK.words())
    path = result_file(tmp_path / "same.json", told, [row("grpo", 0, 0.5), row("pods", 0, 0.5, set="pods:keep=2")])
    assert list(kept_rows(path, {"demo": QUICK})) == [("demo", "grpo", 0)]
    assert kept_rows(result_file(path, told + " --more", [row("grpo", 0, 0.5)]), {"demo": QUICK}) == {}
    assert kept_rows(tmp_path / "none.json", {"demo": QUICK}) == {}


def test_figures_of_other_versions_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"versions": {"python": "2.7"}, "settings": {}, "rows": []}))
    with pytest.raises(SystemExit, match="move it away to begin again"):
        kept_rows(path, TASKS)


def test_a_call_runs_what_is_not_there_and_passes_over_what_this_checkout_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def train(run: object, folder: Path) -> Curves:
        ran.append(run)
        return curves([0, 700], [0.5, 0.5])

    monkeypatch.setattr(methods, "train_here", train)
    monkeypatch.setitem(METHODS, "absent", methods.Method(("no_such_plugin",)))
    asked = [
        "--task",
        "demo",
        "--method",
        "absent",
        "grpo",
        "pods",
        "--seed",
        "3",
        "--output",
        str(tmp_path / "r.json"),
    ]
    assert main(asked) == 0 and len(ran) == 2
    assert main(asked) == 0 and len(ran) == 2
    assert "absent is passed over: this checkout has no plug-in no_such_plugin." in capsys.readouterr().err


@pytest.mark.parametrize("code", [2, 143])
def test_a_refused_run_is_passed_over_and_a_signal_ends_all(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(run: object, folder: Path) -> Curves:
        folder.mkdir()
        (folder / "output.txt").write_text("error: such a method.")
        raise SystemExit(code)

    monkeypatch.setattr(methods, "train_here", train)
    asked = ["--task", "demo", "--method", "grpo", "pods", "--seed", "3", "--output", str(tmp_path / "r.json")]
    if code == 2:
        assert main(asked) == 1
        assert "demo, pods, seed 3 is refused:\nerror: such a method." in capsys.readouterr().err
    else:
        with pytest.raises(SystemExit, match="143"):
            main(asked)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_set_as_the_command_line_takes_it(method: str) -> None:
    beside = METHODS[method]
    assert set(beside.tasks) <= set(TASKS)
    for task in beside.tasks:
        assert Path(shipped_config(TASKS[task].config)).is_file()
        run = learning_run(TASKS[task], method, 0)
        plugins = json.loads(run.arguments[-1])
        if methods._here([method]):
            assert len(make_plugins(plugins)) == len(plugins)
    assert "pods" in shipped()
