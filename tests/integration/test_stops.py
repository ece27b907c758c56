"""Runs that stop on signals and errors: what they save and say, and that they go on as if nothing had been."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import table_rows

from lit_grpo.callbacks import RolloutScheduler, RunCheckpoint
from lit_grpo.cli.command_line import run
from lit_grpo.rollout.weights.tensors import WeightSyncError
from tests.task_folders import computed_metrics, write_task

REWARD = """
import itertools, os
from pathlib import Path
numbers = itertools.count(1)  # calls may come from several threads, and one alone is the event
def score(completion):
    event = Path("event")  # FAIL or the number of a signal, and the call at which it comes
    if event.exists():
        what, when = event.read_text().split()
        number = next(numbers)
        if number == int(when) and what == "FAIL":
            raise KeyError("no such answer")
        if number == int(when) and what in ("MOVE", "REPLACE"):
            os.rename("runs/task", "elsewhere")
            if what == "REPLACE":
                os.mkdir("runs/task")  # as a logger does
        elif number == int(when):
            os.kill(os.getpid(), int(what))
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
"""


def set_up(tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with a task of two optimizer steps a batch, three batches an epoch and a validation after every
    second one."""
    monkeypatch.chdir(tmp_path)
    return write_task(
        tmp_path,
        policy_folder,
        REWARD,
        rows=7,
        lr=2e-3,
        trainer={"max_steps": 12, "val_check_interval": 2},
        model={"num_minibatches": 2},
        data={"validation": "prompts.jsonl"},
    )


@pytest.fixture
def folder(tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return set_up(tmp_path, policy_folder, monkeypatch)


def fit(name: str, *arguments: str) -> None:
    run(["fit", "--config", "config.yaml", "--run.name", name, *arguments])


def metrics(name: str) -> list[dict[str, str]]:
    return computed_metrics(Path("runs", name))


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    """The run of the task that nothing comes upon."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = set_up(tmp_path_factory.mktemp("left_alone"), policy_folder, monkeypatch)
        fit("whole")
    return folder / "runs" / "whole"


@pytest.fixture
def whole(folder: Path, left_alone: Path) -> None:
    """That run, beside those of the test."""
    shutil.copytree(left_alone, folder / "runs" / "whole")


def assert_same_run(one: str, other: str) -> None:
    from safetensors.torch import load_file

    assert metrics(one) == metrics(other)
    expected, actual = (load_file(f"runs/{name}/policy/model.safetensors") for name in (one, other))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def version(path: str) -> int:
    return torch.load(path, weights_only=True)["policy_version"]


@pytest.mark.parametrize("versions", table_rows([[8, 12], [2, 4, 6, 10]], [[8, 12]]))
def test_a_run_resumes_exactly_from_every_checkpoint_even_if_it_was_killed_right_after(
    folder: Path, versions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = RunCheckpoint._save_last

    def and_copy(self: Any, trainer: Any, version: int) -> None:
        save(self, trainer, version)
        shutil.copytree("runs/whole", f"runs/killed-{version}", ignore=shutil.ignore_patterns("policy"))

    with monkeypatch.context() as patch:
        patch.setattr(RunCheckpoint, "_save_last", and_copy)
        fit("whole", "--checkpoint.every_n_updates", "1")
    killed = sorted((path.name for path in Path("runs").glob("killed-*")), key=lambda name: int(name[7:]))
    assert killed == [f"killed-{n}" for n in (2, 4, 6, 8, 10, 12)]
    for name in (f"killed-{version}" for version in versions):
        fit(name, "--ckpt_path", f"runs/{name}/checkpoints/last.ckpt")
        assert_same_run("whole", name)


def test_checkpoints_come_when_a_multiple_is_crossed_and_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    monkeypatch.setattr(RunCheckpoint, "_save_last", _noting(saved))
    fit("task", "--checkpoint.every_n_updates", "3")
    assert saved == [4, 6, 10, 12]
    scores = {int(row["step"]): float(row["val/pass@1"]) for row in metrics("task")[1:] if row["val/pass@1"]}
    assert version("runs/task/checkpoints/best.ckpt") == max(scores, key=lambda step: scores[step])


@pytest.mark.usefixtures("whole")
def test_last_names_the_newest_checkpoint_of_the_runs_own_folder(folder: Path) -> None:
    fit("cut", "--trainer.max_steps", "4")
    fit("cut", "--ckpt_path", "last")
    assert [path.name for path in Path("runs").iterdir() if path.is_dir()].count("cut-1") == 0
    assert_same_run("whole", "cut")


def _noting(saved: list[int]) -> Any:
    save = RunCheckpoint._save_last

    def save_and_note(self: Any, trainer: Any, version: int) -> None:
        saved.append(version)
        save(self, trainer, version)

    return save_and_note


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(
    ("event", "code"), table_rows([("15", 143), ("10", 138), ("2", 130), ("FAIL", 2)], [("15", 143), ("FAIL", 2)])
)
def test_a_run_that_stops_saves_a_checkpoint_and_resumes_exactly(
    folder: Path, event: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    # 7 rewards of the first validation, then 8 a batch, and 7 of a validation after every second batch
    (folder / "event").write_text(f"{event} {7 + 3 * 8 + 7 - 5}")
    with pytest.raises(SystemExit) as exit_:
        fit("task")
    assert exit_.value.code == code
    said = capsys.readouterr()
    assert "the same command with --run.name task --ckpt_path" in said.out
    if event == "FAIL":
        assert "error: reward 'score'" in said.err
        assert "rewards.py:11 in score: raise KeyError" in said.err
        assert "site-packages" not in said.err and "runner.py" not in said.err
    (folder / "event").unlink()
    checkpoint = "runs/task/checkpoints/last.ckpt"
    assert version(checkpoint) == 4
    fit("task", "--ckpt_path", checkpoint)
    assert_same_run("whole", "task")


CALLS = 7 + 2 * 8  # of a validation, and of the batches before the next


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(
    ("update", "call"),
    table_rows([(4, CALLS + 3), (8, 2 * CALLS + 1), (12, 3 * CALLS + 7)], [(12, 3 * CALLS + 7)]),
)
def test_a_validation_that_fails_is_repeated_on_resuming(folder: Path, update: int, call: int) -> None:
    (folder / "event").write_text(f"FAIL {call}")
    with pytest.raises(SystemExit):
        fit("task", "--checkpoint.every_n_updates", "8")
    (folder / "event").unlink()
    checkpoint = "runs/task/checkpoints/last.ckpt"
    assert version(checkpoint) == min(update, 8)  # after the last update there would be no validation to come again
    fit("task", "--ckpt_path", checkpoint)
    assert_same_run("whole", "task")


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("update", table_rows([6, 8], [8]))  # a validation follows after the second
def test_a_sync_that_fails_after_an_update_loses_none_of_its_metrics(
    folder: Path, update: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = iter([False] * (1 + update // 2) + [True])

    def fail(*_: Any) -> None:
        if next(failing):
            raise WeightSyncError("A tensor is missing.")

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("lit_grpo.callbacks.weight_sync.check_arrival", fail)
        fit("task")
    assert int(metrics("task")[-1]["step"]) == update
    assert version("runs/task/checkpoints/last.ckpt") == update
    fit("task", "--ckpt_path", "runs/task/checkpoints/last.ckpt")
    assert [but_sync(row) for row in metrics("task")] == [but_sync(row) for row in metrics("whole")]


def but_sync(row: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in row.items() if not name.startswith("sync/")}


@pytest.mark.parametrize("begins_well", table_rows([False, True], [True]))
def test_a_policy_that_collapses_is_named_and_the_best_one_before_it_is_kept(
    folder: Path, begins_well: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 4, "gamma": 1e9}}
    arguments = ["--model.lr_scheduler", json.dumps(schedule)] if begins_well else []
    arguments += ["--model.optimizer.init_args.lr", "2e-3" if begins_well else "1e6"]
    with pytest.raises(SystemExit):
        fit("task", "--trainer.max_steps", "40", *arguments)
    assert re.search(r"error: The policy collapsed at update \d+: .* lower the learning rate", capsys.readouterr().err)
    scores = {int(row["step"]): float(row["val/pass@1"]) for row in metrics("task")[1:] if row["val/pass@1"]}
    best = torch.load("runs/task/checkpoints/best.ckpt", weights_only=True)
    assert best["policy_version"] == max(scores, key=lambda step: scores[step])
    if begins_well:  # what came after it has no weight left that is of use
        assert best["policy_version"] == 4 and scores[4] > min(scores.values())
        last = torch.load("runs/task/checkpoints/last.ckpt", weights_only=True)
        largest = [max(float(w.abs().max()) for w in one["state_dict"].values()) for one in (best, last)]
        assert largest[0] < 10 and not largest[1] < 1e5


@pytest.mark.parametrize("what", table_rows(["MOVE", "REPLACE"], ["REPLACE"]))
def test_a_folder_that_is_moved_while_its_run_goes_on_ends_it_and_has_all_of_it(
    what: str, folder: Path, whole: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    (folder / "event").write_text(f"{what} 26")
    with pytest.raises(SystemExit) as exit_:
        fit("task", "--checkpoint.every_n_updates", "4")
    said = capsys.readouterr()
    assert exit_.value.code == 1
    assert f"runs/task was moved to {folder}/elsewhere while the run went on, so the run has ended" in said.err
    (line,) = [one for one in said.out.splitlines() if "goes on from there" in one]
    assert line.startswith(f"Update {version('elsewhere/checkpoints/last.ckpt')} is saved; ")
    (folder / "event").unlink()
    words = re.findall(r"(--run\.name|--run\.dir|--ckpt_path) (\S+)", line)
    run(["fit", "--config", "elsewhere/config.yaml", *(word for pair in words for word in pair)])
    assert not list(Path("runs/task").rglob("*.ckpt"))
    expected, actual = (load_file(f"{one}/policy/model.safetensors") for one in ("runs/whole", "elsewhere"))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize(("steps", "good"), table_rows([("2", False), ("6", True)], [("6", True)]))
def test_a_run_whose_policy_computes_nothing_at_its_end_has_failed_and_exports_nothing(
    folder: Path, steps: str, good: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 4, "gamma": 1e33}}
    arguments = ["--model.lr_scheduler", json.dumps(schedule)] if good else ["--model.optimizer.init_args.lr", "1e30"]
    with pytest.raises(SystemExit) as exit_:
        fit("task", "--trainer.max_steps", steps, *arguments)
    said = capsys.readouterr()
    assert exit_.value.code == 2
    assert re.search(
        r"error: The policy collapsed: its log-probs are the same whatever it reads, so it has not been exported .*",
        said.err,
    )
    assert "best.ckpt is the best one, of update 4" in said.err if good else "has none from before it" in said.err
    assert "task: failed" in said.out and "task: done" not in said.out
    assert not Path("runs/task/policy").exists()


def test_an_error_right_after_the_best_validation_loses_neither_it_nor_its_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, trainer: Any, module: Any) -> None:
        if module.policy_version == 4:
            raise KeyError("what a callback does")

    fit("whole", "--trainer.max_steps", "8")
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(RolloutScheduler, "on_validation_end", fail)
        fit("task", "--trainer.max_steps", "8")
    assert version("runs/task/checkpoints/best.ckpt") == version("runs/task/checkpoints/last.ckpt") == 4
    fit("task", "--trainer.max_steps", "8", "--ckpt_path", "runs/task/checkpoints/last.ckpt")
    assert_same_run("whole", "task")
    assert version("runs/task/checkpoints/best.ckpt") == version("runs/whole/checkpoints/best.ckpt")
