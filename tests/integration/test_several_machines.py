"""The examples for several machines run as they stand: two machines are two folders here, which share no file."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import read_metrics
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "several_machines"
TOLD = (
    *("--config", "arithmetic", "--data.batch_size", "2", "--data.validation.init_args.num_rows", "4"),
    *("--trainer.accelerator", "cpu", "--trainer.max_steps", "2", "--trainer.val_check_interval", "2"),
)
SRUN = """#!/bin/sh
# What SLURM does with a task a machine, as far as a task can tell.
export SLURM_NTASKS=2 SLURM_LOCALID=0
(cd machine-0 && SLURM_PROCID=0 SLURM_NODEID=0 exec "$@") & first=$!
(cd machine-1 && SLURM_PROCID=1 SLURM_NODEID=1 exec "$@") & second=$!
wait $first && wait $second
"""


def free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a folder for each of two machines, and programs of this environment first on the path."""
    folder = tmp_path_factory.mktemp("machines")
    for machine in range(2):
        (folder / f"machine-{machine}").mkdir()
    programs = folder / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    left_out = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "PL_GLOBAL_SEED")
    own = {name: value for name, value in os.environ.items() if name not in left_out}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return own | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def outcome(run: Path) -> tuple[list[dict[str, str]], dict[str, torch.Tensor]]:
    """The rewards of a run's updates, and its policy."""
    rows = [row for row in read_metrics(run / "metrics.csv") if row["reward"]]
    weights = load_file(run / "policy" / "model.safetensors")
    return [{name: row[name] for name in ("step", "reward", "loss")} for row in rows], weights


@pytest.mark.nightly
def test_slurm_and_torchrun_do_the_same_and_only_the_first_machine_keeps_the_run(folder: Path) -> None:
    slurm = {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "grpo"}
    by_slurm = environment(folder, **slurm, SLURM_NODELIST="127.0.0.1", MASTER_PORT=free_port())
    command = [str(EXAMPLES / "slurm.sh"), *TOLD, "--run.name", "slurm"]
    done = subprocess.run(command, cwd=folder, env=by_slurm, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    by_torchrun = environment(folder, HEAD="127.0.0.1", PORT=free_port(), NODES="2", GPUS="1")
    command = [str(EXAMPLES / "torchrun.sh"), *TOLD, "--run.name", "torchrun"]
    machines = [
        subprocess.Popen(command, cwd=folder / f"machine-{machine}", env=by_torchrun, stderr=subprocess.PIPE, text=True)
        for machine in range(2)
    ]
    told = [machine.communicate(timeout=200)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], told[0][-3000:] + told[1][-3000:]

    runs = {machine: folder / f"machine-{machine}" / "runs" for machine in range(2)}
    assert not list(runs[1].rglob("*.csv")) and not list(runs[1].rglob("*.ckpt"))
    (rows, weights), (same_rows, same_weights) = (outcome(runs[0] / name) for name in ("slurm", "torchrun"))
    assert rows == same_rows and [row["step"] for row in rows] == ["1", "2"]
    assert weights.keys() == same_weights.keys()
    assert all(torch.equal(tensor, same_weights[name]) for name, tensor in weights.items())


def test_a_job_that_is_submitted_again_goes_on(folder: Path) -> None:
    """What the script passes on is looked at; a run that goes on from a checkpoint is tested elsewhere."""
    echoing = folder / "echo"
    echoing.mkdir()
    (echoing / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (echoing / "srun").chmod(0o755)
    (echoing / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    own = environment(folder, SLURM_NNODES="2", SLURM_NTASKS_PER_NODE="4")
    own["PATH"] = f"{echoing}{os.pathsep}{own['PATH']}"
    command = [str(EXAMPLES / "slurm.sh"), "--config", "gsm8k", "--run.name", "mine"]
    passed = "python -m lit_grpo fit --config gsm8k --run.name mine --trainer.num_nodes 2 --trainer.devices 4 "
    first = subprocess.run(command, cwd=echoing, env=own, capture_output=True, text=True, check=True, timeout=120)
    assert first.stdout == f"{passed}--trainer.strategy fsdp2\n"
    (echoing / "runs" / "mine" / "checkpoints" / "last.ckpt").touch()
    again = subprocess.run(command, cwd=echoing, env=own, capture_output=True, text=True, check=True, timeout=120)
    assert again.stdout == f"{passed}--trainer.strategy fsdp2 --ckpt_path last\n"
