"""Programs that are killed with all that they have started when their parent ends, also where they are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import multiprocessing, os, pathlib, sys, time
import pids

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=pids.keep, args=[sys.argv[1], "worker"]).start()
    pids.keep(sys.argv[1], "program")
"""
KEPT = """
import os, pathlib, time

def keep(folder, name):
    aside = pathlib.Path(folder, f"{name}.writing")
    aside.write_text(str(os.getpid()))
    aside.rename(pathlib.Path(folder, name))
    time.sleep(600)
"""
OWNER = """
import os, subprocess, sys, time
from lit_grpo.process.bound import PARENT_VARIABLE
command = [sys.executable, "-m", "lit_grpo.process.bound", "program", sys.argv[1]]
subprocess.Popen(command, env=os.environ | {PARENT_VARIABLE: sys.argv[2] or str(os.getpid())}, process_group=0)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "pids.py").write_text(KEPT)
    return tmp_path


def start(folder: Path, parent: str = "") -> subprocess.Popen[bytes]:
    """Start an owner of a program with a worker; ``parent`` is who owned the program before, if not this owner."""
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    return subprocess.Popen([sys.executable, "-c", OWNER, str(folder), parent], env=os.environ | {"PYTHONPATH": path})


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def named(folder: Path, name: str) -> psutil.Process:
    """Wait for a process to say who it is."""
    wait_until((folder / name).exists)
    return psutil.Process(int((folder / name).read_text()))


def ended(process: psutil.Process) -> bool:
    """Whether it runs no more; its parent may have to collect it yet."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("who", ["owner", "program"])
def test_a_killed_parent_takes_a_stopped_program_and_the_workers_of_that_with_it(who: str, folder: Path) -> None:
    owner = start(folder)
    program, worker = named(folder, "program"), named(folder, "worker")
    assert worker.ppid() == program.pid and program.ppid() == owner.pid
    group = [program, worker]
    try:
        os.killpg(program.pid, signal.SIGSTOP)
        owner.kill() if who == "owner" else program.kill()
        wait_until(lambda: all(map(ended, group)))
    finally:
        with suppress(ProcessLookupError):  # multiprocessing's resource tracker, which may stay stopped
            os.killpg(program.pid, signal.SIGKILL)
        owner.kill()
        owner.wait()


def test_a_program_whose_parent_ended_before_it_could_ask_for_a_signal_ends_by_itself(folder: Path) -> None:
    owner = start(folder, parent=str(os.getpid()))  # as if this process had started it, and another had adopted it
    try:
        wait_until(lambda: bool(children := psutil.Process(owner.pid).children()) and all(map(ended, children)))
        assert not (folder / "program").exists()
    finally:
        owner.kill()
        owner.wait()
