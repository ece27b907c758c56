"""A chat completions server on loopback that judges as it is told, or fails as it is told."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """An answer in place of the usual one; ``body`` is sent as it is, or as JSON if it is no text."""

    status: int = 200
    body: Any = ""
    headers: tuple[tuple[str, str], ...] = ()
    promised_bytes: int = 0
    """Bytes that the header promises beyond those that come before the connection is closed."""


class JudgeServer(ThreadingHTTPServer):
    """Answers with the text that ``answer`` makes of a request's body, after ``delay_s``; first come the ``faults``.

    ``seen`` has path, Authorization header and body of each request, ``tokens`` are reported as its usage.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answer: Callable[[dict[str, Any]], str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.faults, self.delay_s = answer, list[Fault](), 0.0
        self.seen: list[tuple[str, str | None, dict[str, Any]]] = []
        self.usage: Any = {"prompt_tokens": 100, "completion_tokens": 10}
        self.finish_reason = "stop"
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The JSON documents of the requests so far."""
        return [document(body) for _, _, body in self.seen]


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer  # pyrefly: ignore[bad-override-mutable-attribute]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        fault = self.server.faults.pop(0) if self.server.faults else Fault(body=self._judged(body))
        time.sleep(self.server.delay_s)
        data = (fault.body if isinstance(fault.body, str) else json.dumps(fault.body)).encode()
        with contextlib.suppress(OSError):  # the client has not waited
            self.send_response(fault.status)
            for name, value in fault.headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) + fault.promised_bytes))
            self.end_headers()
            self.wfile.write(data)

    def _judged(self, body: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.server.answer(body)}
        choices = [{"message": message, "finish_reason": self.server.finish_reason}]
        return {"choices": choices, "usage": self.server.usage}

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


@contextmanager
def judge_server(answer: Callable[[dict[str, Any]], str]) -> Iterator[JudgeServer]:
    """Run a :class:`JudgeServer`."""
    with JudgeServer(answer) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


def document(body: dict[str, Any]) -> dict[str, Any]:
    """Return what a relative or rubric judge is shown."""
    return json.loads(body["messages"][-1]["content"])


def scores_by(score: Callable[[int, Any], Any]) -> Callable[[dict[str, Any]], str]:
    """Answer a relative judge's request with the score of each place and completion."""

    def answer(body: dict[str, Any]) -> str:
        shown = document(body)["completions"]
        return json.dumps({"scores": {each["id"]: score(n, each["completion"]) for n, each in enumerate(shown)}})

    return answer


def met_by(is_met: Callable[[str, Any], Any]) -> Callable[[dict[str, Any]], str]:
    """Answer a rubric judge's request for each criterion and the completion."""

    def answer(body: dict[str, Any]) -> str:
        shown = document(body)
        return json.dumps(
            {"met": {each["id"]: is_met(each["criterion"], shown["completion"]) for each in shown["criteria"]}}
        )

    return answer
