"""The guard before a vLLM server: who is let in, whose the server is, and which files it reads."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from forks import run

from lit_grpo.process.calls import EventLoop
from lit_grpo.rollout.vllm import guard as guarding
from lit_grpo.rollout.vllm.guard import KEY_VARIABLE, OWNER_PATH, PROCESS_HEADER, RUN_HEADER, Guard
from lit_grpo.rollout.weights.files import weights_folder

TOKEN = "a-token-of-some-length"


class App:
    """Stands in for vLLM: keeps what reaches it, and streams two events for a completion."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.reached.append((scope["path"], message["body"]))
        kind = b"text/event-stream; charset=utf-8" if scope["path"] == "/v1/completions" else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for part in (b"data: {1}\n\n", b"data: {2}\n\n"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def guard(app: App, monkeypatch: pytest.MonkeyPatch) -> Guard:
    monkeypatch.setenv(KEY_VARIABLE, TOKEN)
    return Guard(app)


def ask(guard: Guard, method: str, path: str, run: str = "", **options: Any) -> httpx.Response:
    """Send a request as a client with the token does, unless ``options`` say otherwise."""
    headers = {"Authorization": f"Bearer {TOKEN}", RUN_HEADER: run} | options.pop("headers", {})

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=guard)  # pyrefly: ignore[bad-argument-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            request = client.build_request(method, path, headers=headers, **options)
            for name in [name for name, value in headers.items() if value is None]:
                del request.headers[name]
            return await client.send(request)

    return asyncio.run(send())


@contextmanager
def owned(guard: Guard, run: str) -> Iterator[int]:
    """Own the server as a run does, by a request that goes on being answered; gives the status of the answer."""
    loop, began, gone, status = EventLoop(), threading.Event(), asyncio.Event(), list[int]()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        status.append(message.get("status", 0))
        began.set()

    headers = {"host": "127.0.0.1", "authorization": f"Bearer {TOKEN}", RUN_HEADER: run}
    scope = {
        "type": "http",
        "method": "POST",
        "path": OWNER_PATH,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    answer = loop.begin(guard(scope, receive, send))
    assert began.wait(10.0)
    try:
        yield status[0]
    finally:
        loop.begin(_set(gone)).result()
        answer.result(10.0)
        loop.close()


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_with_its_token_requests_are_handed_on_whole(guard: Guard, app: App) -> None:
    assert ask(guard, "GET", "/health").status_code == 200
    assert ask(guard, "POST", "/v1/completions", json={"prompt": [1]}).status_code == 200
    assert [path for path, _ in app.reached] == ["/health", "/v1/completions"]
    assert json.loads(app.reached[1][1]) == {"prompt": [1]}


@pytest.mark.parametrize("path", ["/health", "/v1/completions", "/update_weights", "/metrics", OWNER_PATH, "/docs"])
@pytest.mark.parametrize("token", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN])
def test_without_the_token_no_route_answers(guard: Guard, app: App, path: str, token: str) -> None:
    for method in ("GET", "POST", "OPTIONS", "DELETE"):
        response = ask(guard, method, path, headers={"Authorization": token})
        assert response.status_code == 401 and "token is missing or wrong" in response.json()["error"]
    assert not app.reached


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil:8000"])
def test_a_name_that_leads_here_by_a_strangers_name_server_is_refused(guard: Guard, app: App, host: str) -> None:
    response = ask(guard, "GET", "/health", headers={"Host": host})
    assert response.status_code == 403 and "Host header names another machine" in response.json()["error"]
    assert not app.reached


@pytest.mark.parametrize("host", ["localhost:8000", "LOCALHOST", "[::1]:8000", "[::1]", "10.0.0.7:80", "gpu1.cluster"])
def test_addresses_and_own_names_are_let_in(app: App, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv(KEY_VARIABLE, TOKEN)
    monkeypatch.setenv(guarding.HOST_VARIABLE, "gpu1.cluster")
    assert ask(Guard(app), "GET", "/health", headers={"Host": host}).status_code == 200


def test_a_page_in_a_browser_is_refused_even_with_the_token(guard: Guard, app: App) -> None:
    headers = {"Origin": "https://evil.example", "Content-Type": "text/plain"}  # needs no leave of the server's
    content = json.dumps({"method": "reload", "kwargs": {"source": "/tmp/x.safetensors"}})
    for origin in ("https://evil.example", "null", "http://127.0.0.1:8000"):
        response = ask(guard, "POST", "/collective_rpc", headers=headers | {"Origin": origin}, content=content)
        assert response.status_code == 403 and "page in a browser" in response.json()["error"]
    assert not app.reached


def test_a_server_without_a_token_does_not_begin(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="VLLM_API_KEY is not set; the server would answer anybody"):
        Guard(app)


def test_websockets_are_closed(guard: Guard, app: App) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard({"type": "websocket", "path": "/v1/realtime", "headers": []}, send, send))  # pyrefly: ignore[bad-argument-type]
    assert sent == [{"type": "websocket.close", "code": 1008}] and not app.reached


def test_a_run_owns_the_server_as_long_as_its_request_is_answered(guard: Guard, app: App) -> None:
    assert ask(guard, "POST", "/pause", "one").status_code == 409  # it has not taken it
    with owned(guard, "one") as status:
        assert status == 200 and ask(guard, "GET", OWNER_PATH, "one").json()["owned"]
        assert ask(guard, "POST", "/start_weight_update", "one").status_code == 200
        for path in ("/start_weight_update", "/pause", "/v1/load_lora_adapter", "/sleep", "/anything", OWNER_PATH):
            for other in ("two", ""):
                response = ask(guard, "POST", path, other)
                assert response.status_code == 409
                assert other == "" or "belongs to another run; end that run" in response.json()["error"]
        assert not ask(guard, "DELETE", OWNER_PATH, "two").json()["owned"]
        assert ask(guard, "POST", "/inference/v1/generate", "two", json={}).status_code == 200  # it changes nothing
        assert ask(guard, "POST", "/start_weight_update", "one").status_code == 200
    with owned(guard, "two") as status:
        assert status == 200 and ask(guard, "POST", "/start_weight_update", "one").status_code == 409
    changes = ["/start_weight_update"] * 2
    assert [path for path, _ in app.reached if "generate" not in path] == changes and len(app.reached) == 3


def test_a_run_that_gives_the_server_back_does_not_take_it_from_the_next_when_its_request_ends(guard: Guard) -> None:
    with owned(guard, "two"):
        with owned(guard, "one") as refused:
            assert refused == 409
        ask(guard, "DELETE", OWNER_PATH, "two")
        before = owned(guard, "one")
        assert before.__enter__() == 200
    assert ask(guard, "GET", OWNER_PATH, "one").json()["owned"]
    before.__exit__(None, None, None)
    assert not ask(guard, "GET", OWNER_PATH, "one").json()["owned"]


def test_an_error_names_it_too(guard: Guard, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: Any) -> None:
        raise ValueError("another model is served")

    monkeypatch.setattr(guard, "_app", failing)
    transport = httpx.ASGITransport(app=guard, raise_app_exceptions=False)  # pyrefly: ignore[bad-argument-type]

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/weight_info", headers={"Authorization": f"Bearer {TOKEN}"})

    response = asyncio.run(send())
    assert response.status_code == 500 and response.json() == {"error": "ValueError: another model is served"}
    assert response.headers[PROCESS_HEADER]


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Path]:
    with weights_folder(str(tmp_path)) as folder:
        yield folder


@pytest.fixture
def one(guard: Guard) -> Iterator[None]:
    """The run that owns the server."""
    with owned(guard, "one"):
        yield


@pytest.mark.usefixtures("one")
def test_weights_come_from_private_folders_of_this_user_alone(guard: Guard, app: App, private: Path) -> None:
    pytest.importorskip("vllm")

    def reload(**arguments: Any) -> httpx.Response:
        return ask(guard, "POST", "/collective_rpc", "one", json={"method": "reload", **arguments})

    outside = private.parent / "weights.safetensors"
    outside.write_bytes(b"")
    open_to_all = private.parent / "lit_grpo_weights_open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    link = private.parent / "lit_grpo_weights_link"
    link.symlink_to(private)
    (private / "link.safetensors").symlink_to(outside)
    weights = private / "weights.safetensors"
    for path in (
        *(outside, open_to_all / "w.safetensors", link / "w.safetensors", private / "link.safetensors"),
        *(private / ".." / "weights.safetensors", private / "weights.bin", Path("/etc/passwd"), "w.safetensors", ""),
    ):
        assert reload(kwargs={"source": str(path)}).status_code == 403, path
        assert reload(args=[str(path)]).status_code == 403, path
    for other in ("/etc/cron.d/x", str(outside), "~/.ssh/x"):
        assert reload(kwargs={"source": str(weights), "more": [{"other": other}]}).status_code == 403
    assert (
        "methods of lit_grpo's extension alone, not for 'save_sharded_state'"
        in (ask(guard, "POST", "/collective_rpc", "one", json={"method": "save_sharded_state"}).json()["error"])
    )
    assert not app.reached
    assert reload(kwargs={"source": str(weights), "keeps": True}).status_code == 200
    assert json.loads(app.reached[0][1])["kwargs"] == {"source": str(weights), "keeps": True}


@pytest.mark.usefixtures("one")
def test_adapters_come_as_safetensors_from_private_folders_alone(guard: Guard, app: App, private: Path) -> None:
    (private / "adapter_model.bin").write_bytes(b"")  # which a loader would unpickle

    def load(path: str) -> httpx.Response:
        return ask(guard, "POST", "/v1/load_lora_adapter", "one", json={"lora_name": "a", "lora_path": path})

    (private.parent / "adapter_model.safetensors").write_bytes(b"")
    assert [load(path).status_code for path in (str(private), f"{private}/..", "owner/name", "/tmp")] == [403] * 4
    assert not app.reached
    (private / "adapter_model.safetensors").write_bytes(b"")
    assert load(str(private)).status_code == 200


PIXELS = "data:image/png;base64,iVBORw0KGgo="
PARTS: dict[str, tuple[bytes, int]] = {
    "an image within": (json.dumps({"content_parts": [{"url": PIXELS}]}).encode(), 200),
    "none": (b'{"stop": ["\\u00e9"]}', 200),
    "an address": (json.dumps({"content_parts": [{"url": PIXELS}, {"url": "http://a.example/"}]}).encode(), 403),
    "a file": (b'{"content_parts": [{"url": "file:///etc/passwd"}]}', 403),
    "a known image": (b'{"content_parts": [{"uuid": "a"}]}', 403),
    "another spelling": (b'{"content\\u005fparts": [{"url": "http://a.example/"}]}', 403),
}


@pytest.mark.parametrize("name", PARTS)
def test_images_come_within_a_request_alone(name: str, guard: Guard, app: App) -> None:
    body, status = PARTS[name]
    assert ask(guard, "POST", "/inference/v1/generate", "one", content=body).status_code == status
    assert bool(app.reached) == (status == 200)


@pytest.mark.usefixtures("one")
def test_long_and_broken_requests_are_refused(guard: Guard, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "_MAX_BODY", 2**20)
    assert ask(guard, "POST", "/update_weights", "one", content=b"{").status_code == 400
    for path in ("/update_weights", "/v1/completions", "/inference/v1/generate"):  # what samples, too
        assert ask(guard, "POST", path, "one", content=b" " * 2**21).status_code == 413
    assert not app.reached
    assert not app.reached


ENDED = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@pytest.mark.parametrize("status", [200, 500], ids=["in a stream", "as an answer"])
def test_the_end_of_the_engine_is_told_with_the_place_of_the_log(
    status: int, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"error": {"message": ENDED}}).encode()

    async def ended(scope: Any, receive: Any, send: Any) -> None:
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), *([length] if status == 500 else [])]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    monkeypatch.setenv(KEY_VARIABLE, TOKEN)
    monkeypatch.setenv(guarding.LOG_VARIABLE, "/tmp/a.log")
    response = ask(Guard(ended), "GET", "/health")
    assert response.status_code == status and "content-length" not in response.headers
    said = "EngineCore encountered an issue. The cause is in its log /tmp/a.log."
    assert response.json()["error"]["message"] == said


SERVER = """
import asyncio, multiprocessing, os, sys, time
from lit_grpo.rollout.vllm.guard import Guard

async def app(scope, receive, send):
    await asyncio.sleep(600)  # as vLLM does for connections that are open

if __name__ == "__main__":
    engine = multiprocessing.get_context("spawn").Process(target=eval, args=[sys.argv[1]])
    engine.start()
    asyncio.run(Guard(app)({"type": "lifespan"}, None, None))
"""


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("__import__('os').kill(__import__('os').getpid(), 9)", "RuntimeError: its engine was ended by SIGKILL, as by"),
        pytest.param("__import__('os')._exit(3)", "Its engine has ended with code 3.", marks=pytest.mark.nightly),
    ],
    ids=["killed", "ended"],
)
def test_a_server_ends_with_its_engine_though_connections_are_open(engine: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py"), engine]
    path = str(Path(__file__).parents[1])
    environment = os.environ | {KEY_VARIABLE: TOKEN, "PYTHONPATH": path}
    done = run(command, timeout=120, env=environment)
    assert done.returncode == 1 and done.stdout.startswith(said), done
