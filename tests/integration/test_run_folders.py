"""Runs of one name that are begun at once, by the command line and by torchrun: each in a folder of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import read_metrics
from forks import Forked

import lit_grpo
from lit_grpo.cli.command_line import run as lit_grpo_run
from lit_grpo.training.run_folder import RunFolder
from tests.task_folders import write_task

FILES = """
from pathlib import Path
import lightning.pytorch as pl

def score(completion):
    return len(completion)

class Tells(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        Path(f"rank-{trainer.global_rank}").write_text(trainer.default_root_dir)
"""


@pytest.fixture
def folder(tmp_path: Path, policy_folder: Path) -> Path:
    (tmp_path / "own_files.py").write_text(FILES)
    model = {"num_generations": 2, "rewards": [{"function": "own_files.py:score"}]}
    return write_task(tmp_path, policy_folder, "", trainer={"max_steps": 3}, model=model)


FIT = ("-m", "lit_grpo", "fit", "--config", "config.yaml")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SCRIPT = """
import os, sys
import lit_grpo
from own_files import score
two = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "enable_progress_bar": False}
run = lit_grpo.train(sys.argv[1], "prompts.jsonl", [score], max_steps=1, batch_size=1, name="task", trainer=two,
                     num_generations=2, sampling={"max_tokens": 4})
open(f"rank-{os.environ['RANK']}", "w").write(str(run.folder))
"""


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    return Forked(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.nightly
def test_three_runs_begun_at_once_do_not_touch_each_other(folder: Path) -> None:
    runs = [start(folder, *FIT, "--seed_everything", str(seed)) for seed in (1, 2, 3)]
    for run in runs:
        said, _ = run.communicate(timeout=300)
        assert run.returncode == 0, said
    seeds, rewards = set[int](), set[tuple[str, ...]]()
    for name in sorted(path.name for path in (folder / "runs").iterdir() if path.is_dir()):
        config = yaml.safe_load((folder / "runs" / name / "config.yaml").read_text())
        rows = read_metrics(folder / "runs" / name / "metrics.csv")
        assert [row["step"] for row in rows] == ["1", "2", "3"], name
        seeds.add(config["seed_everything"])
        rewards.add(tuple(row["completions/mean_logprob"] for row in rows))
        assert (folder / "runs" / name / "policy" / "model.safetensors").is_file()
    assert seeds == {1, 2, 3} and len(rewards) == 3


@pytest.mark.nightly
def test_runs_of_two_experiments_leave_two_folders_and_one_that_is_called_elsewhere_is_refused(folder: Path) -> None:
    for name in ("exp1/seed0", "exp2/seed0", "exp1/seed0"):
        run = start(folder, *FIT, "--run.name", name, "--trainer.max_steps", "1")
        said, _ = run.communicate(timeout=300)
        assert run.returncode == 0, said
    made = {str(path.parent.relative_to(folder / "runs")) for path in (folder / "runs").rglob("metrics.csv")}
    assert made == {"exp1/seed0", "exp2/seed0", "exp1/seed0-1"}
    run = start(folder, *FIT, "--run.name", "../../x")
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 2 and "run.name is '../../x'; give a name below run.dir" in said
    assert not list(folder.parent.glob("x*"))


@pytest.mark.nightly
def test_ranks_of_torchrun_write_where_the_first_one_does(folder: Path) -> None:
    arguments = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--data.batch_size", "1")
    arguments += ("--trainer.callbacks", '[{"class_path": "own_files.Tells"}]')
    with RunFolder() as living:
        living.claim(folder / "runs" / "task", resumes=False)
        run = start(folder, *TORCHRUN, *FIT, *arguments)
        said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert {(folder / f"rank-{rank}").read_text() for rank in (0, 1)} == {str(folder / "runs" / "task-1")}
    assert not (folder / "runs" / "task").exists()


@pytest.mark.nightly
def test_ranks_of_torchrun_share_the_folder_of_a_run_from_python(folder: Path, policy_folder: Path) -> None:
    (folder / "own_train.py").write_text(SCRIPT)
    run = start(folder, *TORCHRUN, "own_train.py", str(policy_folder))
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    assert len({(folder / f"rank-{rank}").read_text() for rank in (0, 1)}) == 1
    assert [path.name for path in (folder / "runs").iterdir() if path.is_dir()] == ["task"]


def longer(completion: str) -> float:
    return float(len(completion))


def test_a_policy_in_the_folder_of_an_earlier_run_is_refused_before_it_is_moved(
    folder: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line and from Python; a row whose text is such a path is a text."""
    monkeypatch.chdir(folder)
    told = ["fit", "--config", "config.yaml", "--trainer.max_steps", "1"]
    lit_grpo_run(told)
    trained = Path("runs/task/policy")
    said = r"model\.policy is 'runs/task/policy', in the folder of an earlier run, .* give this run another run\.name"
    few: Any = {"max_steps": 1, "batch_size": 1, "name": "task", "num_generations": 2, "sampling": {"max_tokens": 4}}
    few["trainer"] = {"accelerator": "cpu", "enable_progress_bar": False}
    with pytest.raises(SystemExit, match="2"):
        lit_grpo_run([*told, "--model.policy", str(trained)])
    assert re.search(said, capsys.readouterr().err)
    with pytest.raises(ValueError, match=said):
        lit_grpo.train(str(trained), "prompts.jsonl", longer, **few)
    assert trained.is_dir() and not Path("runs/task-1").exists()
    lit_grpo.train(str(policy_folder), [{"prompt": str(trained)}], longer, **few)
    assert Path("runs/task-1/policy").is_dir()
