"""Run folders that are damaged: a sentence, or the right result with what was left out of it told."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import save_policy, table_rows
from damaged_runs import DAMAGES, EVALUATED, REFUSED, RIGHT, TOLD
from made_runs import make_run

from lit_grpo.tools.commands.report import main as report
from lit_grpo.tools.evaluation.command import read_options
from lit_grpo.tools.finishing.command import main as finish

METRICS = ["reward", "val/pass@1", "num_tokens", "time/total_s", "memory/update_peak_gib", "frac_reward_zero_std"]
MEMORY = {"measured": {"weights": 2**30}, "forecast": {"update": {"weights": 2**30}}, "device": "cpu"}
MOST_BYTES = 2**30
"""The memory that a row may take beside that of the process."""


OF_OTHERS = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
"""Warnings of objects that earlier tests of this process have left, whenever they are collected."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a file of each kind."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "made", names=METRICS)
    save_policy(folder / "policy")
    told = yaml.safe_load((folder / "config.yaml").read_text()) | {"data": {"train": "rows", "validation": "held-out"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(told))
    (folder / "memory.json").write_text(json.dumps(MEMORY))
    (folder / "versions.json").write_text('{"torch": "2.9"}')
    (folder / EVALUATED).parent.mkdir()
    row = {"prompt": "1+1=", "completion": "2", "reward": 1.0, "correct": True, "greedy": True}
    rows = [row | {"prompt_id": f"test/{number}", "policy": policy} for policy in ("base", "new") for number in (1, 2)]
    (folder / EVALUATED).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def bounded() -> Iterator[None]:
    """Let a row take no more memory than it may, and no time without end."""
    (held,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(held) * 1024 + MOST_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def content_of(page: Path) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="content">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(found)


def files_in(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Kind, size and time of everything in a folder, and beside it."""
    there = [path for path in folder.parent.rglob("*") if not path.name.startswith(".")]
    return {str(path): (path.lstat().st_mode, path.lstat().st_size, path.lstat().st_mtime_ns) for path in there
            if not path.is_dir()}  # fmt: skip


def damaged(
    name: str,
    folder: Path,
    command: Callable[[list[str]], None],
    arguments: list[str],
    wanted: str,
    capsys: pytest.CaptureFixture[str],
) -> int:
    """Damage a folder and run a command on it, which leaves the folder as it is; return its exit code.

    A refusal is one line that names the file. What is told of a result names it too, and of a right one nothing is.
    """
    file, code = DAMAGES[name].file, 0
    DAMAGES[name].do(folder)
    before = files_in(folder)
    capsys.readouterr()
    try:
        command(arguments)
        said = "".join(capsys.readouterr())
    except SystemExit as stopped:
        code, said = 2, capsys.readouterr().err
        assert stopped.code == 2 and said.startswith("error: ") and said.count("\n") == 1 and len(said) < 2_000, said
    about = [line for line in said.splitlines() if str(folder) in line]
    assert (code == 2) == (wanted == REFUSED), said
    if wanted != RIGHT:
        assert any(str(folder / file) in line or f"has no {file}" in line or file == "policy" for line in about), said
    else:
        assert not any("not read" in line or "cannot be read" in line for line in about), said
    assert files_in(folder) == before
    return code


REPORTS = ["config.yaml: itself", "metrics.csv: step '100000000'", "metrics.csv: reward '1e308'"]
REPORTS += ["samples.jsonl: a pipe", "samples.jsonl: reward '[1.0]'", "timeline.jsonl: spans 'x'"]
REPORTS += ["timeline.jsonl: a sparse file", "memory.json: a link to itself", "evaluation/completions.jsonl: brackets"]


FINISHES = ["config.yaml: model '5'", "samples.jsonl: reward '[1.0]'", "policy: config.json no JSON"]


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run that may be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "runs" / "made"))


@pytest.mark.filterwarnings("error", *OF_OTHERS)
@pytest.mark.parametrize("name", table_rows(DAMAGES, REPORTS))
def test_a_report_of_a_damaged_folder(
    name: str, folder: Path, tmp_path: Path, bounded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    code = damaged(name, folder, report, [str(folder), "--output", str(page)], DAMAGES[name].report, capsys)
    assert page.exists() == (code == 0)
    if code == 0:
        (run,) = content_of(page)["runs"]
        assert bool(run["problems"]) == (DAMAGES[name].report == TOLD)


@pytest.mark.filterwarnings("error", *OF_OTHERS)
@pytest.mark.parametrize("name", table_rows(DAMAGES, FINISHES))
def test_a_damaged_folder_is_finished(
    name: str, folder: Path, tmp_path: Path, bounded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(folder), "--output", str(tmp_path / "made"), "--gguf", "none"]
    code = damaged(name, folder, finish, arguments, DAMAGES[name].finish, capsys)
    assert sorted(os.listdir(tmp_path)) == (["made", "runs"] if code == 0 else ["runs"])
    assert code == 2 or (tmp_path / "made" / "README.md").stat().st_size < 100_000


CONFIGS = ["a pipe", "a folder", "a link to itself", "a device without end", "a socket", "a sparse file"]
CONFIGS += ["bytes", "brackets", "itself", "a mapping in itself", "laughs", "deep", "a month", "an object", "a tab"]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_of_a_run_that_is_evaluated(name: str, folder: Path, bounded: None) -> None:
    DAMAGES[f"config.yaml: {name}"].do(folder)
    with pytest.raises(ValueError, match=str(folder / "config.yaml")):
        read_options([str(folder)])
