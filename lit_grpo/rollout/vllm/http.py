"""What we say to a vLLM server over HTTP, and the thread in which completions stream in."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import httpx


class ServerError(RuntimeError):
    """A server does not answer, or answers with an error; ``hung`` where it said nothing for too long."""

    hung = False


@dataclass(frozen=True)
class Chunk:
    """Some tokens of a completion, and why it ended where these are its last."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


class ServerClient:
    """One server. Control goes over a connection of its own; completions stream in an event loop.

    Args:
        url: Where it is.
        timeout_s: Seconds without an answer, or without a token of a completion, after which it counts as hung.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._control = httpx.Client(base_url=self.url, timeout=timeout_s)
        self._streams: httpx.AsyncClient | None = None
        self.model = ""

    def answers(self) -> bool:
        """Whether the server is well, by its own account."""
        try:
            self.get("/health")
        except ServerError:
            return False
        return True

    def get(self, path: str, **query: Any) -> Any:
        """Ask for something; return the decoded answer, ``None`` where it is not JSON."""
        return self._call("GET", path, params=query)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Tell or ask something."""
        return self._call("POST", path, json=body)

    def score(self, sequences: Sequence[Sequence[int]], salt: str) -> list[list[float]]:
        """Return the log-probs of all tokens after the first of each sequence."""
        body = {"model": self.model, "prompt": sequences, "max_tokens": 1, "prompt_logprobs": 0, "cache_salt": salt}
        choices = sorted(self.post("/v1/completions", body)["choices"], key=lambda choice: choice["index"])
        return [
            [at[str(token)]["logprob"] for token, at in zip(token_ids[1:], choice["prompt_logprobs"][1:], strict=True)]
            for token_ids, choice in zip(sequences, choices, strict=True)
        ]

    def _call(self, method: str, path: str, **options: Any) -> Any:
        try:
            response = self._control.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ServerError(f"The vLLM server at {self.url} does not answer {path}: {_named(error)}.") from error
        if not response.is_success:
            raise ServerError(f"The vLLM server at {self.url} answers {path} with: {_message(response)}")
        return response.json() if "json" in response.headers.get("content-type", "") and response.content else None

    async def stream(self, prompt: list[int], fields: Mapping[str, Any]) -> AsyncIterator[Chunk]:
        """Sample a completion of ``prompt``, chunk by chunk.

        Raises:
            ServerError: The server fails.
            ValueError: It refuses what it is asked.
        """
        if self._streams is None:
            # A server closes connections that have been idle for five seconds, which is no error of its.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=1.0)
            self._streams = httpx.AsyncClient(base_url=self.url, timeout=self.timeout_s, limits=limits)
        body = {**fields, "model": self.model, "prompt": prompt, "stream": True, "return_token_ids": True}
        try:
            async with self._streams.stream("POST", "/v1/completions", json=body) as response:
                if not response.is_success:
                    await response.aread()
                    error = ValueError if response.is_client_error else ServerError
                    raise error(f"The vLLM server at {self.url} refuses a prompt: {_message(response)}")
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        yield self._chunk(json.loads(line[6:]))
        except httpx.HTTPError as error:
            failure = ServerError(f"The vLLM server at {self.url} broke off: {_named(error)}.")
            failure.hung = isinstance(error, httpx.ReadTimeout)
            raise failure from error

    def _chunk(self, event: Mapping[str, Any]) -> Chunk:
        if "choices" not in event:
            raise ServerError(f"The vLLM server at {self.url} broke off: {json.dumps(event)[:300]}")
        choice = event["choices"][0]
        if choice["finish_reason"] not in (None, "stop", "length"):
            raise ServerError(f"The vLLM server at {self.url} broke off a completion: {choice['finish_reason']}.")
        logprobs = (choice["logprobs"] or {}).get("token_logprobs") or []
        return Chunk(choice["token_ids"] or [], logprobs, choice["finish_reason"])

    async def close_streams(self) -> None:
        """Close the connections of completions."""
        if self._streams is not None:
            await self._streams.aclose()
            self._streams = None

    def close(self) -> None:
        """Close the connection for control."""
        self._control.close()


@dataclass(frozen=True)
class Arrival:
    """A chunk of what was asked for with a ticket, or the failure of its server."""

    ticket: int
    content: Chunk | ServerError


class StreamPump:
    """Runs an event loop in a thread. Each request to a server is a task in it, known by its ticket."""

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[Arrival | BaseException] = SimpleQueue()
        self._tasks: dict[int, Future[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-streams", daemon=True)
        self._thread.start()

    def begin(self, ticket: int, client: ServerClient, prompt: list[int], fields: Mapping[str, Any]) -> None:
        """Ask a server for a completion."""
        task = self._tasks[ticket] = self._run(self._pump(ticket, client, prompt, fields))
        task.add_done_callback(lambda _: self._tasks.pop(ticket, None))

    async def _pump(self, ticket: int, client: ServerClient, prompt: list[int], fields: Mapping[str, Any]) -> None:
        try:
            finished = False
            async for chunk in client.stream(prompt, fields):
                self._arrivals.put(Arrival(ticket, chunk))
                finished = chunk.finish_reason is not None
            if not finished:
                raise ServerError(f"The vLLM server at {client.url} ended a completion without a reason.")
        except ServerError as error:
            self._arrivals.put(Arrival(ticket, error))
        except Exception as error:  # what is no server's fault is the caller's to see
            self._arrivals.put(error)

    def arrivals(self, timeout_s: float) -> list[Arrival]:
        """Return what has come in, waiting for something at most ``timeout_s``."""
        arrived: list[Arrival] = []
        try:
            item = self._arrivals.get(timeout=timeout_s)
            while True:
                if isinstance(item, BaseException):
                    raise item
                arrived.append(item)
                item = self._arrivals.get_nowait()
        except Empty:
            return arrived

    def cancel(self, ticket: int) -> None:
        """Give a completion up, where it has not ended; its server sees the connection close, and stops."""
        task = self._tasks.pop(ticket, None)
        if task is not None:
            task.cancel()

    def close(self, clients: Sequence[ServerClient]) -> None:
        """Cancel everything, close the clients' connections and end the thread."""
        for ticket in list(self._tasks):
            self.cancel(ticket)
        for client in clients:
            self._run(client.close_streams()).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


def _named(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__} {error}".strip()


def _message(response: httpx.Response) -> str:
    return f"{response.status_code} {response.text[:500]}"
