"""The guard of a vLLM server: who may talk to it, which run owns it, and that it ends with its engine.

vLLM's own ``--api-key`` guards ``/v1``, ``/v2``, ``/inference`` and ``/cohere`` alone, and not the routes
that exchange weights. vLLM calls :class:`Guard` before all of its routes (``--middleware``).
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from hmac import compare_digest
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import unquote

import httpx

from lit_grpo.process.files import is_private
from lit_grpo.rollout.weights.files import WEIGHTS_PREFIX

GUARD = "lit_grpo.rollout.vllm.guard.Guard"
TOKEN_VARIABLE = "LIT_GRPO_SERVER_TOKEN"
KEY_VARIABLE = "VLLM_API_KEY"  # what vLLM reads --api-key from, without showing it on a command line
HOST_VARIABLE = "LIT_GRPO_SERVER_HOST"  # the name of the address that it listens on
LOG_VARIABLE = "LIT_GRPO_SERVER_LOG"  # the path of the file that its output goes to
RUN_HEADER, NAME_HEADER, PROCESS_HEADER = "lit-grpo-run", "lit-grpo-name", "lit-grpo-process"
OWNER_PATH = "/lit_grpo/owner"

_SAMPLING = {"/v1/completions", "/inference/v1/generate", "/tokenize", "/detokenize"}  # these change nothing
_PATHS = ("source", "folder", "lora_path")
_MAX_BODY = 2**26
_LOOK_S = 0.5  # between two looks at the engine
_LAST_WORDS_S = 1.0  # for answers that say that it has ended
_ABOVE = b"See stack trace (above) for the root cause."  # what vLLM answers when its engine has ended

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Refusal(Exception):
    """A request that goes no further: the HTTP status, and why in one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.body = status, {"error": sentence}


class Guard:
    """Lets through requests with the token of the environment, and changes only from the run that owns the server.

    A request names its run in a header. A run owns the server as long as its ``POST`` to ``OWNER_PATH`` is being
    answered: until it closes that connection, as the end of its process does, or asks to (``DELETE``). Requests that
    neither sample nor look are for the owner only. Each answer carries a name of this process.

    Args:
        app: vLLM's server, as an ASGI application.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        token = os.environ.get(KEY_VARIABLE, "")
        if not token:
            raise ValueError(f"{KEY_VARIABLE} is not set; the server would answer anybody.")
        self._app = app
        self._token = f"Bearer {token}".encode()
        self._names = {"localhost", socket.gethostname(), os.environ.get(HOST_VARIABLE, "localhost")}
        self._in_log = f"The cause is in its log {os.environ.get(LOG_VARIABLE, '')}.".encode()
        self._process = (PROCESS_HEADER.encode(), token_hex(8).encode())
        self._owner, self._owner_name, self._holder = "", "", object()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        if scope["type"] == "lifespan":
            self._watch = asyncio.create_task(_end_with_engines())
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            run, name = self._admit(scope)
            if scope["path"] == OWNER_PATH:
                await self._own(scope["method"], run, name, receive, send)
                return
            body, receive = await _whole_body(receive)
            if scope["method"] not in ("GET", "HEAD") and scope["path"] not in _SAMPLING:
                self._check_owner(run)
                _check_body(scope["path"], body)
            elif b"content_parts" in body or b"\\u" in body:  # by which JSON may spell it
                _check_images(body)
        except Refusal as refusal:
            await self._answer(send, refusal.status, refusal.body)
            return
        await self._hand_on(scope, receive, send)

    # ---- who --------------------------------------------------------------------------------------

    def _admit(self, scope: Message) -> tuple[str, str]:
        """Return the run that asks, empty where it does not say so, and its name for people; refuse all others."""
        headers = httpx.Headers(scope["headers"])
        host, token = headers.get_list("host"), headers.get_list("authorization")
        if len(host) != 1 or not self._is_own(host[0]):
            raise Refusal(403, "The Host header names another machine; use the server's address or own name.")
        if "origin" in headers:
            raise Refusal(403, "A page in a browser asks; this server answers training runs alone.")
        if len(token) != 1 or not compare_digest(token[0].encode(), self._token):
            raise Refusal(401, f"The token is missing or wrong; give the server's in {TOKEN_VARIABLE}.")
        name = unquote(headers.get(NAME_HEADER, "")[:300])
        return headers.get(RUN_HEADER, ""), "".join(filter(str.isprintable, name))

    def _is_own(self, host: str) -> bool:
        """Return whether a Host header is an address, which no name server can redirect, or a name of this machine."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name.lower() in {known.lower() for known in self._names}
        return True

    # ---- whose ------------------------------------------------------------------------------------

    async def _own(self, method: str, run: str, name: str, receive: Receive, send: Send) -> None:
        """Give the server to a run as long as it listens (``POST``), take it back (``DELETE``), or tell whose it is."""
        if method == "DELETE" and run == self._owner:
            self._owner = ""
        if method != "POST":
            await self._answer(send, 200, {"pid": os.getpid(), "owned": bool(run) and run == self._owner})
            return
        self._check_owner(run, takes=True)
        holder = object()
        self._owner, self._owner_name, self._holder = run, name, holder
        try:
            await self._begin(send, 200)
            await send({"type": "http.response.body", "body": b"{}\n", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                continue
        finally:
            if self._holder is holder:
                self._owner = ""

    def _check_owner(self, run: str, takes: bool = False) -> None:
        if not run:
            raise Refusal(409, f"A request that changes the server must name its run in the header {RUN_HEADER}.")
        if self._owner not in ("", run):
            named = f" ({self._owner_name})" if self._owner_name else ""
            raise Refusal(
                409,
                f"The server belongs to another run{named}; end that run, or start a server of your own with python -m "
                "lit_grpo serve --port PORT.",
            )
        if not takes and self._owner != run:
            raise Refusal(409, "The server belongs to no run yet; take it first.")

    # ---- what -------------------------------------------------------------------------------------

    async def _hand_on(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let vLLM answer, with the name of this process added, and the place of its log where it tells of errors."""
        started = False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started, fails = True, message["status"] >= 500
                headers = [pair for pair in message.get("headers", []) if not (fails and pair[0] == b"content-length")]
                message = message | {"headers": [*headers, self._process]}
            elif _ABOVE in message.get("body", b""):
                message = message | {"body": message["body"].replace(_ABOVE, self._in_log)}
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:
            if not started:  # an answer by vLLM would not carry the name
                await self._answer(send, 500, {"error": f"{type(error).__name__}: {error}"})
            raise

    async def _answer(self, send: Send, status: int, content: Mapping[str, Any]) -> None:
        await self._begin(send, status)
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})

    async def _begin(self, send: Send, status: int) -> None:
        headers = [(b"content-type", b"application/json"), self._process]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": headers})


async def _end_with_engines() -> None:
    """End this process soon after one of the engine's processes, and say why that ended.

    vLLM would wait until all connections are closed, and that by which a run owns the server is closed by the run.
    """
    engines = multiprocessing.active_children()
    while not (codes := [engine.exitcode for engine in engines if engine.exitcode is not None]):
        await asyncio.sleep(_LOOK_S)
    how = f"Its engine has ended with code {codes[0]}."
    if codes[0] < 0:
        how = f"RuntimeError: its engine was ended by {signal.Signals(-codes[0]).name}, as by a system short of memory."
    print(how, flush=True)  # to the log
    await asyncio.sleep(_LAST_WORDS_S)
    os._exit(1)


async def _whole_body(receive: Receive) -> tuple[bytes, Receive]:
    """Read the body of a request, unless it is too long; return it, and what gives it again before all that follows."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > _MAX_BODY:
            raise Refusal(413, f"The request is longer than {_MAX_BODY} bytes.")
    whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def again() -> Message:
        return whole.pop() if whole else await receive()

    return bytes(body), again


def _check_body(path: str, body: bytes) -> None:
    """Refuse a request that names files or functions that are not lit_grpo's."""
    try:
        content = json.loads(body) if body else {}
    except ValueError:
        raise Refusal(400, "The request is no JSON.") from None
    if path == "/collective_rpc":
        from lit_grpo.rollout.vllm.worker import WorkerExtension  # which imports vLLM

        method = content.get("method") if isinstance(content, dict) else None
        if method not in {name for name in vars(WorkerExtension) if not name.startswith("_")}:
            raise Refusal(403, f"Workers are asked for methods of lit_grpo's extension alone, not for {method!r}.")
        if content.get("args"):
            raise Refusal(403, "Workers are asked with named arguments (kwargs) alone.")
    for name, text in _strings(content):
        if (name in _PATHS or text.startswith(("/", "~"))) and not _is_ours(Path(text)):
            raise Refusal(
                403,
                f"{text!r} is not in a private folder {WEIGHTS_PREFIX}* of the user that the server runs as; weights "
                "come from there alone.",
            )
        if name == "source" and not text.endswith(".safetensors"):
            raise Refusal(403, f"{text!r} is no .safetensors file; weights come in these alone.")
        if name == "lora_path" and not (Path(text) / "adapter_model.safetensors").is_file():
            raise Refusal(403, f"{text!r} holds no adapter_model.safetensors; adapters come in these alone.")


def _check_images(body: bytes) -> None:
    """Refuse a request for tokens whose images are not in it: nothing is downloaded, and no file is read."""
    try:
        content = json.loads(body)
    except ValueError:
        return  # of which vLLM says so
    parts = content.get("content_parts") if isinstance(content, dict) else None
    urls = [part.get("url") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    if not all(isinstance(url, str) and url.startswith("data:image/png;base64,") for url in urls):
        raise Refusal(403, "Images come within a request, as PNG in base64 (data:image/png), and from nowhere else.")


def _strings(content: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield all texts in a JSON value, each with the name of its field."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _strings(value, key)
    elif isinstance(content, list):
        for value in content:
            yield from _strings(value, name)
    elif isinstance(content, str):
        yield name, content


def _is_ours(path: Path) -> bool:
    """Return whether this is a private folder of weights, or a file in one that is not a link."""
    folder = path if path.name.startswith(WEIGHTS_PREFIX) else path.parent
    return (
        path.is_absolute()
        and ".." not in path.parts
        and folder.name.startswith(WEIGHTS_PREFIX)
        and is_private(folder)
        and not path.is_symlink()
    )
