"""The client of a guarded server: taking it, waiting for it, and noticing what others do to it."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from lit_grpo.process.loops import EventLoop
from lit_grpo.rollout.vllm import guard as guarding
from lit_grpo.rollout.vllm import http
from lit_grpo.rollout.vllm.guard import TOKEN_VARIABLE, Guard
from lit_grpo.rollout.vllm.http import ServerClient, ServerError, StreamPump

TOKEN = "a-token-of-some-length"
EVENT = b'data: {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}]}\n\n'


class App:
    """Stands in for vLLM, whose engine works for ``work_s`` on what it is asked; ``well`` is what it says of itself."""

    def __init__(self) -> None:
        self.work_s, self.well, self.status = 0.0, True, 200
        self.engine_s = 0.0  # in which the engine says that it is well
        self.meanwhile = lambda: None  # between the headers of an answer and its body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            await self._answer(send, 200 if self.well else 503, b"application/json", b"")
            return
        if scope["path"] == "/is_paused":
            await self._answer(send, 200, b"application/json", b"{}", self.engine_s)
            return
        streams = scope["path"] == "/v1/completions"
        kind = b"text/event-stream" if streams else b"application/json"
        await self._answer(send, self.status, kind, EVENT if streams else b"{}", self.work_s)

    async def _answer(self, send: Any, status: int, kind: bytes, body: bytes, work_s: float = 0.0) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await asyncio.sleep(work_s)
        self.meanwhile()
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def guard(app: App, monkeypatch: pytest.MonkeyPatch) -> Guard:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return Guard(app)


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


def client_of(guard: Guard, loop: EventLoop, run: str, token: str = TOKEN) -> ServerClient:
    client = ServerClient("http://127.0.0.1:8000", token, run, 0.2, loop)
    transport = httpx.ASGITransport(app=guard)  # pyright: ignore[reportArgumentType]
    client._http = httpx.AsyncClient(transport=transport, base_url=client.url, headers=client._http.headers)
    return client


def test_a_server_is_taken_and_given_back(guard: Guard, loop: EventLoop) -> None:
    one, two = client_of(guard, loop, "one"), client_of(guard, loop, "two")
    one.take()
    assert one.is_ours() and not two.is_ours() and one.answers()
    one.post("/start_weight_update")
    one.post("/pause")
    assert one.is_ours()  # it has followed
    one.release()
    two.take()
    assert two.is_ours() and not one.is_ours()
    two.release()


def test_a_wrong_token_is_said_with_its_remedy(guard: Guard, loop: EventLoop) -> None:
    with pytest.raises(ServerError, match=r"does not take this run's token; set LIT_GRPO_SERVER_TOKEN to the one that"):
        client_of(guard, loop, "one", "another-token").take()


def test_a_run_that_goes_on_keeps_its_server_and_a_dead_one_does_not(
    guard: Guard, loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_BEAT_S", 0.05)
    one, two = client_of(guard, loop, "one"), client_of(guard, loop, "two")
    one.take()
    with pytest.raises(ValueError) as caught:
        two.take()
    assert re.fullmatch(
        r"The vLLM server at http://\S+ belongs to another run \(process \d+ on .*, in /.*\), heard of \d+ s ago; end "
        r"that run, or start a server of your own with python -m lit_grpo serve --port PORT\.",
        str(caught.value),
    )
    assert one._beats is not None
    one._beats.cancel()  # as a kill does
    monkeypatch.setattr(guarding, "LEASE_S", 1.0)
    two.take()
    assert two.is_ours() and not one.is_ours()
    with pytest.raises(ServerError, match="answers /start_weight_update with: 409 The server belongs to another run"):
        one._state = two._state
        one.post("/start_weight_update")
    two.release()


def test_somebody_elses_change_is_noticed_by_the_next_call(guard: Guard, loop: EventLoop) -> None:
    client = client_of(guard, loop, "one")
    client.take()
    guard._num_changes += 1
    assert client.answers() and not client.is_ours()
    for call in (lambda: client.post("/start_weight_update"), lambda: client.get("/weight_info")):
        with pytest.raises(ServerError, match="was restarted, or somebody else has changed its weights"):
            call()
    client.take()  # anew, with nothing known
    client.post("/start_weight_update")
    client.release()


def sample(client: ServerClient, loop: EventLoop) -> Any:
    """Return the content of the first thing that arrives."""
    pump = StreamPump(loop)
    pump.begin(0, client, [1], {})
    arrived: list[Any] = []
    while not arrived:
        arrived = pump.arrivals(1.0)
    return arrived[0].content


def test_tokens_of_changed_weights_are_not_taken(guard: Guard, loop: EventLoop, app: App) -> None:
    client = client_of(guard, loop, "one")
    client.take()
    client.post("/finish_weight_update")
    assert sample(client, loop).token_ids == [5]
    app.meanwhile = lambda: setattr(guard, "_num_changes", 2)
    failure = sample(client, loop)
    assert isinstance(failure, ServerError) and "somebody else has changed its weights" in str(failure)
    assert "somebody else" in str(sample(client, loop))
    app.status = 404  # of a server that was restarted, and has another name for its model
    assert "was restarted" in str(sample(client, loop))
    client.release()


def test_a_slow_server_is_not_a_dead_one(guard: Guard, loop: EventLoop, app: App) -> None:
    client = client_of(guard, loop, "one")
    client.take()
    app.work_s = 2.5 * client.timeout_s
    assert client.post("/finish_weight_update") == {}
    assert sample(client, loop).token_ids == [5]
    client.release()


@pytest.mark.parametrize("well", [True, False], ids=["it says that it is well", "it says nothing"])
def test_a_server_without_progress_is_given_up(guard: Guard, loop: EventLoop, app: App, well: bool) -> None:
    client = client_of(guard, loop, "one")
    client.take()
    app.work_s, app.well = 600.0, well
    begun = time.monotonic()
    with pytest.raises(ServerError, match=f"has hung: {http._PATIENCE if well else 1} time-outs of 0.2 s") as caught:
        client.post("/finish_weight_update")
    assert caught.value.hung
    assert time.monotonic() - begun >= (http._PATIENCE if well else 1) * client.timeout_s
    failure = sample(client, loop)
    assert failure.hung
    client.release()


def test_a_server_whose_engine_alone_hangs_is_given_up_early_and_its_user_is_told(
    guard: Guard, loop: EventLoop, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_TELL_S", 0.05)
    client = client_of(guard, loop, "one")
    client.take()
    app.work_s = app.engine_s = 600.0
    begun = time.monotonic()
    with (
        pytest.warns(UserWarning, match=r"Waiting for the vLLM server at http://127.0.0.1:8000: /pause has not been "),
        pytest.raises(ServerError, match=r"1 time-outs of 0.2 s without progress, and it answers, but its engine"),
    ):
        client.post("/pause")
    assert time.monotonic() - begun < 4 * client.timeout_s
    with pytest.warns(UserWarning, match=r"it is left out at 0.2 s\."):
        assert not client.answers(client.timeout_s)
    with pytest.raises(ServerError, match=f"has hung: {http._PATIENCE} time-outs"):  # while it takes weights
        client.post("/update_weights")
    assert "its engine does not" in str(sample(client, loop))
    client.release()


class _Answering(BaseHTTPRequestHandler):
    """Answers, keeps the connection open, and says nothing more of a completion than that it has begun."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"3\r\n: a\r\n")
        with suppress(ConnectionError):
            self.rfile.read(1)

    def log_message(self, format: str, *args: Any) -> None: ...


def test_the_loop_ends_with_all_connections_closed(recwarn: pytest.WarningsRecorder) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answering)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    loop = EventLoop()
    client = ServerClient(f"http://127.0.0.1:{server.server_port}", TOKEN, "one", 1.0, loop)
    assert client.answers()
    StreamPump(loop).begin(0, client, [1], {})
    assert client.answers()
    loop.close()
    del client, loop
    gc.collect()
    server.shutdown()
    server.server_close()
    assert [str(each.message) for each in recwarn if issubclass(each.category, ResourceWarning)] == []
