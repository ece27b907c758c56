"""Servers of ours that have ended are started again, but not for ever."""

from __future__ import annotations

import socket
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.process.terminal import counted
from lit_grpo.rollout.generator import GenerationError, StepEvents
from lit_grpo.rollout.vllm.fleet import Fleet, Server, _tend
from lit_grpo.rollout.vllm.http import Arrival, SampledChunk, ServerClient, ServerError
from lit_grpo.rollout.vllm.process import ServerProcess
from lit_grpo.rollout.vllm.server import VLLMServerGenerator
from lit_grpo.rollout.vllm.streams import EngineRequests
from lit_grpo.rollout.weights.tensors import WeightSyncError
from lit_grpo.types import Prompt, Request, SamplingParams


def test_a_server_that_ends_at_once_each_time_is_not_started_for_ever(
    tmp_path: Path, fake_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python("echo 'ValueError: too little memory'\nexit 3")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where logs stay
    fleet = Fleet(num_slots=1, timeout_s=0.5, start_timeout_s=20.0, restarts=2)
    process = ServerProcess(tmp_path, {}, {}, "t" * 32)
    server = Server(ServerClient(process.url, "t", "run", 0.5, fleet.loop), process)
    fleet._servers, fleet._introduction = [server], None  # pyrefly: ignore[bad-assignment]
    process.process.wait()
    with (
        pytest.warns(UserWarning, match="ended with code 3. It said: ValueError: too little memory") as said,
        pytest.raises(WeightSyncError, match="No vLLM server took the policy's weights: none is up"),
    ):
        fleet.load_weights([], 0)
    texts = [str(each.message) for each in said if "left)." in str(each.message)]
    (again,) = {log for log in tmp_path.glob("*.log") if str(log) in texts[1]}
    assert again != process.log
    assert texts == [
        f"The vLLM server at {process.url} has ended or hung. What it said is in {log}. It is started again, and "
        f"decodes after a sync that finds it up ({counted(left, 'restart')} left)."
        for left, log in ((1, process.log), (0, again))
    ]
    assert len(list(tmp_path.glob("*.log"))) == 3
    fleet._stop()


def test_a_rollout_does_not_go_on_with_a_policy_that_has_changed_since_it_was_sent(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = VLLMServerGenerator(2)
    generator._policy = PolicySpec(load_policy(str(policy_folder)), load_tokenizer(str(policy_folder)))
    generator.version, generator._arrived = 3, {"weight": "a"}

    def load(weights: Any, version: int) -> None:
        assert version == 3
        generator._arrived = {"weight": arrives, "base": "c"}

    monkeypatch.setattr(generator, "_bring", load)
    arrives = "a"
    generator._resume_lost([], "It has died.")
    arrives = "b"
    with pytest.raises(GenerationError, match=r"It has died\. No vLLM server is left; start them again"):
        generator._resume_lost([], "It has died.")


# ---- looks -----------------------------------------------------------------------------------------


class Client:
    """Answers, or does not, and notes how long it was given."""

    def __init__(self, url: str, well: bool) -> None:
        self.url, self.well = url, well
        self.given_s: list[float] = []
        self.watch = SimpleNamespace(patience_s=8.0, lost_s=0.0)

    def answers(self, timeout_s: float = 5.0) -> bool:
        self.given_s.append(timeout_s)
        self.watch.lost_s = 0.0 if self.well else self.watch.lost_s + timeout_s
        return self.well

    def is_ours(self) -> bool:
        return True

    def release(self) -> None: ...

    def leave(self) -> None: ...


def fleet_of(*servers: Server, restarts: int = 2) -> Fleet:
    """A fleet that has been started, and gives its servers 10 seconds."""
    fleet = Fleet(num_slots=1, num_servers=len(servers), timeout_s=10.0, start_timeout_s=20.0, restarts=restarts)
    fleet._servers, fleet._introduction, fleet._run = list(servers), None, "run"  # pyrefly: ignore[bad-assignment]
    return fleet


def server_of(url: str, well: bool, up: bool = True) -> Any:
    return Server(Client(url, well), up=up)  # pyrefly: ignore[bad-argument-type]


def test_a_look_waits_long_for_servers_that_were_up_alone_as_long_as_one_answers() -> None:
    well, lost = server_of("http://well", well=True), server_of("http://lost", well=False, up=False)
    fleet = fleet_of(well, lost)
    fleet.muster()  # says nothing: the server that is lost was told of when it was
    assert (well.client.given_s, lost.client.given_s) == ([8.0], [3.0])
    assert fleet.alive == [well] and not lost.answered

    well.client.well = False
    with pytest.warns(
        UserWarning, match=r"http://well is left out: it, or its engine, has not answered for 10 s"
    ) as said:
        fleet.muster()
    assert len(said) == 1 and not fleet.alive
    assert (well.client.given_s, lost.client.given_s) == ([8.0, 8.0, 2.0], [3.0, 3.0, 4.0])  # 10 in all

    lost.client.well = True
    fleet.muster()
    assert fleet.alive == [lost]


@pytest.fixture
def process(tmp_path: Path, fake_python: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    """One that goes on, and never answers."""
    fake_python("exec sleep 600")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = ServerProcess(tmp_path, {}, {}, "t" * 32)
    yield process
    process.kill()


def test_a_process_of_ours_that_hangs_over_two_looks_is_killed_and_started_again_and_then_left_to_start(
    process: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    well, hung = server_of("http://well", well=True), server_of(process.url, well=False)
    hung.process = process
    fleet = fleet_of(well, hung)
    with pytest.warns(UserWarning, match="is left out: it, or its engine, has not answered for 8 s. What it said is"):
        fleet.muster()
    assert process.runs and hung.process is process and fleet.restarts == 2  # it may only be slow

    began = time.monotonic()
    with pytest.warns(UserWarning, match=r"has ended or hung\. .* It is started again, .* \(1 restart left\)"):
        fleet.muster()
    assert time.monotonic() - began < 5.0  # nobody waits for it
    assert not process.runs and hung.process is not process and hung.process.runs
    assert hung.process.url == process.url and fleet.alive == [well]

    again = hung.process
    assert hung.starting
    fleet.muster()  # it takes as long as it takes
    assert hung.process is again and again.runs and fleet.restarts == 1 and hung.starting

    hung.client.well = True
    monkeypatch.setattr(ServerProcess, "is_ready", lambda process: True)
    fleet.muster()
    assert fleet.alive == [well, hung] and not hung.starting
    fleet._stop()
    assert not again.runs


SERVER = """
import contextlib, http.server, json, os, pathlib, sys, time
began_before = pathlib.Path(os.environ["BEGAN"])
if not began_before.exists():
    with contextlib.suppress(OSError):
        began_before.touch()
    time.sleep(600.0)

class Owner(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"pid": os.getpid()}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Owner).serve_forever()
"""


class Asked(Client):
    """Answers when the process does."""

    def __init__(self, server: Server, url: str) -> None:
        super().__init__(url, well=False)
        self.server = server

    def answers(self, timeout_s: float = 5.0) -> bool:
        assert isinstance(self.server.process, ServerProcess)
        return self.server.process.is_ready()


def test_a_run_whose_servers_all_hang_goes_on_with_the_first_that_is_up_again(
    tmp_path: Path, fake_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    fake_python(f"exec {sys.executable} {script} $@")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    servers: list[Any] = []
    for began in ("no_folder/began", "began"):  # the first hangs at each start; its file is in no folder
        process = ServerProcess(tmp_path, {}, {"BEGAN": str(tmp_path / began)}, "t" * 32)
        server = server_of(process.url, well=False)
        server.process, server.client = process, Asked(server, process.url)
        servers.append(server)
    while not (tmp_path / "began").exists():
        time.sleep(0.01)
    fleet = fleet_of(*servers)
    with pytest.warns(UserWarning) as said:
        fleet.muster()
    assert fleet.alive == servers[1:] and servers[0].starting
    waits = [str(each.message) for each in said if "The run waits for" in str(each.message)]
    assert len(waits) == 1 and all(server.client.url in waits[0] for server in servers), waits
    for server in servers:
        server.process.kill()


def test_a_process_whose_port_is_taken_when_it_starts_again_is_asked_at_its_new_one(
    process: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung: Any = server_of(process.url, well=False, up=False)
    hung.process, hung.answered = process, False
    fleet = fleet_of(hung)
    fleet.start_timeout_s = 0.0
    monkeypatch.setattr(Server, "look", lambda server, introduction, timeout_s: None)
    process.kill()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", int(process.url.rpartition(":")[2])))
        other.listen()
        with pytest.warns(UserWarning, match="It is started again"):
            fleet.muster()
    assert hung.process is not process and hung.process.url != process.url
    monkeypatch.setattr(ServerProcess, "is_ready", lambda process: True)
    with pytest.warns(UserWarning, match="No vLLM server is up. The run waits for"):
        fleet.start_timeout_s = 0.1
        fleet.muster()
    assert isinstance(hung.client, ServerClient) and hung.client.url == hung.process.url
    fleet._stop()


def test_a_process_of_ours_that_ends_is_started_again_without_a_sync_until_the_fleet_stops(
    process: ServerProcess,
) -> None:
    ended: Any = server_of(process.url, well=False)
    ended.process = process
    fleet = fleet_of(ended, restarts=1)
    with pytest.warns(
        UserWarning, match=r"has ended or hung\. What it said is in .*It is started again, .* \(0 restarts"
    ):
        tending = fleet.loop.begin(_tend(weakref.ref(fleet)))
        process.kill()
        while not ended.starting:
            time.sleep(0.01)
    again = ended.process
    assert again is not process and again.runs and not ended.up and fleet.restarts == 0
    assert ended.kept_log() == ""  # which is not that of the one that ended
    fleet.restarts = 1
    fleet._stop()
    fleet._start_again(ended)  # as a look does that was under way
    assert ended.process is again and not again.runs and fleet.restarts == 1
    assert tending.cancelled() or tending.done()


# ---- rollouts that begin again ---------------------------------------------------------------------


def test_a_rollout_that_begins_again_three_times_without_a_completion_ends_the_run(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = VLLMServerGenerator(2)
    policy = PolicySpec(load_policy(str(policy_folder)), load_tokenizer(str(policy_folder)))
    generator._policy, generator._streams = policy, EngineRequests(policy)
    monkeypatch.setattr(generator, "_bring", lambda weights, version: None)
    monkeypatch.setattr(generator, "_send", lambda stream: None)
    stream = generator._streams.open(Request(Prompt("a", (2, 3), ""), (0,), SamplingParams()), 1.0, "")
    generator._streams.give_ticket(stream)
    assert stream.ticket is not None
    arrivals = [
        Arrival(stream.ticket, SampledChunk([5], [-1.0], None)),
        Arrival(stream.ticket, SampledChunk([1], [-1.0], "stop")),
    ]
    generator._pump = SimpleNamespace(arrivals=lambda timeout_s: [arrivals.pop(0)])  # pyrefly: ignore[bad-assignment]
    for _ in range(3):
        generator._resume_lost([], "It has died.")
    generator._receive(StepEvents(num_active=1))  # a token is not enough
    with pytest.raises(GenerationError, match=r"It has died\. No vLLM server is left; start them again and resume"):
        generator._resume_lost([], "It has died.")
    events = StepEvents(num_active=1)
    generator._receive(events)
    assert [completion.token_ids_T.tolist() for completion in events.finished] == [[5, 1]]
    for _ in range(3):  # it makes progress
        generator._resume_lost([], "It has died.")
    with pytest.raises(GenerationError):
        generator._resume_lost([], "It has died.")


def test_two_servers_that_are_lost_in_one_step_are_both_told_of(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = VLLMServerGenerator(2)
    policy = PolicySpec(load_policy(str(policy_folder)), load_tokenizer(str(policy_folder)))
    generator._policy, generator._streams, generator.version = policy, EngineRequests(policy), 0
    generator._fleet = fleet_of(server_of("http://one", well=False), server_of("http://two", well=False))
    monkeypatch.setattr(generator, "_bring", lambda weights, version: setattr(generator._fleet._servers[0], "up", True))
    asked: list[int] = []
    generator._pump = SimpleNamespace(  # pyrefly: ignore[bad-assignment]
        begin=lambda ticket, client, prompt, fields, salt, shown: asked.append(ticket),
        cancel=lambda ticket: None,
        arrivals=lambda timeout_s: arrivals,
    )
    for sample in range(2):
        request = Request(Prompt("a", (2, 3), ""), (sample,), SamplingParams())
        generator._send(generator._streams.open(request, 1.0, ""))
    arrivals = [
        Arrival(ticket, ServerError(f"http://{name} broke off."))
        for ticket, name in zip(asked, ("one", "two"), strict=True)
    ]
    asked_before = len(asked)
    with pytest.warns(UserWarning) as said:
        generator._receive(StepEvents(num_active=2))
    assert [str(each.message) for each in said] == [
        "http://one broke off. Its 1 completion will go on from there on the server that is left.",
        "http://two broke off. Its 2 completions will go on from there on a server that was started again.",
    ]
    assert len(asked) == asked_before + 1 + 2  # the first on the second, and both once one was started again


def test_a_log_that_an_error_has_named_stays_although_the_server_still_ran_when_the_run_ended(
    policy_folder: Path, process: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front end goes on for 1.5 s after its engine, in which the run may already have failed by a broken stream."""
    generator = VLLMServerGenerator(2)
    policy = PolicySpec(load_policy(str(policy_folder)), load_tokenizer(str(policy_folder)))
    server = server_of(process.url, well=False)
    server.process = process
    generator._policy, generator._streams, generator.version = policy, EngineRequests(policy), 0
    generator._fleet = fleet_of(server)
    monkeypatch.setattr(
        Fleet, "load_weights", lambda fleet, weights, version: fleet._ask_all(lambda server: server.client.answers())
    )
    monkeypatch.setattr("lit_grpo.rollout.vllm.server.HttpReceiver.begin", lambda *args: None)
    generator._send(generator._streams.open(Request(Prompt("a", (2, 3), ""), (0,), SamplingParams()), 1.0, ""))
    (stream,) = generator._streams
    with pytest.raises(GenerationError, match="broke off") as failure:
        generator._fail(stream, ServerError("http://one broke off."))
    assert process.runs
    generator._fleet._stop()
    assert not process.runs and f"What it said is in {process.log}." in str(failure.value) and process.log.exists()
