"""``python -m lit_grpo serve`` as a process of a shell script: it begins, hands its token over, and ends when told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from hand_made import save_policy_for_vllm

from lit_grpo.rollout.vllm.guard import OWNER_PATH, TOKEN_VARIABLE

pytestmark = pytest.mark.integration

ARGUMENTS = ["--num-slots", "2", "--max-model-len", "128", "--block-size", "32", "--kv-cache-memory-bytes", "8388608"]


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
    return save_policy_for_vllm(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def port() -> int:
    """One that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def started(folder: Path) -> Iterator[list[Serving]]:
    """What a test starts, ended with it."""
    serving: list[Serving] = []
    yield serving
    for each in serving:
        each.kill()


def test_it_hands_its_token_over_in_a_private_file_and_ends_with_its_server_on_ctrl_c(
    folder: Path, port: int, started: list[Serving]
) -> None:
    started.append(serving := Serving(folder, port))
    url = serving.says("--model.generator.init_args.urls")
    assert url == f"'[\"http://127.0.0.1:{port}\"]'"
    token_file = Path(serving.says(f'Token: export {TOKEN_VARIABLE}="$(cat ').removesuffix(')"'))
    assert token_file.stat().st_mode & 0o777 == 0o600 and token_file.parent.stat().st_mode & 0o777 == 0o700
    token = token_file.read_text()
    address = f"http://127.0.0.1:{port}{OWNER_PATH}"
    assert httpx.get(address).status_code == 401
    assert httpx.get(address, headers={"Authorization": f"Bearer {token}"}).json()["owned"] is False
    lines = [" ".join(process.cmdline()) for process in (serving.process, *serving.process.children(recursive=True))]
    assert not any(token in line for line in lines)

    started.append(second := Serving(folder, port))
    assert second.code() == 2
    said = second.output.read_text()
    assert f"cannot listen on port {port} of 127.0.0.1 (Address already in use); end what has it" in said
    assert "Ready" not in said

    log = Path(serving.says("the log is"))
    assert log.exists()
    assert serving.end(signal.SIGINT) == 0
    assert not token_file.parent.exists() and not log.exists()


def test_it_ends_with_its_server_while_that_is_starting(folder: Path, port: int, started: list[Serving]) -> None:
    started.append(serving := Serving(folder, port))
    serving.says("Starting; the log is")
    assert serving.end(signal.SIGTERM) == 0


def test_what_vllm_fails_of_is_said_with_the_log_that_tells_more(
    folder: Path, port: int, started: list[Serving]
) -> None:
    started.append(serving := Serving(folder, port, "--worker-extension-cls", "no.such.Worker"))
    assert serving.code() == 2
    said = serving.output.read_text().splitlines()[-1]
    assert said.startswith("error: The vLLM server at") and "said: ModuleNotFoundError: No module named 'no'" in said
    log = Path(said.rpartition(" is in ")[2].removesuffix("."))
    assert "Engine core initialization failed" in log.read_text()
    log.unlink()
