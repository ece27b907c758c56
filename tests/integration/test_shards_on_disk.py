"""Checkpoints that two ranks write together: one fails, one is killed, and a run goes on bit for bit.

This file is also the script that the ranks run: ``python test_shards_on_disk.py FOLDER RANK HOW``.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lit_grpo.checkpoints import CheckpointError, FolderIO, read
from tests.task_folders import computed_metrics, write_task

ROOT = Path(__file__).parents[2]

REWARD = """
import os, signal
from lit_grpo.checkpoints import folder

finish, numbers = folder._Writer.finish, []
def count(self, **results):
    numbers.append(self)
    if len(numbers) == int(os.environ.get("KILL_AT", 0)):
        os.kill(os.getpid(), signal.SIGKILL)  # all shards are on the disk
    finish(self, **results)
folder._Writer.finish = count

def score(completion):
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
"""


def save(folder: str, rank: str, how: str) -> None:
    """Save twice as one of two ranks; the second time the second rank cannot write, or is killed as it does."""
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=int(rank), world_size=2, timeout=timedelta(seconds=20))
    io, path = FolderIO(), Path(folder, "last.ckpt")
    io.save_checkpoint({"state_dict": {"weight": torch.ones(4)}, "version": 1}, path)
    write = FileSystemWriter.write_data

    def fail(self: Any, plan: Any, planner: Any) -> Any:
        if rank == "1":
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, plan, planner)

    FileSystemWriter.write_data = fail
    try:
        io.save_checkpoint({"state_dict": {"weight": torch.zeros(4)}, "version": 2}, path)
    except (CheckpointError, RuntimeError) as error:
        print(type(error).__name__, error)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["full", "killed"])
def test_a_rank_that_cannot_write_leaves_the_checkpoint_before_and_nobody_waits(how: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path)]
    ranks = [subprocess.Popen([*command, rank, how], env=environment, text=True, stdout=-1, stderr=-1) for rank in "01"]
    said = [rank.communicate(timeout=120) for rank in ranks]
    saved = read(tmp_path / "last.ckpt")
    assert saved["version"] == 1
    assert saved["state_dict"]["weight"].tolist() == [1.0] * 4
    if how == "full":
        assert [rank.returncode for rank in ranks] == [0, 0], said
        expected = "CheckpointError Rank 1: The checkpoint .*last.ckpt could not be written .No space left on device."
        assert all(re.match(expected, out) for out, _ in said), said
        assert not (tmp_path / ".last.ckpt.writing").exists()
    else:
        assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL] and "RuntimeError" in said[0][0], said


def fit(folder: Path, name: str, *arguments: str, kill_at: int = 0) -> tuple[int, str]:
    command = [sys.executable, "-m", "lit_grpo", "fit", "--config", "config.yaml", "--run.name", name, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KILL_AT": str(kill_at), "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180, check=False)
    return run.returncode, run.stdout + run.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    """A task for two ranks, and a run of it that nothing came upon, ``whole``."""
    folder = write_task(
        tmp_path_factory.mktemp("shards"),
        policy_folder,
        REWARD,
        lr=2e-3,
        trainer={"devices": 2, "strategy": "fsdp2", "max_steps": 5, "logger": None},
        data={"batch_size": 1},
        checkpoint={"every_n_updates": 2},
    )
    code, said = fit(folder, "whole")
    assert code == 0, said
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_two_ranks_that_are_killed_as_they_save_go_on_bit_for_bit(folder: Path, asynchronous: str) -> None:
    name, beside = f"killed-{asynchronous}", ("--checkpoint.asynchronous", asynchronous)
    code, said = fit(folder, name, *beside, kill_at=2)
    assert code == -signal.SIGKILL and "Rank 0 is gone" in said and "Update 2 is saved" in said, said
    assert read(folder / "runs" / name / "checkpoints" / "last.ckpt")["policy_version"] == 2
    code, said = fit(folder, name, *beside, "--ckpt_path", "last")
    assert code == 0, said
    runs = folder / "runs"
    assert computed_metrics(runs / name)[-3:] == computed_metrics(runs / "whole")[-3:]
    ours, theirs = (load_file(folder / "runs" / run / "policy" / "model.safetensors") for run in (name, "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


if __name__ == "__main__":
    save(*sys.argv[1:])
