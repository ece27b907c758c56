"""Runs whose file system runs full: one sentence, the last good checkpoint whole, and nothing lost on resuming."""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import table_rows

import lit_grpo
from tests.task_folders import computed_metrics, write_task

REWARD = """
import itertools, os
from pathlib import Path
numbers = itertools.count(1)
def score(completion):
    full_at = int(os.environ.get("FULL_AT", 0))
    if next(numbers) == full_at:
        try:
            with open("runs/filler", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            os.truncate("runs/filler", os.path.getsize("runs/filler") - int(os.environ["LEFT"]))
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
"""
SMALL_DISK = """
mount -t tmpfs -o size=8m tmpfs runs && cp -a kept/. runs/ && "$@"
code=$?; cp -a runs/. kept/; exit $code
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    """A task, and a run of it on a disk that is large enough, in ``kept``."""
    folder = tmp_path_factory.mktemp("whole")
    write_task(
        folder,
        policy_folder,
        REWARD,
        rows=7,
        lr=2e-3,
        trainer={"max_steps": 20},
        model={"sampling": {"max_tokens": 4}},
        checkpoint={"every_n_updates": 2},
        sample_logger={"every_n_updates": 0},
    )
    for name in ("runs", "kept"):
        (folder / name).mkdir()
    if subprocess.run(["unshare", "-rm", "sh", "-c", SMALL_DISK, "sh", "true"], cwd=folder, check=False).returncode:
        pytest.skip("This machine lets no user mount a small file system (unshare -rm).")
    run = fit(folder, "whole")
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """The same task, without a run."""
    for name in ("prompts.jsonl", "rewards.py", "config.yaml"):
        shutil.copy(whole / name, tmp_path)
    for name in ("runs", "kept"):
        (tmp_path / name).mkdir()
    return tmp_path


def command(folder: Path, *arguments: str, full_at: int = 0, left: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command line on a small disk, which holds what ``kept`` does, and keep what is on it then."""
    line = ["unshare", "-rm", "sh", "-c", SMALL_DISK, "sh", sys.executable, "-m", "lit_grpo", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FULL_AT": str(full_at), "LEFT": str(left)}
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def fit(folder: Path, name: str, *arguments: str, full_at: int = 0, left: int = 0) -> subprocess.CompletedProcess[str]:
    return command(folder, "fit", "--config", "config.yaml", "--run.name", name, *arguments, full_at=full_at, left=left)


def assert_one_sentence(run: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert run.returncode == 2, run.stdout + run.stderr
    assert "Traceback" not in run.stderr + run.stdout, run.stderr
    (error,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert all(part in error for part in parts), error


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("left", "sentence", "arguments"),
    table_rows(
        [
            (65_536, "last.ckpt could not be written", ()),
            (65_536, "last.ckpt could not be written", ("--checkpoint.asynchronous", "true")),
            (0, "could not be written", ()),
        ],
        [],
    ),
)
def test_a_run_whose_disk_is_full_says_so_and_resumes_exactly(
    whole: Path, folder: Path, left: int, sentence: str, arguments: tuple[str, ...]
) -> None:
    from safetensors.torch import load_file

    kept = folder / "kept"
    run = fit(folder, "task", *arguments, full_at=9 * 8 + 5, left=left)
    assert_one_sentence(run, sentence, "No space left on device", "make room")
    (kept / "filler").unlink()
    checkpoint = kept / "task" / "checkpoints" / "last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["policy_version"] == 8
    resumed = fit(folder, "task", *arguments, "--ckpt_path", "runs/task/checkpoints/last.ckpt")
    assert resumed.returncode == 0, resumed.stderr
    assert computed_metrics(folder / "kept" / "task") == computed_metrics(whole / "kept" / "whole")
    weights, ours = (
        load_file(run / "policy" / "model.safetensors") for run in (whole / "kept" / "whole", kept / "task")
    )
    assert all(torch.equal(weights[name], ours[name]) for name in weights)


@pytest.mark.nightly
def test_an_export_to_a_full_disk_is_one_sentence_and_leaves_nothing_behind(whole: Path, folder: Path) -> None:
    (folder / "kept" / "filler").write_bytes(bytes(2**23 - 60_000))
    checkpoint = whole / "kept" / "whole" / "checkpoints" / "last.ckpt"
    run = command(folder, "export", str(checkpoint), "runs/new")
    assert_one_sentence(run, "The policy could not be written to runs/new", "make room")
    assert [path.name for path in (folder / "kept").iterdir()] == ["filler"]


@pytest.mark.parametrize("in_its_place", table_rows(["nothing", "a file", "a folder"], ["a file"]))
def test_weights_of_a_run_whose_folder_is_removed_are_saved(
    in_its_place: str, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    numbers = itertools.count(1)

    def score(completions: list[str], **_: Any) -> list[float]:
        if next(numbers) == 3:
            shutil.rmtree("runs")
            if in_its_place == "a file":
                Path("runs").touch()
            if in_its_place == "a folder":
                Path("runs/grpo").mkdir(parents=True)
        return [float(len(each) % 3) for each in completions]

    with pytest.raises(FileNotFoundError):
        lit_grpo.train(
            str(policy_folder),
            [{"prompt": f"{n}+{n + 1}="} for n in range(4)],
            [score],
            max_steps=8,
            batch_size=1,
            num_generations=2,
            sampling={"max_tokens": 4},
            trainer={"accelerator": "cpu", "enable_progress_bar": False},
            callbacks={"checkpoint": {"every_n_updates": 1}},
        )
    (saved,) = tmp_path.rglob("last.ckpt")
    assert torch.load(saved, weights_only=True)["global_step"] == 3
    assert (
        f"--ckpt_path {saved.relative_to(tmp_path) if in_its_place == 'nothing' else saved}" in capsys.readouterr().out
    )
