"""Runs that are killed or interrupted, and go on as if they had not been."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import table_rows
from forks import Forked

from tests.task_folders import computed_metrics, write_task

REWARD = """
import os, time
from lit_grpo.checkpoints import files

put_in_place = files.put_in_place
def late(aside, path):
    time.sleep(float(os.environ.get("WRITE_S", 0)))
    put_in_place(aside, path)
files.put_in_place = late

def score(completion):
    time.sleep(float(os.environ.get("REWARD_S", 0)))
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Path:
    """A task that takes two optimizer steps a batch, with a KL term whose reference moves, and a learning-rate
    schedule; and a run of it that nothing came upon, ``whole``."""
    scheduler = {"class_path": "torch.optim.lr_scheduler.LinearLR", "init_args": {"total_iters": 10}}
    folder = write_task(
        tmp_path_factory.mktemp("resume"),
        policy_folder,
        REWARD,
        rows=7,
        lr=2e-3,
        trainer={"max_steps": 12, "val_check_interval": 2},
        model={
            "num_minibatches": 2,
            "objective": {"kl": {"beta": 0.02}},
            "reference": {"offload": True},
            "sampling": {"max_tokens": 12},
            "lr_scheduler": scheduler,
        },
        rollout={"plugins": [{"tr_dpo": {"mixup_alpha": 0.6, "sync_steps": 3}}]},
        data={"validation": "prompts.jsonl"},
        checkpoint={"every_n_updates": 2},
    )
    assert "error" not in finish(start(folder, "whole"))
    return folder


def start(
    folder: Path, name: str, *arguments: str, reward_s: float = 0.0, write_s: float = 0.0
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lit_grpo", "fit", "--config", "config.yaml", "--run.name", name, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REWARD_S": str(reward_s), "WRITE_S": str(write_s)}
    return Forked(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=180)
    return said


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.02)


def metrics(folder: Path, name: str) -> list[dict[str, str]]:
    return computed_metrics(folder / "runs" / name)


def num_rows(folder: Path, name: str) -> int:
    path = folder / "runs" / name / "metrics.csv"
    return len(metrics(folder, name)) if path.exists() else 0


def policy(folder: Path, name: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "runs" / name / "policy" / "model.safetensors")


def in_tensorboard(folder: Path, name: str) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run that does not depend on the clock."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen: Any = EventAccumulator(str(folder / "runs" / name))
    seen.Reload()
    names = [name for name in seen.Tags()["scalars"] if name.startswith(("reward", "val/"))]
    return {name: [(event.step, event.value) for event in seen.Scalars(name)] for name in names}


def assert_same_run(folder: Path, one: str, other: str) -> None:
    assert metrics(folder, one) == metrics(folder, other)
    assert in_tensorboard(folder, one) == in_tensorboard(folder, other)
    expected, actual = policy(folder, one), policy(folder, other)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize("hybrid", table_rows([False, True], [False]))
def test_killed_run_resumes_as_if_it_had_not_been_killed(hybrid: bool, folder: Path, hybrid_folder: Path) -> None:
    whole, name, other = "whole", "killed", list[str]()
    if hybrid:
        whole, name, other = "whole-hybrid", "killed-hybrid", ["--model.policy", str(hybrid_folder)]
        assert "error" not in finish(start(folder, whole, *other))
    killed = start(folder, name, *other, reward_s=0.05)
    checkpoint = folder / "runs" / name / "checkpoints" / "last.ckpt"
    wait_until(lambda: checkpoint.exists() and num_rows(folder, name) >= 4, killed)
    killed.kill()
    finish(killed)
    assert num_rows(folder, name) < 7
    said = finish(start(folder, name, *other, "--ckpt_path", str(checkpoint)))
    assert "error" not in said, said
    assert_same_run(folder, whole, name)


@pytest.mark.nightly
@pytest.mark.parametrize("ending", table_rows([signal.SIGKILL, signal.SIGTERM], []))
def test_a_run_that_ends_while_a_checkpoint_is_written_beside_it_goes_on_exactly(
    folder: Path, ending: signal.Signals
) -> None:
    name, beside = f"beside-{ending.name}", ("--checkpoint.asynchronous", "true")
    ended = start(folder, name, *beside, reward_s=0.05, write_s=3.0)
    checkpoints = folder / "runs" / name / "checkpoints"
    last, aside = checkpoints / "last.ckpt", checkpoints / ".last.ckpt.writing"
    wait_until(lambda: last.exists() and aside.exists(), ended)
    before = torch.load(last, weights_only=True)["policy_version"]
    ended.send_signal(ending)
    said = finish(ended)
    saved = torch.load(last, weights_only=True)["policy_version"]
    if ending == signal.SIGKILL:
        assert saved == before and aside.exists()
    else:
        assert saved > before and not aside.exists() and f"Update {saved} is saved" in said, said
    said = finish(start(folder, name, *beside, "--ckpt_path", str(last)))
    assert "error" not in said, said
    assert not aside.exists()
    assert_same_run(folder, "whole", name)


@pytest.mark.nightly
def test_interrupt_saves_a_checkpoint_and_the_run_resumes_exactly(folder: Path) -> None:
    interrupted = start(folder, "interrupted", "--checkpoint.every_n_updates", "1000", reward_s=0.1)
    wait_until(lambda: num_rows(folder, "interrupted") >= 3, interrupted)
    interrupted.send_signal(signal.SIGINT)
    said = finish(interrupted)
    assert "Traceback" not in said, said
    assert "--ckpt_path" in said
    assert 3 <= num_rows(folder, "interrupted") < 7
    checkpoint = folder / "runs" / "interrupted" / "checkpoints" / "last.ckpt"
    said = finish(start(folder, "interrupted", "--ckpt_path", str(checkpoint)))
    assert "error" not in said, said
    assert_same_run(folder, "whole", "interrupted")


@pytest.mark.nightly
def test_a_terminal_that_is_gone_ends_a_run_like_sigterm_unless_nohup_started_it(folder: Path) -> None:
    codes: dict[str, int] = {}
    for name, before in (("hung-up", []), ("nohup", ["nohup"])):
        arguments = ["--config", "config.yaml", "--run.name", name, "--checkpoint.every_n_updates", "1000"]
        command = [*before, sys.executable, "-m", "lit_grpo", "fit", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "REWARD_S": "0.05"}
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup themselves
        )
        wait_until(lambda name=name: num_rows(folder, name) >= 3, process)
        process.send_signal(signal.SIGHUP)
        said = finish(process)
        codes[name] = process.returncode
        assert "Traceback" not in said and ("is saved" in said) == (name == "hung-up"), said
    assert codes == {"hung-up": 128 + signal.SIGHUP, "nohup": 0}
    assert torch.load(folder / "runs/hung-up/checkpoints/last.ckpt", weights_only=True)["policy_version"] < 12
    assert_same_run(folder, "whole", "nohup")
