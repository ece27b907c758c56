"""The guard before a vLLM server: who is let in, whose the server is, and which files it reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lit_grpo.rollout.vllm import guard as guarding
from lit_grpo.rollout.vllm.guard import OWNER_PATH, RUN_HEADER, STATE_HEADER, TOKEN_VARIABLE, Guard, counts
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
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return Guard(app)


def ask(guard: Guard, method: str, path: str, run: str = "", **options: Any) -> httpx.Response:
    """Send a request as a client with the token does, unless ``options`` say otherwise."""
    headers = {"Authorization": f"Bearer {TOKEN}", RUN_HEADER: run} | options.pop("headers", {})

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=guard)  # pyright: ignore[reportArgumentType]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            request = client.build_request(method, path, headers=headers, **options)
            for name in [name for name, value in headers.items() if value is None]:
                del request.headers[name]
            return await client.send(request)

    return asyncio.run(send())


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
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setenv(guarding.HOST_VARIABLE, "gpu1.cluster")
    assert ask(Guard(app), "GET", "/health", headers={"Host": host}).status_code == 200


def test_a_page_in_a_browser_is_refused_even_with_the_token(guard: Guard, app: App) -> None:
    headers = {"Origin": "https://evil.example", "Content-Type": "text/plain"}  # needs no leave of the server's
    content = json.dumps({"update_info": {"path": "/tmp/x.safetensors"}})
    for origin in ("https://evil.example", "null", "http://127.0.0.1:8000"):
        response = ask(guard, "POST", "/update_weights", headers=headers | {"Origin": origin}, content=content)
        assert response.status_code == 403 and "page in a browser" in response.json()["error"]
    assert not app.reached


def test_a_server_without_a_token_does_not_begin(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="LIT_GRPO_SERVER_TOKEN is not set; the server would answer anybody"):
        Guard(app)


def test_websockets_are_closed(guard: Guard, app: App) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard({"type": "websocket", "path": "/v1/realtime", "headers": []}, send, send))  # pyright: ignore
    assert sent == [{"type": "websocket.close", "code": 1008}] and not app.reached


def test_the_first_run_owns_the_server_until_it_gives_it_back(guard: Guard, app: App) -> None:
    assert ask(guard, "POST", "/pause", "one").status_code == 409  # it has not taken it
    assert ask(guard, "POST", OWNER_PATH, "one").json()["owned"]
    assert ask(guard, "POST", "/start_weight_update", "one").status_code == 200
    for path in ("/start_weight_update", "/pause", "/v1/load_lora_adapter", "/sleep", "/anything", OWNER_PATH):
        for other in ("two", ""):
            response = ask(guard, "POST", path, other)
            assert response.status_code == 409
            assert other == "" or "belongs to another run" in response.json()["error"]
    assert not ask(guard, "DELETE", OWNER_PATH, "two").json()["owned"]
    assert ask(guard, "POST", "/v1/completions", "two", json={}).status_code == 200  # sampling changes nothing
    assert ask(guard, "POST", "/start_weight_update", "one").status_code == 200
    ask(guard, "DELETE", OWNER_PATH, "one")
    assert ask(guard, "POST", OWNER_PATH, "two").json()["owned"]
    assert ask(guard, "POST", "/start_weight_update", "one").status_code == 409
    assert [path for path, _ in app.reached] == ["/start_weight_update", "/v1/completions", "/start_weight_update"]


def test_a_run_that_is_no_longer_heard_of_loses_the_server_to_the_next(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(guarding.time, "monotonic", lambda: now)
    ask(guard, "POST", OWNER_PATH, "one")
    now += guarding.LEASE_S - 1
    assert ask(guard, "POST", OWNER_PATH, "two").json()["heard_s"] == guarding.LEASE_S - 1
    ask(guard, "GET", "/health", "one")  # whatever it asks
    now += guarding.LEASE_S - 1
    assert ask(guard, "POST", OWNER_PATH, "two").status_code == 409
    now += 2
    assert ask(guard, "POST", "/pause", "two").status_code == 409  # without taking it, nobody
    assert ask(guard, "POST", "/pause", "one").status_code == 200  # nobody else wanted it
    now += guarding.LEASE_S + 1
    assert ask(guard, "POST", OWNER_PATH, "two").status_code == 200
    assert ask(guard, "POST", "/pause", "one").status_code == 409


def test_each_answer_and_each_chunk_tells_how_often_the_server_was_changed(guard: Guard) -> None:
    states = [ask(guard, "POST", OWNER_PATH, "one").headers[STATE_HEADER]]
    for path in ("/pause", "/update_weight_version", "/resume", "/collective_rpc_", "/v1/unload_lora_adapter"):
        states.append(ask(guard, "POST", path, "one").headers[STATE_HEADER])
        states.append(ask(guard, "POST", path, "two").headers[STATE_HEADER])
    process = states[0].partition(":")[0]
    assert [state.removeprefix(f"{process}:") for state in states] == list("00011112233")
    response = ask(guard, "POST", "/v1/completions", json={})
    assert response.headers[STATE_HEADER] == f"{process}:3"
    assert response.text == f": {process}:3\n\ndata: {{1}}\n\n: {process}:3\n\ndata: {{2}}\n\n"


def test_an_error_carries_the_state_too(guard: Guard, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: Any) -> None:
        raise ValueError("another model is served")

    monkeypatch.setattr(guard, "_app", failing)
    transport = httpx.ASGITransport(app=guard, raise_app_exceptions=False)  # pyright: ignore[reportArgumentType]

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/weight_info", headers={"Authorization": f"Bearer {TOKEN}"})

    response = asyncio.run(send())
    assert response.status_code == 500 and response.json() == {"error": "ValueError: another model is served"}
    assert response.headers[STATE_HEADER] == guard.state


def test_what_counts_as_a_change_is_whatever_is_not_known_to_change_nothing() -> None:
    assert not counts("GET", "/weight_info") and not counts("POST", "/tokenize")
    assert not counts("POST", "/pause") and not counts("POST", "/v1/completions")
    assert counts("POST", "/weight_checker") and counts("POST", "/reset_prefix_cache") and counts("PUT", "/new_route")


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Path]:
    with weights_folder(str(tmp_path)) as folder:
        yield folder


def test_weights_come_from_private_folders_of_this_user_alone(guard: Guard, app: App, private: Path) -> None:
    ask(guard, "POST", OWNER_PATH, "one")
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
        response = ask(guard, "POST", "/update_weights", "one", json={"update_info": {"path": str(path)}})
        assert response.status_code == 403, path
    for other in ("/etc/cron.d/x", str(outside), "~/.ssh/x"):
        info = {"path": str(weights), "more": [{"other": other}]}
        assert ask(guard, "POST", "/update_weights", "one", json={"update_info": info}).status_code == 403
    assert not app.reached
    info = {"path": str(weights), "keeps": True}
    assert ask(guard, "POST", "/update_weights", "one", json={"update_info": info}).status_code == 200
    assert json.loads(app.reached[0][1]) == {"update_info": info}


def test_adapters_come_as_safetensors_from_private_folders_alone(guard: Guard, app: App, private: Path) -> None:
    ask(guard, "POST", OWNER_PATH, "one")
    (private / "adapter_model.bin").write_bytes(b"")  # which a loader would unpickle

    def load(path: str) -> httpx.Response:
        return ask(guard, "POST", "/v1/load_lora_adapter", "one", json={"lora_name": "a", "lora_path": path})

    (private.parent / "adapter_model.safetensors").write_bytes(b"")
    assert [load(path).status_code for path in (str(private), f"{private}/..", "owner/name", "/tmp")] == [403] * 4
    assert not app.reached
    (private / "adapter_model.safetensors").write_bytes(b"")
    assert load(str(private)).status_code == 200


def test_long_and_broken_requests_are_refused(guard: Guard, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "_MAX_BODY", 2**20)
    ask(guard, "POST", OWNER_PATH, "one")
    assert ask(guard, "POST", "/update_weights", "one", content=b"{").status_code == 400
    for path in ("/update_weights", "/v1/completions", "/inference/v1/generate"):  # what samples, too
        assert ask(guard, "POST", path, "one", content=b" " * 2**21).status_code == 413
    assert not app.reached
    assert not app.reached
