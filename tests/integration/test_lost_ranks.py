"""One of two ranks is killed: the other ends with a sentence, whoever started them, and the run goes on from there."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from forks import Forked

from tests.task_folders import write_task

REWARD = """
import os, time
from pathlib import Path
Path(f"rank-{os.environ.get('LOCAL_RANK', 0)}").write_text(str(os.getpid()))
def score(completion):
    time.sleep(float(os.environ.get("REWARD_S", 0)))
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
"""
FIT = ("-m", "lit_grpo", "fit", "--config", "config.yaml")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RESUMING = ("--ckpt_path", "runs/task/checkpoints/last.ckpt")
OBSERVED = """
import subprocess, sys, time
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lit_grpo.faults.lost_ranks import RankWatch
import os
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
_ChildProcessObserver(os.getpid(), [child], sleep_period=0.001).start()
RankWatch(0, [child], None, lambda: "Update 3 is saved.")
child.kill()
time.sleep(600)
"""
WATCHED = """
import sys, time
from lit_grpo.faults import RankWatch
RankWatch(1, [], int(sys.argv[1]), lambda: "Update 3 is saved.")
print("watches", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, policy_folder: Path) -> Path:
    return write_task(
        tmp_path,
        policy_folder,
        REWARD,
        trainer={"devices": 2, "strategy": "ddp", "max_steps": 7},
        data={"batch_size": 1},
        checkpoint={"every_n_updates": 2},
    )


def start(folder: Path, *command: str, reward_s: float = 0.0) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REWARD_S": str(reward_s)}
    return Forked(
        [sys.executable, *command], cwd=folder, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT
    )


def steps(folder: Path) -> list[int]:
    path = folder / "runs" / "task" / "metrics.csv"
    with path.open(newline="") if path.exists() else open(os.devnull) as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def lose_rank_1(folder: Path, *command: str, after: int) -> str:
    """Kill the second rank in the rollout after an update; return what the other said, once all have ended."""
    run = start(folder, *command, reward_s=0.4)
    deadline = time.monotonic() + 120
    while after not in steps(folder):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.05)
    children = psutil.Process(run.pid).children()
    second = int((folder / "rank-1").read_text())
    assert second in {child.pid for child in children}
    os.kill(second, signal.SIGKILL)
    said, _ = run.communicate(timeout=300)
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive and run.returncode not in (0, -9)
    return said


@pytest.mark.nightly
def test_a_rank_that_is_killed_is_named_and_the_run_goes_on_from_its_checkpoint(folder: Path) -> None:
    said = lose_rank_1(folder, *FIT, after=3)
    assert "error: Rank 1 is gone, ended by SIGKILL, and the others cannot go on. Update 2 is saved; the same" in said
    assert "Traceback" not in said
    said = lose_rank_1(folder, *TORCHRUN, *FIT, *RESUMING, after=5)
    assert "error: Rank 1 is gone, and this one cannot go on without it (" in said
    assert "Update 4 is saved; the same command with --run.name task --ckpt_path" in said
    assert steps(folder) == [1, 2, 3, 4, 5]  # one after another, the third of them anew


@pytest.mark.nightly
def test_a_rank_whose_first_rank_is_killed_ends_with_a_sentence() -> None:
    first = f"import os, subprocess, sys\nsubprocess.run([sys.executable, '-c', {WATCHED!r}, str(os.getpid())])"
    run = subprocess.Popen([sys.executable, "-c", first], text=True, stdout=-1, stderr=subprocess.STDOUT)
    assert run.stdout is not None and run.stdout.readline() == "watches\n"
    run.kill()
    assert run.stdout.read() == "\nerror: Rank 0 is gone, and the others cannot go on. Update 3 is saved.\n"


@pytest.mark.nightly
def test_lightnings_observer_does_not_end_the_first_rank_before_it_has_said_why() -> None:
    run = subprocess.run([sys.executable, "-c", OBSERVED], capture_output=True, text=True, timeout=60)
    assert run.stderr == "\nerror: Rank 1 is gone, ended by SIGKILL, and the others cannot go on. Update 3 is saved.\n"
    assert run.returncode == 1
