"""A hub of models on loopback: it checks cards, creates repositories and takes commits, or fails as it is told."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import yaml

TOKEN, USER = "hf_of_a_test", "somebody"
LICENSES = ("apache-2.0", "mit", "llama3.2", "other", "unknown")
_ID = r"[\w.-]+/[\w.-]+"


class Answer(NamedTuple):
    """An answer to a request whose path begins in a certain way, in place of the usual one."""

    status: int = 200
    body: bytes = b""
    delay_s: float = 0.0
    hangs_up: bool = False


class HubServer(ThreadingHTTPServer):
    """Takes what huggingface_hub sends without Xet.

    ``repositories`` has the files of each repository by their paths, ``private`` whether it was created so, ``seen``
    the method and path of each request, ``tokens`` the tokens that came with them, and ``faults`` an answer by the
    beginning of a path.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.seen: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.faults: dict[str, Answer] = {}


class _Handler(BaseHTTPRequestHandler):
    server: HubServer  # pyrefly: ignore[bad-override-mutable-attribute]

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    do_PUT = do_POST

    def _answer(self, body: bytes) -> None:
        hub = self.server
        hub.seen.append((self.command, self.path))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        hub.tokens.add(token)
        fault = next((answer for start, answer in hub.faults.items() if self.path.startswith(start)), None)
        if fault is not None:
            time.sleep(fault.delay_s)
            if fault.hangs_up:
                self.connection.close()
                return
            status, data = fault.status, fault.body
        else:
            status, told = self._usual(self.path.partition("?")[0], body, token)
            data = b"" if told is None else json.dumps(told).encode()
        with contextlib.suppress(OSError):  # the client has not waited
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data if self.command != "HEAD" else b"")

    def _usual(self, path: str, body: bytes, token: str | None) -> tuple[int, Any]:
        hub = self.server
        if path == "/":
            return 200, None
        if path == "/api/validate-yaml":
            errors = card_errors(json.loads(body)["content"])
            told = {"errors": [{"message": error} for error in errors], "warnings": []}
            return (400 if errors else 200), told
        if self.command == "PUT":
            hub.objects[hashlib.sha256(body).hexdigest()] = body
            return 200, None
        if token != TOKEN:
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/whoami-v2":
            return 200, {"name": USER, "type": "user"}
        if path == "/api/repos/create":
            told = json.loads(body)
            name = f"{told.get('organization') or USER}/{told['name']}"
            if name in hub.repositories:
                return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}
            hub.repositories[name] = {}
            hub.private[name] = told.get("visibility") == "private" or bool(told.get("private"))
            return 200, {"url": f"{hub.url}/{name}"}
        if found := re.fullmatch(rf"/({_ID})\.git/info/lfs/objects/batch", path):
            objects = json.loads(body)["objects"]
            actions = {"upload": {"href": f"{hub.url}/objects"}}
            return 200, {"transfer": "basic", "objects": [{**one, "actions": actions} for one in objects]}
        if found := re.fullmatch(rf"/api/models/({_ID})/preupload/main", path):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".gguf", ".png")) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        if found := re.fullmatch(rf"/api/models/({_ID})/commit/main", path):
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.repositories[found[1]][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.repositories[found[1]][value["path"]] = hub.objects[value["oid"]]
            return 200, {"commitUrl": f"{hub.url}/{found[1]}/commit/0", "commitOid": "0" * 40}
        return 404, {"error": f"no {path}"}

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def card_errors(text: str) -> list[str]:
    """What the hub has been seen to refuse in a card's metadata."""
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    told = yaml.safe_load(found[1]) if found else None
    if not isinstance(told, dict):
        return ["empty or missing yaml metadata in repo card"]
    errors = []
    if told.get("license") not in (None, *LICENSES):
        errors.append(f'"license" must be one of [{", ".join(LICENSES)}]')
    if told.get("license") == "other" and not told.get("license_name"):
        errors.append('"license_name" is required when "license" is "other"')
    for name, ids in (("base_model", told.get("base_model")), ("datasets", told.get("datasets"))):
        for one in [ids] if isinstance(ids, str) else ids or []:
            if not re.fullmatch(_ID, one):
                errors.append(f'"{name}" with value "{one}" is not valid')
    if not all(isinstance(tag, str) for tag in told.get("tags", [])):
        errors.append('"tags" must be an array of strings')
    return errors


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve while the context is open."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
