"""What a server can answer that no vLLM server does: each time one sentence, and nothing of it is trained on."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from conftest import table_rows

from lit_grpo.process.calls import EventLoop
from lit_grpo.rollout.vllm import http
from lit_grpo.rollout.vllm.fleet import Server
from lit_grpo.rollout.vllm.guard import OWNER_PATH, PROCESS_HEADER
from lit_grpo.rollout.vllm.http import HttpReceiver, SampledChunk, ServerClient, ServerError
from lit_grpo.rollout.vllm.images import Shown

PROCESS, WEIGHTS = "process", "mine"
BARE: Mapping[str, str] = MappingProxyType({})
UNGUARDED = {PROCESS_HEADER: ""}


class Hostile(BaseHTTPRequestHandler):
    """Lets a run take it, says that it is well, and answers everything else as ``behave`` does."""

    protocol_version = "HTTP/1.1"
    behave: Callable[[Hostile], None]

    def answer(
        self, content: bytes, status: int = 200, kind: str = "application/json", headers: Mapping[str, str] = BARE
    ) -> None:
        """Answer as a guarded server does, unless headers say otherwise."""
        self.send_response(status)
        for name, value in {"content-type": kind, PROCESS_HEADER: PROCESS, **headers}.items():
            if value:
                self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def stream(self, *parts: bytes) -> None:
        """Begin an answer without an end."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header(PROCESS_HEADER, PROCESS)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        for part in parts:
            self.wfile.write(part)

    def handle(self) -> None:
        """Answer until the client has had enough."""
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def do_GET(self) -> None:
        if self.path in (OWNER_PATH, "/health", "/is_paused"):
            self.answer(b'{"owned": true}')
        else:
            type(self).behave(self)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == OWNER_PATH:
            self.stream(b"{}\n")  # and it goes on
            self.rfile.read(1)
        else:
            type(self).behave(self)

    def do_DELETE(self) -> None:
        self.answer(b'{"owned": false}')

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Behaving", (Hostile,), {}))
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.01}).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(server: ThreadingHTTPServer) -> Iterator[ServerClient]:
    loop = EventLoop()
    client = ServerClient(f"http://127.0.0.1:{server.server_port}", "a-token", "one", 60.0, loop)
    client.weights = WEIGHTS
    client.take()
    yield client
    client.release()
    loop.close()


def event(token_ids: Any = (5,), logprobs: Any = (-1.0,), reason: Any = "stop", **more: Any) -> bytes:
    content = [{"token_id": 5, "logprob": logprob} for logprob in logprobs or []]
    spans = None if reason is None else [{"version": WEIGHTS, "start": 0, "end": 1}]
    choice = {"token_ids": token_ids, "logprobs": {"content": content}, "weight_versions": spans}
    choice |= {"finish_reason": reason, **more}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def drip(self: Hostile, part: bytes) -> None:
    """Send a little, again and again."""
    self.stream()
    for _ in range(100):
        self.wfile.write(part)
        self.wfile.flush()
        time.sleep(0.05)


def sample(client: ServerClient, shown: Shown | None = None) -> list[SampledChunk | ServerError]:
    """Return what comes of a completion, until it ends."""
    pump = HttpReceiver(client._loop)
    pump.begin(0, client, [1, 7, 7, 2], {"max_tokens": 4}, "salt", shown)
    contents: list[SampledChunk | ServerError] = []
    deadline = time.monotonic() + 120
    while not contents or (isinstance(contents[-1], SampledChunk) and contents[-1].finish_reason is None):
        assert time.monotonic() < deadline
        for content in (arrival.content for arrival in pump.arrivals(1.0)):
            assert isinstance(content, SampledChunk | ServerError)
            contents.append(content)
    pump.close()
    return contents


HTML = b"<html>Welcome to nginx</html>"
COMPLETIONS: dict[str, tuple[Callable[[Hostile], None], str]] = {
    "a page of another program": (
        lambda self: self.answer(HTML, kind="text/html", headers=UNGUARDED),
        r"answers /inference/v1/generate with '200 <html>Welcome.*another program, or a proxy, is at its address",
    ),
    "a proxy's error": (
        lambda self: self.answer(b"upstream", 502, "text/plain", headers=UNGUARDED),
        r"answers /inference/v1/generate with '502 upstream'.*a proxy, is at its address",
    ),
    "an error of its own": (lambda self: self.answer(b"oh", 500), r"answers /inference/v1/generate with: 500 oh"),
    "another token": (lambda self: self.answer(b"", 401), r"does not take this run's token; set LIT_GRPO_SERVER_TOKEN"),
    "a redirect": (
        lambda self: self.answer(b"", 307, headers={"location": "http://evil.example/"}),
        r"sends /inference/v1/generate on to 'http://evil.example/', which is not followed",
    ),
    "another process": (
        lambda self: self.answer(b"", headers={PROCESS_HEADER: "another"}),
        r"was restarted, and has no weights of this run",
    ),
    "other weights": (
        lambda self: self.stream(event(weight_versions=[{"version": "theirs", "start": 0, "end": 1}])),
        r"has sampled with the weights \['theirs'\], where this run has sent 'mine': somebody else has changed",
    ),
    "weights without a name": (lambda self: self.stream(event(weight_versions=None)), r"with the weights \[\], where"),
    "JSON that breaks off": (lambda self: self.stream(b'data: {"choices": [{"tok\n\n'), r"sends '.*JSONDecodeError"),
    "an event without a choice": (lambda self: self.stream(b'data: {"choices": []}\n\n'), r"IndexError"),
    "another form": (lambda self: self.stream(b'data: {"choices": [{"text": "a"}]}\n\n'), r"KeyError\('finish_reason'"),
    "a reason of its own": (lambda self: self.stream(event(reason="tired")), r"broke off a completion: tired"),
    "an end without a reason": (lambda self: self.stream(event(reason=None)), r"ended a completion without a reason"),
    "a line without end": (lambda self: drip(self, b"data: {" + b"x" * 400), r"sends a line of more than 1024 bytes"),
    "a drip of nothing": (
        lambda self: drip(self, b": still there\n\n"),
        r"has hung: its completion has not moved",
    ),
    "a drip of empty events": (
        lambda self: drip(self, event([], [], None)),
        r"has hung: its completion has not moved",
    ),
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_of_a_hostile_server_is_a_failure_of_that_server(
    name: str, server: ThreadingHTTPServer, client: ServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_MAX_LINE", 1024)
    behave, said = COMPLETIONS[name]
    client.watch.timeout_s = 0.5 if "drip" in name else 60.0
    server.RequestHandlerClass.behave = behave  # pyrefly: ignore[missing-attribute]
    failure = sample(client)[-1]
    assert isinstance(failure, ServerError)  # what ends no run: others go on with what was asked of it
    assert failure.args[0].startswith(f"The vLLM server at {client.url} ")
    assert re.search(said, str(failure)), str(failure)


CONTROL: dict[str, tuple[Callable[[Hostile], None], str]] = {
    "a page": (lambda self: self.answer(HTML, headers=UNGUARDED), r"answers /version with '200 <html>"),
    "JSON that breaks off": (lambda self: self.answer(b'{"version": "0.3'), r"answers /version with .*JSONDecodeError"),
    "another form": (lambda self: self.answer(b"[]"), r"answers /version with '200 \[\]', in which TypeError"),
    "text": (lambda self: self.answer(b"0.32", kind="text/plain"), r"answers /version with '200 0.32', in which TypeE"),
    "an endless body": (lambda self: drip(self, b"x" * 1024), r"answers /version with more than 4096 bytes"),
    "a drip": (lambda self: drip(self, b"x"), r"has hung: /version has not been answered"),
    "a redirect": (
        lambda self: self.answer(b"", 302, headers={"location": "http://evil.example/"}),
        r"sends /version on to 'http://evil.example/', which is not followed, for the token would go there",
    ),
}


@pytest.mark.parametrize("name", CONTROL)
def test_an_answer_of_a_hostile_server_is_a_failure_of_that_server(
    name: str, server: ThreadingHTTPServer, client: ServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_MAX_ANSWER", 4096)
    client.watch.timeout_s = 0.5 if "drip" in name else 60.0
    behave, said = CONTROL[name]
    server.RequestHandlerClass.behave = behave  # pyrefly: ignore[missing-attribute]
    with pytest.raises(ServerError, match=said):
        client.ask("GET", "/version", read=lambda answer: str(answer["version"]))


REMEDIES: dict[str, tuple[Callable[[Hostile], None], str]] = {
    "another token": (lambda self: self.answer(b"", 401), "set LIT_GRPO_SERVER_TOKEN to the one that python -m"),
    "another name": (
        lambda self: self.answer(b'{"error": "The Host header names another machine; use its address."}', 403),
        "use its address.",
    ),
    "another run": (lambda self: self.answer(b'{"error": "It belongs to no run yet; take it first."}', 409), "take it"),
    "a redirect": (
        lambda self: self.answer(b"", 302, headers={"location": "http://evil.example/"}),
        "name the address that answers itself.",
    ),
    "another process": (lambda self: self.answer(b"", headers={PROCESS_HEADER: "another"}), "Run the command again."),
    "a drip": (lambda self: drip(self, b"x"), "End it, and start it again with python -m lit_grpo serve."),
    "a page": (lambda self: self.answer(HTML, headers=UNGUARDED), "Start it with python -m lit_grpo serve and the pol"),
    "vLLM's own server": (lambda self: self.answer(b"", 404), "Start it with python -m lit_grpo serve and the policy"),
    "another model": (
        lambda self: self.answer(b'{"error": "hidden_size is 64"}', 500),
        "Start it with python -m lit_grpo serve and the policy's model, or correct urls.",
    ),
}
"""What a named server answers as it is introduced, and the only remedy that the user is told."""


@pytest.mark.parametrize("name", REMEDIES)
def test_a_server_that_cannot_be_taken_is_told_with_one_remedy(
    name: str, server: ThreadingHTTPServer, client: ServerClient
) -> None:
    client.watch.timeout_s = 0.5 if "drip" in name else 60.0
    behave, remedy = REMEDIES[name]
    server.RequestHandlerClass.behave = behave  # pyrefly: ignore[missing-attribute]
    with pytest.raises(ValueError, match=re.escape(remedy)) as refused:
        Server(client).introduce(None)  # pyrefly: ignore[bad-argument-type]
    assert len(re.findall("[Ss]tart it |set LIT_|use its|take it|name the|Run the", str(refused.value))) == 1


def test_a_server_of_ours_that_cannot_be_taken_is_told_with_its_log(
    server: ThreadingHTTPServer, client: ServerClient
) -> None:
    """Nobody but the run starts it."""
    server.RequestHandlerClass.behave = lambda self: self.answer(b"", 500)  # pyrefly: ignore[missing-attribute]
    process: Any = SimpleNamespace(runs=True, log="its.log", keep_log=lambda: None)
    with pytest.raises(ValueError, match=r"answers /version with: 500 +What it said is in its\.log\.$"):
        Server(client, process).introduce(None)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(
    "told, said", [([1, 7, 7, 2], ""), ([1, 7, 2], "3 tokens.* 4 from number 2 on"), (None, "0 tok")]
)
def test_a_server_says_how_it_has_read_an_image(
    told: Any, said: str, server: ThreadingHTTPServer, client: ServerClient
) -> None:
    first = json.dumps(json.loads(event()[6:]) | {"prompt_token_ids": told})
    server.RequestHandlerClass.behave = lambda self: self.stream(f"data: {first}\n\n".encode())  # pyrefly: ignore[missing-attribute]
    last = sample(client, Shown([1, 7, 2], (), []))[-1]
    if said:
        assert isinstance(last, ServerError) and last.kind == "refuses" and re.search(f"reads .* as {said}", str(last))
    else:
        assert isinstance(last, SampledChunk)


def test_a_server_that_talks_on_after_the_end_holds_nothing(server: ThreadingHTTPServer, client: ServerClient) -> None:
    server.RequestHandlerClass.behave = lambda self: self.stream(event(), *[event()] * 10_000)  # pyrefly: ignore[missing-attribute]
    assert sample(client) == [SampledChunk([5], [-1.0], "stop")]


@pytest.mark.parametrize("number", table_rows([40, 200], [40]))
def test_many_completions_leave_no_socket_open(number: int, server: ThreadingHTTPServer, client: ServerClient) -> None:
    server.RequestHandlerClass.behave = lambda self: self.answer(  # pyrefly: ignore[missing-attribute]
        event(), kind="text/event-stream"
    )
    sample(client)
    before = len(list(Path("/proc/self/fd").iterdir())) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(number):
        assert sample(client) == [SampledChunk([5], [-1.0], "stop")]
    after = len(list(Path("/proc/self/fd").iterdir())) if os.path.isdir("/proc/self/fd") else 0
    assert after <= before + 4


def test_proxies_of_the_environment_are_passed_by(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    loop = EventLoop()
    client = ServerClient(f"http://127.0.0.1:{server.server_port}", "a-token", "one", 0.3, loop)
    assert client.answers()
    loop.close()
