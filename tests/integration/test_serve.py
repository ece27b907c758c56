"""``python -m lit_grpo serve`` as a process of a shell script, and runs on its server, one of which is killed.

It begins, hands its token over, serves one run after another, and ends when told.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hand_made import SERVER_ARGUMENTS, save_policy_for_vllm

from lit_grpo.rollout.vllm.guard import OWNER_PATH, TOKEN_VARIABLE
from lit_grpo.tools.commands.doctor import main as doctor
from tests.task_folders import write_task

ARGUMENTS = ["--num-slots", "2", "--max-model-len", "128", "--block-size", "32", "--kv-cache-memory-bytes", "8388608"]
BEGUN = " max_tokens=80,"
"""What vLLM logs of a completion that begins, and not of sequences that it scores."""
REWARD = """
import os, time
def score(completion):
    while os.path.exists("hold"):
        time.sleep(0.05)
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
"""


class Serving:
    """A server that a shell without a terminal has started in its background, where SIGINT is ignored."""

    def __init__(self, folder: Path, port: int, *more: str) -> None:
        self.output = folder / f"output-{time.monotonic_ns()}"
        self.output.touch()
        command = [sys.executable, "-m", "lit_grpo", "serve", "--policy", str(folder), "--port", str(port), *ARGUMENTS]
        script = f'"$@" > {self.output} 2>&1 & echo $!; wait $!; echo $?'
        environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", *command, *more], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._shell.stdout is not None
        self.process = psutil.Process(int(self._shell.stdout.readline()))

    def says(self, text: str) -> str:
        """Wait for a line with ``text``; return what follows in it."""
        while True:
            for line in self.output.read_text().splitlines():
                if text in line:
                    return line.partition(text)[2].strip()
            assert self._shell.poll() is None, self.output.read_text()
            time.sleep(0.1)

    def end(self, number: signal.Signals) -> int:
        """Send it a signal; return its exit code once it and all that it started have ended."""
        family = [self.process, *self.process.children(recursive=True)]
        self.process.send_signal(number)
        code = self.code()
        _, alive = psutil.wait_procs(family, timeout=60.0)
        assert len(family) > 1 and not alive, alive
        return code

    def code(self) -> int:
        """Wait for its end."""
        return int(self._shell.communicate(timeout=300.0)[0])

    def kill(self) -> None:
        """End what a failed test has left."""
        if self.process.is_running():
            for process in [self.process, *self.process.children(recursive=True)]:
                process.kill()
        self._shell.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose completions are long."""
    return save_policy_for_vllm(tmp_path_factory.mktemp("policy"), is_long=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def port() -> int:
    """Of the server that the tests share."""
    return free_port()


@pytest.fixture(scope="module")
def shared(folder: Path, port: int) -> Iterator[Serving]:
    """A server that runs of several tests take one after another; the last of these ends it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        serving = Serving(folder, port, "--enable-log-requests")
    yield serving
    serving.kill()


def token_file(serving: Serving) -> Path:
    return Path(serving.says(f'Token: export {TOKEN_VARIABLE}="$(cat ').removesuffix(')"'))


@pytest.fixture
def started(folder: Path) -> Iterator[list[Serving]]:
    """What a test starts, ended with it."""
    serving: list[Serving] = []
    yield serving
    for each in serving:
        each.kill()


@pytest.mark.nightly
def test_it_hands_its_token_over_in_a_private_file(folder: Path, port: int, shared: Serving) -> None:
    url = shared.says("--model.generator.init_args.urls")
    assert url == f"'[\"http://127.0.0.1:{port}\"]'"
    file = token_file(shared)
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    token = file.read_text()
    address = f"http://127.0.0.1:{port}{OWNER_PATH}"
    assert httpx.get(address).status_code == 401
    assert httpx.get(address, headers={"Authorization": f"Bearer {token}"}).json()["owned"] is False
    lines = [" ".join(process.cmdline()) for process in (shared.process, *shared.process.children(recursive=True))]
    assert not any(token in line for line in lines)

    second = Serving(folder, port)
    assert second.code() == 2
    said = second.output.read_text()
    assert f"cannot listen on port {port} of 127.0.0.1 (Address already in use); end what has it" in said
    assert "Ready" not in said


class Runs:
    """Runs of one task, whose tokens are drawn by position, so that a run samples the same ones again.

    Args:
        folder: Where they are.
        policy: Theirs.
        port: Of the server that is named to them.
        token: The server's.
    """

    def __init__(self, folder: Path, policy: Path, port: int, token: str) -> None:
        self.folder, self.url, self.token = folder, f"http://127.0.0.1:{port}", token
        write_task(
            folder,
            policy,
            REWARD,
            rows=7,
            lr=2e-3,
            trainer={"max_steps": 8},
            model={
                "generator": self.generator(urls=[self.url]),
                "num_minibatches": 2,
                "sampling": {"max_tokens": 80, "temperature": 0.8},
            },
            checkpoint={"every_n_updates": 2},
            rollout_timeline={"record_trace": True},
        )

    def generator(self, **arguments: Any) -> dict[str, Any]:
        return {"class_path": "lit_grpo.rollout.vllm.VLLMServerGenerator", "init_args": {"num_slots": 2, **arguments}}

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "lit_grpo", "fit", "--config", "config.yaml", "--run.name", name, *arguments]
        environment = {**os.environ, TOKEN_VARIABLE: self.token, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, stdout=-1, stderr=subprocess.STDOUT
        )

    def checkpoint(self, name: str) -> Path:
        return self.folder / "runs" / name / "checkpoints" / "last.ckpt"

    def resume(self, name: str) -> subprocess.Popen[str]:
        return self.start(name, "--ckpt_path", str(self.checkpoint(name)))

    def steps(self, name: str) -> list[int]:
        """The updates that a run has written, in the order of its table."""
        path = self.folder / "runs" / name / "metrics.csv"
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        return [int(line.partition(",")[0]) for line in lines]

    def sampled(self, name: str) -> list[tuple[Any, ...]]:
        """What a run has sampled, in an order of its own: each completion with its length."""
        lines = (self.folder / "runs" / name / "trace.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return sorted((row["step"], row["prompt_id"], str(row["sample_id"]), row["tokens"]) for row in rows)


def finish(run: subprocess.Popen[str]) -> str:
    said, _ = run.communicate(timeout=240)
    return said


def wait_until(condition: Callable[[], bool], run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert run.poll() is None and time.monotonic() < deadline, finish(run)
        time.sleep(0.01)


@pytest.fixture(scope="module")
def runs(folder: Path, port: int, shared: Serving, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), folder, port, token_file(shared).read_text())


@pytest.fixture(scope="module")
def whole(runs: Runs) -> list[tuple[Any, ...]]:
    """What a run samples that is left alone."""
    said = finish(runs.start("whole"))
    assert "error" not in said and runs.steps("whole") == [2, 4, 6, 8], said
    sampled = runs.sampled("whole")
    assert len(sampled) == 4 * 2 * 4
    return sampled


@pytest.mark.nightly
def test_a_killed_run_leaves_its_named_server_to_the_run_that_resumes_it_and_to_no_other_before(
    runs: Runs, whole: list[tuple[Any, ...]], shared: Serving
) -> None:
    log, hold = Path(shared.says("the log is")), runs.folder / "hold"
    killed = runs.start("killed")
    wait_until(lambda: runs.checkpoint("killed").exists(), killed)
    hold.touch()  # its rewards wait, and it lives on
    second = finish(runs.start("second"))
    assert "belongs to another run" in second and "Traceback" not in second
    num_begun = log.read_text().count(BEGUN)
    hold.unlink()
    wait_until(lambda: log.read_text().count(BEGUN) > num_begun, killed)
    killed.kill()
    finish(killed)
    assert runs.steps("killed")[-1] < 8
    said = finish(runs.resume("killed"))
    assert "error" not in said, said
    assert runs.steps("killed") == [2, 4, 6, 8] and runs.sampled("killed") == whole


@pytest.mark.nightly
def test_a_killed_run_with_a_server_of_its_own_leaves_nothing_running_and_loses_nothing(
    runs: Runs, whole: list[tuple[Any, ...]]
) -> None:
    """It is resumed on a server that is named; the last bits of log-probs depend on timing."""
    own = json.dumps(runs.generator(urls=None, server_args=SERVER_ARGUMENTS))
    killed = runs.start("own", "--model.generator", own)
    wait_until(lambda: runs.checkpoint("own").exists() and len(runs.steps("own")) >= 2, killed)
    servers = psutil.Process(killed.pid).children(recursive=True)
    assert any("vllm" in " ".join(process.cmdline()) for process in servers)
    killed.kill()
    finish(killed)
    _, alive = psutil.wait_procs(servers, timeout=60)
    assert not alive
    said = finish(runs.resume("own"))
    assert "error" not in said, said
    assert runs.steps("own") == [2, 4, 6, 8] and runs.sampled("own") == whole


@pytest.mark.nightly
def test_the_check_up_finds_no_fault_in_a_run_on_named_servers(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs.folder)
    monkeypatch.setenv(TOKEN_VARIABLE, runs.token)
    overlay = ["--config", "generators/vllm_servers", "--model.generator.init_args.num_slots", "2"]
    urls = ["--model.generator.init_args.urls", json.dumps([runs.url])]
    with pytest.raises(SystemExit) as ended:
        doctor(["--config", "config.yaml", *overlay, *urls])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and not re.search("^(fail|skip) ", said, re.MULTILINE), said


@pytest.mark.nightly
def test_it_ends_with_its_server_on_ctrl_c(shared: Serving) -> None:
    folder, log = token_file(shared).parent, Path(shared.says("the log is"))
    assert folder.exists() and log.exists()
    assert shared.end(signal.SIGINT) == 0
    assert not folder.exists() and not log.exists()


@pytest.mark.nightly
def test_it_ends_with_its_server_while_that_is_starting(folder: Path, started: list[Serving]) -> None:
    started.append(serving := Serving(folder, free_port()))
    serving.says("Starting; the log is")
    assert serving.end(signal.SIGTERM) == 0


@pytest.mark.nightly
def test_what_vllm_fails_of_is_said_with_the_log_that_tells_more(folder: Path, started: list[Serving]) -> None:
    started.append(serving := Serving(folder, free_port(), "--worker-extension-cls", "no.such.Worker"))
    assert serving.code() == 2
    said = serving.output.read_text().splitlines()[-1]
    assert said.startswith("error: The vLLM server at") and "said: ModuleNotFoundError: No module named 'no'" in said
    log = Path(said.rpartition(" is in ")[2].removesuffix("."))
    assert "Engine core initialization failed" in log.read_text()
    log.unlink()
