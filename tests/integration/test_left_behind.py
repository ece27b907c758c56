"""Servers whose owner, front end or engine ends in every way: nothing of them runs 10 seconds later.

Owners are a run with a server of its own, ``serve``, and a run with a server in an actor of Ray.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hand_made import SERVER_ARGUMENTS, save_policy_for_vllm
from test_ray import cluster as cluster

from lit_grpo.process.files import PrivateFolder
from lit_grpo.rollout.vllm.guard import OWNER_PATH, RUN_HEADER, TOKEN_VARIABLE

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-some-length"
SOON_S, START_S = 10.0, 500.0
RUN = """
import json, sys
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.types import Prompt, SamplingParams

folder, options = sys.argv[1], json.loads(sys.argv[2])
policy = PolicySpec(load_policy(folder).eval(), load_tokenizer(folder))
generator = VLLMServerGenerator(2, timeout_s=600.0, **options)
generator.start(policy)
generator.load_weights(generator.weights(), 0)
while True:  # streams are open at nearly any time
    RolloutLoop(generator).collect([Prompt("a", (2, 3), "")], 8, SamplingParams(max_tokens=100), seed=0)
    print("Ready:", flush=True)
"""
SERVE = ("--num-slots", "2", "--max-model-len", "128", "--block-size", "32", "--kv-cache-memory-bytes", "8388608")
FRONT_END, ENGINE, STARTING = "vllm.entrypoints.openai.api_server", "VLLM::EngineCore", "spawn_main"
"""What the command lines of a server's processes have in them: an engine has another one while it starts."""


class Owner:
    """A program that owns a server.

    Args:
        kind: ``run``, ``serve``, or ``ray`` for a run with an actor.
        folder: Of the policy.
        place: The folder for temporary files of program and server, by which all their processes are known.
    """

    def __init__(self, kind: str, folder: Path, place: Path) -> None:
        self.place, self._output, self._found = place, place / "output", set[psutil.Process]()
        own = {"TMPDIR": str(place), "LEFT_BEHIND": str(place)}
        options: dict[str, Any] = {"server_args": SERVER_ARGUMENTS, "restarts": 0}
        if kind == "ray":
            options["ray"] = {"num_cpus": 0, "runtime_env": {"env_vars": own}}
        command = ["-c", RUN, str(folder), json.dumps(options)]
        if kind == "serve":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            command = ["-m", "lit_grpo", "serve", "--policy", str(folder), "--port", port, *SERVE]
        own |= {TOKEN_VARIABLE: TOKEN, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command], env=os.environ | own, stdout=output, stderr=subprocess.STDOUT
            )

    def said(self) -> str:
        return self._output.read_text()

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Wait for something that it does before it ends."""
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()[-3000:]
            time.sleep(0.05)

    def family(self, title: str = "") -> list[psutil.Process]:
        """Return the processes of its server that run and have this in their command lines.

        They have its folder in their environment, or belong to one that has: engines and actors write their titles over
        their environment. One that was found once is found again as an orphan.
        """
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has ended, or is another user's
                if process.pid != self.process.pid and process.environ().get("LEFT_BEHIND") == str(self.place):
                    actors = [parent for parent in process.parents() if "ray::Host" in " ".join(parent.cmdline())]
                    self._found |= {process, *process.children(recursive=True), *actors}
        return [process for process in self._found if _runs(process, title)]

    def left(self) -> set[str]:
        """Return what is left among temporary files, without the random parts of names."""
        names = {re.sub("_[a-z0-9_]{8}([.]|$)", r"_*\1", path.name) for path in self.place.iterdir()}
        return names - {"output", "torchinductor_root"}


def _runs(process: psutil.Process, title: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and title in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy_for_vllm(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def owner(request: pytest.FixtureRequest, kind: str, folder: Path) -> Iterator[Owner]:
    """An owner whose server is starting; what a failed test has left of both is ended."""
    if kind == "ray":
        request.getfixturevalue("cluster")
    place = Path(tempfile.mkdtemp(prefix="left_"))  # with a short path, as sockets need it
    owner = Owner(kind, folder, place)
    yield owner
    owner.process.kill()
    owner.process.wait()
    for process in owner.family():
        process.kill()
    shutil.rmtree(place, ignore_errors=True)


def hold(owner: Owner) -> httpx.Client:
    """Own a server of ``serve`` as a run does, by a request that goes on being answered."""
    (url,) = re.findall(r'urls \'\["(.*)"\]', owner.said())
    client = httpx.Client(headers={"Authorization": f"Bearer {TOKEN}", RUN_HEADER: "run"}, timeout=60.0)
    assert client.send(client.build_request("POST", url + OWNER_PATH), stream=True).is_success
    return client


def stop_and_kill(owner: Owner) -> None:
    os.killpg(owner.family(FRONT_END)[0].pid, signal.SIGSTOP)
    owner.process.kill()


END: dict[str, tuple[str, Callable[[Owner], None]]] = {
    "owner killed": ("Ready:", lambda owner: owner.process.kill()),
    "owner killed while the server is stopped": ("Ready:", stop_and_kill),
    "owner killed before the first sync": ("", lambda owner: owner.process.kill()),
    "owner told to end": ("Ready:", lambda owner: owner.process.terminate()),
    "front end killed": ("Ready:", lambda owner: owner.family(FRONT_END)[0].kill()),
    "engine killed": ("Ready:", lambda owner: owner.family(ENGINE)[0].kill()),
}
"""The ways in which a server comes to its end: the line of the owner before, and what is done."""
LOGS = {"lit_grpo_server_*.log"}
LEFT = {
    ("serve", "owner told to end"): (0, set[str]()),
    ("serve", "front end killed"): (1, LOGS),
    ("serve", "engine killed"): (1, LOGS),
    ("run", "front end killed"): (1, LOGS),
    ("run", "engine killed"): (1, LOGS),
}
"""The owner's exit code, and what is left; elsewhere nobody is there to remove log and folder."""


@pytest.mark.nightly
@pytest.mark.parametrize("end", END)
@pytest.mark.parametrize("kind", ["run", "serve", "ray"])
def test_nothing_of_a_server_runs_ten_seconds_after_its_end(kind: str, end: str, owner: Owner) -> None:
    line, act = END[end]
    owner.wait_until(lambda: line in owner.said() and owner.family(ENGINE if line else STARTING))
    holding = hold(owner) if kind == "serve" and line else None
    act(owner)
    began = time.monotonic()
    while owner.family():
        assert time.monotonic() - began < SOON_S, [process.cmdline() for process in owner.family()]
        time.sleep(0.05)
    code = owner.process.wait(timeout=60.0)
    if holding is not None:
        holding.close()
    if (kind, end) in LEFT:
        assert (code, owner.left()) == LEFT[kind, end], owner.said()[-3000:]
    else:
        assert code != 0 and owner.left() <= LOGS | {"lit_grpo_vllm_*"}
        PrivateFolder("lit_grpo_vllm_", str(owner.place)).remove()  # as the next server does
        assert owner.left() <= LOGS
    if kind == "serve" and code == 1:
        (sentence,) = [line for line in owner.said().splitlines() if line.startswith("error: ")]
        assert re.search(
            r"The vLLM server at \S+ ended with code \S+ It said: .* All of that is in /\S+\.log", sentence
        )
        assert end == "front end killed" or "its engine was ended by SIGKILL" in sentence
