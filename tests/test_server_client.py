"""The client of a guarded server: taking it, waiting for it, and noticing what others do to it."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lit_grpo.process.calls import EventLoop
from lit_grpo.rollout.vllm import http
from lit_grpo.rollout.vllm.guard import KEY_VARIABLE, Guard
from lit_grpo.rollout.vllm.http import HttpReceiver, ServerClient, ServerError

uvicorn: Any = pytest.importorskip("uvicorn", reason="what vLLM serves with is not installed")

TOKEN = "a-token-of-some-length"
EVENT = (
    b'data: {"choices": [{"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]}, '
    b'"finish_reason": "stop", "weight_versions": [{"version": "%s", "start": 0, "end": 1}]}]}\n\n'
)


class App:
    """Stands in for vLLM, whose engine works for ``work_s`` on what it is asked; ``well`` is what it says of itself."""

    def __init__(self) -> None:
        self.work_s, self.well, self.status = 0.0, True, 200
        self.engine_s = 0.0  # in which the engine says that it is well
        self.weights = b"mine"  # that sample

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            await self._answer(send, 200 if self.well else 503, b"application/json", b"")
            return
        if scope["path"] == "/is_paused":
            await self._answer(send, 200, b"application/json", b"{}", self.engine_s)
            return
        streams = scope["path"] == "/inference/v1/generate"
        kind = b"text/event-stream" if streams else b"application/json"
        await self._answer(send, self.status, kind, EVENT % self.weights if streams else b"{}", self.work_s)

    async def _answer(self, send: Any, status: int, kind: bytes, body: bytes, work_s: float = 0.0) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await asyncio.sleep(work_s)
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def serve(app: App, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Starts a guarded server at an address that stays the same, after ending the one before; returns its URL."""
    monkeypatch.setenv(KEY_VARIABLE, TOKEN)
    running: list[tuple[Any, threading.Thread]] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def end() -> None:
            for server, thread in running:
                server.should_exit = server.force_exit = True
                thread.join(10.0)
            running.clear()

        def start() -> str:
            end()
            server = uvicorn.Server(uvicorn.Config(Guard(app), log_level="error", lifespan="off"))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening.dup()]}, daemon=True)
            running.append((server, thread))
            thread.start()
            while not server.started:
                time.sleep(0.01)
            return f"http://127.0.0.1:{listening.getsockname()[1]}"

        yield start
        end()


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def make(serve: Callable[[], str], loop: EventLoop) -> Iterator[Callable[..., ServerClient]]:
    url, made = serve(), list[ServerClient]()

    def make(run: str, token: str = TOKEN) -> ServerClient:
        made.append(ServerClient(url, token, run, 60.0, loop))
        made[-1].weights = "mine"
        return made[-1]

    yield make
    for client in made:
        client.leave()


@pytest.fixture
def client(make: Callable[..., ServerClient]) -> ServerClient:
    """One that has taken its server."""
    client = make("one")
    client.take()
    return client


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_is_taken_and_given_back(make: Callable[..., ServerClient]) -> None:
    one, two = make("one"), make("two")
    one.take()
    assert one.is_ours() and not two.is_ours() and one.answers()
    one.ask("POST", "/start_weight_update")
    one.ask("POST", "/pause")
    assert one.is_ours()
    one.release()
    two.take()
    assert two.is_ours() and not one.is_ours()


def test_a_wrong_token_is_said_with_its_remedy(make: Callable[..., ServerClient]) -> None:
    with pytest.raises(ServerError, match=r"does not take this run's token; set LIT_GRPO_SERVER_TOKEN to the one that"):
        make("one", "another-token").take()


def test_a_run_that_goes_on_keeps_its_server_and_a_dead_one_does_not(make: Callable[..., ServerClient]) -> None:
    one, two = make("one"), make("two")
    one.take()
    with pytest.raises(ValueError) as caught:
        two.take()
    assert re.fullmatch(
        r"The vLLM server at http://\S+ belongs to another run \(process \d+ on .*, in /.*\); end that run, or start a "
        r"server of your own with python -m lit_grpo serve --port PORT\.",
        str(caught.value),
    )
    one.leave()  # as a kill does, which closes its connections
    wait_until(lambda: not one.is_ours())
    two.take()
    assert two.is_ours() and not one.is_ours()
    two._process, one._process = one._process, two._process
    with pytest.raises(ServerError, match="answers /start_weight_update with: 409 The server belongs to another run"):
        one.ask("POST", "/start_weight_update")


def test_a_server_that_was_restarted_is_noticed_by_the_next_call(
    client: ServerClient, serve: Callable[[], str], loop: EventLoop
) -> None:
    serve()
    assert client.answers() and not client.is_ours()
    with pytest.raises(ServerError, match=r"was restarted, and has no weights of this run\."):
        client.ask("GET", "/weight_info")
    assert "was restarted" in str(sample(client, loop))
    client.take()  # anew, with nothing known
    client.ask("POST", "/start_weight_update")


def sample(client: ServerClient, loop: EventLoop) -> Any:
    """Return the content of the first thing that arrives."""
    pump = HttpReceiver(loop)
    pump.begin(0, client, [1], {}, "salt")
    arrived: list[Any] = []
    while not arrived:
        arrived = pump.arrivals(1.0)
    return arrived[0].content


def test_tokens_of_foreign_weights_are_not_taken(client: ServerClient, loop: EventLoop, app: App) -> None:
    assert sample(client, loop).token_ids == [5]
    app.weights = b"others"
    failure = sample(client, loop)
    assert isinstance(failure, ServerError) and failure.kind == "foreign"
    assert "has sampled with the weights ['others'], where this run has sent 'mine': somebody else" in str(failure)


@pytest.mark.parametrize("asked", ["a token", "work on weights"])
@pytest.mark.parametrize("well", [True, False], ids=["it says that it is well", "it says that it is not"])
def test_a_server_without_progress_is_given_up(
    asked: str, client: ServerClient, loop: EventLoop, app: App, well: bool
) -> None:
    app.work_s, app.well = 600.0, well
    client.watch.timeout_s = 2.0  # in which the front end answers beside other processes
    if asked == "a token":
        failure = sample(client, loop)
    else:
        client.watch.timeout_s = 0.4
        with pytest.raises(ServerError) as caught:
            client.ask_workers("reload")
        failure = caught.value
        assert "/collective_rpc reload has not been answered" in str(failure) or not well
    assert failure.kind == "hung" and re.search(
        "has hung: .* and it says that it is well" if well else "it is not well", str(failure)
    )


def test_a_server_whose_engine_alone_hangs_is_given_up_and_its_user_is_told(
    client: ServerClient, loop: EventLoop, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_TELL_S", 0.1)
    client.watch.timeout_s = 3.0
    app.work_s = app.engine_s = 600.0
    with (
        pytest.warns(UserWarning, match=r"Waiting for the vLLM server at http://\S+: /pause has not been answered for"),
        pytest.raises(ServerError, match=r"has hung: /pause has not been answered for \d s, and it answers, but its e"),
    ):
        client.ask("POST", "/pause")
    assert not client.answers(1.0)
    assert "its engine does not" in str(sample(client, loop))


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
    HttpReceiver(loop).begin(0, client, [1], {}, "salt")
    assert client.answers()
    loop.close()
    del client, loop
    gc.collect()
    server.shutdown()
    server.server_close()
    assert [str(each.message) for each in recwarn if issubclass(each.category, ResourceWarning)] == []
