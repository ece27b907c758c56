"""Calls of users' code: what forks, fails in odd ways, hangs, or outlives the process that asked for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from test_reward_runner import length, make_group, rewards_of

from lit_grpo.process import calls
from lit_grpo.rewards import RewardFunction, RewardRunner, RewardSpec


def python(code: str, cwd: Path, timeout_s: float = 20.0) -> str:
    """The output of a program, without what it imports being tied to the folder that it runs in."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


class BadError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def fails(completion: str) -> float:
    raise BadError


class Wild(BaseException):
    pass


@pytest.mark.parametrize("kind", [StopIteration, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, Wild])
def test_whatever_a_reward_raises_is_an_error_of_its_rollout(kind: type[BaseException]) -> None:
    def sync(completion: str) -> float:
        raise kind

    async def is_async(completion: str) -> float:
        await asyncio.sleep(0)
        raise kind

    for function in (sync, is_async):
        runner = RewardRunner([RewardFunction.of(function, "raises"), RewardFunction.of(length, "length")], "none")
        group = make_group("ab")
        runner.score(group)
        runner.close()
        assert (group.rollouts[0].rewards, runner.num_errors) == ({"raises": None, "length": 2.0}, 1)


def test_an_async_function_that_cancels_every_task_of_its_loop_fails_calls_and_stops_none() -> None:
    async def cancels() -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(5)

    async def waits() -> None:
        await asyncio.sleep(5)

    made = calls.Calls(1, "tools", "wait")
    results = made.start(made.call_all([waits, cancels], True, 5.0, "tools")).result(timeout=3)
    assert [type(result.error) for result in results] == [asyncio.CancelledError] * 2
    with pytest.raises(RuntimeError, match="CancelledError"):
        made.start(made.call(cancels, True, 5.0, lambda seconds: None, "tools")).result(timeout=3)
    made.stop()


def test_too_many_rewards_that_hang_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(completion: str) -> float:
        time.sleep(5)
        return 1.0

    monkeypatch.setattr(calls, "MOST_LOST", 1)
    runner = RewardRunner([RewardFunction.of(hangs, "hangs")], "none", 0.05, num_workers=1)
    with pytest.raises(RuntimeError, match=r"2 calls of reward functions have taken longer .* or set process: true"):
        runner.score(make_group("a", "b", "c"))
    runner.close()


def test_a_worker_process_that_hangs_ends_with_the_process_that_asked_it(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        "import os, pathlib, time\n"
        "def score(completion):\n"
        "    pathlib.Path('pid').write_text(str(os.getpid()))\n"
        "    time.sleep(15)\n"
    )
    code = """
        import pathlib, threading, time
        from lit_grpo.rewards import RewardFunction, RewardSpec

        function = RewardFunction.load(RewardSpec("stuck.py:score", process=True), 60.0)
        threading.Thread(target=function.call, kwargs={"completion": "a"}, daemon=True).start()
        while not (pathlib.Path("pid").exists() and pathlib.Path("pid").read_text()):
            time.sleep(0.01)
    """
    python(code, tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_arguments_of_a_reward_that_cannot_go_to_a_process_are_refused_when_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def score(completion, key): return key(completion)")
    spec = RewardSpec(f"{tmp_path / 'score.py'}:score", args={"key": lambda text: 1.0}, process=True)
    with pytest.raises(ValueError, match=r"cannot be called in a process with args .* give args that can be pickled"):
        RewardFunction.load(spec)


def test_a_worker_process_takes_its_modules_from_where_this_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pickle.py").write_text("raise ImportError('not the one of Python')")
    (tmp_path / "score.py").write_text("def score(completion): return 3.0")
    function = RewardFunction.load(RewardSpec("score.py:score", process=True), 20.0)
    runner, group = RewardRunner([function]), make_group("a")
    runner.score(group)
    runner.close()
    assert rewards_of(group) == [3.0]
