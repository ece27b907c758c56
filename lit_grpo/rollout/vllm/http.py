"""What we say to a vLLM server over HTTP, in the thread of an event loop, and the completions that stream in."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import httpx

from lit_grpo.rollout.vllm.guard import LEASE_S, OWNER_PATH, RUN_HEADER, STATE_HEADER, TOKEN_VARIABLE, counts

_LOOK_S = 5.0  # in which a server that is well answers
_BEAT_S = LEASE_S / 5
_PATIENCE = 5  # time-outs without progress, of a server that says that it is well
_T = TypeVar("_T")


class ServerError(RuntimeError):
    """A server does not answer, or answers with an error; ``hung`` where it did nothing for too long."""

    hung = False


@dataclass(frozen=True)
class Chunk:
    """Some tokens of a completion, and why it ended where these are its last."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


class EventLoop:
    """Runs coroutines in a thread of its own, from the first of them until it is closed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closes: list[Callable[[], Coroutine[Any, Any, None]]] = []

    def at_end(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have something closed when the thread ends, which leaves no open connection behind."""
        self._closes.append(close)

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine; its result comes later."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run, args=(self._loop, self._closes), name="vllm-servers", daemon=True
            )
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine and wait for its result."""
        return self.begin(coroutine).result()

    def close(self) -> None:
        """Give up what still runs, close what was opened, and end the thread."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        self._closes = []
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10.0)


def _run(loop: asyncio.AbstractEventLoop, closes: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.run_until_complete(_end(closes))
    loop.close()


async def _end(closes: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Cancel what still runs, and close what was opened."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(close() for close in closes), return_exceptions=True)
    await asyncio.sleep(0)  # a transport closes in the turn after that in which it is told to


class ServerClient:
    """One server behind a :class:`~lit_grpo.rollout.vllm.guard.Guard`, taken for one run.

    The server's state, as it was after our last change, is compared with that of each answer: tokens that were sampled
    after somebody else's change, or by a server that began anew, are an error and not taken.

    Args:
        url: Where it is.
        token: What it lets us in with.
        run: What it is taken for.
        timeout_s: Seconds without progress after which it is asked whether it is well.
        loop: What runs the requests.

    Attributes:
        model: What it calls the weights to sample with.
    """

    def __init__(self, url: str, token: str, run: str, timeout_s: float, loop: EventLoop) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.model = ""
        self._loop = loop
        self._state = ""
        self._num_heard = 0  # answers and lines
        self._beats: Future[None] | None = None
        # A server closes connections that have been idle for five seconds, which is no error of its.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=1.0)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}", RUN_HEADER: run},
            timeout=httpx.Timeout(None, connect=timeout_s),
            limits=limits,
            trust_env=False,  # no proxy in between
        )
        loop.at_end(self._http.aclose)

    # ---- whose it is ------------------------------------------------------------------------------

    def check_guarded(self) -> None:
        """Check that the server asks for a token, before it is told ours.

        Raises:
            ValueError: It does not, or it does not answer.
        """
        try:
            response = httpx.get(f"{self.url}{OWNER_PATH}", timeout=self.timeout_s, trust_env=False)
        except httpx.HTTPError as error:
            raise ValueError(
                f"The vLLM server at {self.url} does not answer: {_named(error)}. Start it with python -m lit_grpo "
                "serve, or correct urls."
            ) from error
        guarded = STATE_HEADER in response.headers
        if guarded and response.status_code != 401:
            raise ValueError(f"The vLLM server at {self.url} does not let us in: {_message(response)}")
        if not guarded:
            raise ValueError(
                f"The server at {self.url} does not ask for a token, so anybody who reaches it could exchange its "
                "weights; start it with python -m lit_grpo serve, which puts a guard before it."
            )

    def take(self) -> None:
        """Take the server for our run; where the run that has it no longer speaks, wait until it may be taken.

        Raises:
            ServerError: It belongs to another run that goes on, or does not let us in.
        """
        deadline = time.monotonic() + LEASE_S + _BEAT_S
        heard_s = 0.0
        while True:
            response = self._loop.run(self.patiently(self._request("POST", OWNER_PATH)))
            if response.status_code != 409 or time.monotonic() > deadline:
                break
            silent_s = float(response.json()["heard_s"])
            if silent_s < heard_s:  # a word since the last time: that run goes on
                break
            heard_s = silent_s
            time.sleep(0.5)
        self._check(response, OWNER_PATH)
        self._state = response.headers[STATE_HEADER]
        if self._beats is None:
            self._beats = self._loop.begin(self._beat())

    def is_ours(self) -> bool:
        """Whether it is still ours, and as we left it."""
        try:
            response = self._loop.run(self._request("GET", OWNER_PATH, timeout=_LOOK_S))
        except ServerError:
            return False
        return response.is_success and response.json()["owned"] and response.headers[STATE_HEADER] == self._state

    def release(self) -> None:
        """Let other runs have the server."""
        if self._beats is not None:
            self._beats.cancel()
            self._beats = None
            with suppress(ServerError):
                self._loop.run(self._request("DELETE", OWNER_PATH, timeout=_LOOK_S))

    async def _beat(self) -> None:
        """Let the server hear of the run, also while it does something else."""
        while True:
            await asyncio.sleep(_BEAT_S)
            with suppress(ServerError):
                await self._request("GET", OWNER_PATH, timeout=_LOOK_S)

    # ---- control ----------------------------------------------------------------------------------

    def answers(self, timeout_s: float = _LOOK_S) -> bool:
        """Whether the server is well, by its own account."""
        return self._loop.run(self._answers(timeout_s))

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

    def ask_workers(self, method: str, *arguments: str) -> list[Any]:
        """Return what each worker answers; numbers and truth values come as text."""
        return self.post("/collective_rpc", {"method": method, "args": list(arguments)})["results"]

    def _call(self, method: str, path: str, **options: Any) -> Any:
        response = self._loop.run(self.patiently(self._request(method, path, **options)))
        self._num_heard += 1
        if not self._follows(response, counts(method, path)):
            raise self._changed()
        self._state = response.headers[STATE_HEADER]
        self._check(response, path)
        return response.json() if "json" in response.headers.get("content-type", "") and response.content else None

    def _follows(self, response: httpx.Response, counted: bool) -> bool:
        """Whether an answer shows our own change, or none, and no other."""
        process, _, number = self._state.partition(":")
        expected = {self._state} | ({f"{process}:{int(number) + 1}"} if counted and number else set())
        return response.headers.get(STATE_HEADER) in expected

    async def _answers(self, timeout_s: float) -> bool:
        try:
            return (await self._request("GET", "/health", timeout=timeout_s)).is_success
        except ServerError:
            return False

    async def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return await self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ServerError(f"The vLLM server at {self.url} does not answer {path}: {_named(error)}.") from error

    def _check(self, response: httpx.Response, path: str) -> None:
        if response.status_code == 401:
            raise ServerError(
                f"The vLLM server at {self.url} does not take this run's token; set {TOKEN_VARIABLE} to the one that "
                "python -m lit_grpo serve has named."
            )
        if not response.is_success:
            raise ServerError(f"The vLLM server at {self.url} answers {path} with: {_message(response)}")

    def _changed(self) -> ServerError:
        return ServerError(f"The vLLM server at {self.url} began anew, or somebody else has changed its weights.")

    async def patiently(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for what the server does as long as it makes progress with anything, or says that it is well.

        Raises:
            ServerError: It has hung: it does not answer, or has made no progress for several time-outs.
        """
        task = asyncio.ensure_future(work)
        num_silent, num_heard = 0, self._num_heard
        try:
            while not (await asyncio.wait({task}, timeout=self.timeout_s))[0]:
                num_silent = num_silent + 1 if num_heard == self._num_heard else 0
                num_heard = self._num_heard
                if num_silent and (num_silent >= _PATIENCE or not await self._answers(self.timeout_s)):
                    failure = ServerError(
                        f"The vLLM server at {self.url} has hung: {num_silent} time-outs of {self.timeout_s:g} s "
                        "without progress."
                    )
                    failure.hung = True
                    raise failure
            return task.result()
        finally:
            task.cancel()

    # ---- completions ------------------------------------------------------------------------------

    async def stream(self, prompt: list[int], fields: Mapping[str, Any]) -> AsyncIterator[Chunk]:
        """Sample a completion of ``prompt``, chunk by chunk.

        Raises:
            ServerError: The server fails, or its weights are others than ours.
            ValueError: It refuses what it is asked.
        """
        body = {**fields, "model": self.model, "prompt": prompt, "stream": True, "return_token_ids": True}
        state = ""
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.headers.get(STATE_HEADER) != self._state:
                    raise self._changed()
                if not response.is_success:
                    await response.aread()
                    error = ValueError if response.is_client_error else ServerError
                    raise error(f"The vLLM server at {self.url} refuses a prompt: {_message(response)}")
                async for line in response.aiter_lines():
                    self._num_heard += 1
                    if line.startswith(": "):
                        state = line.removeprefix(": ")
                    elif line.startswith("data: {"):
                        if state != self._state:
                            raise self._changed()
                        yield self._chunk(json.loads(line[6:]))
        except httpx.HTTPError as error:
            raise ServerError(f"The vLLM server at {self.url} broke off: {_named(error)}.") from error

    def _chunk(self, event: Mapping[str, Any]) -> Chunk:
        if "choices" not in event:
            raise ServerError(f"The vLLM server at {self.url} broke off: {json.dumps(event)[:300]}")
        choice = event["choices"][0]
        if choice["finish_reason"] not in (None, "stop", "length"):
            raise ServerError(f"The vLLM server at {self.url} broke off a completion: {choice['finish_reason']}.")
        logprobs = (choice["logprobs"] or {}).get("token_logprobs") or []
        return Chunk(choice["token_ids"] or [], logprobs, choice["finish_reason"])


@dataclass(frozen=True)
class Arrival:
    """A chunk of what was asked for with a ticket, or the failure of its server."""

    ticket: int
    content: Chunk | ServerError


class StreamPump:
    """Takes in completions from servers. Each is a task in the event loop, known by its ticket."""

    def __init__(self, loop: EventLoop) -> None:
        self._arrivals: SimpleQueue[Arrival | BaseException] = SimpleQueue()
        self._tasks: dict[int, Future[None]] = {}
        self._loop = loop

    def begin(self, ticket: int, client: ServerClient, prompt: list[int], fields: Mapping[str, Any]) -> None:
        """Ask a server for a completion."""
        task = self._tasks[ticket] = self._loop.begin(self._pump(ticket, client, prompt, fields))
        task.add_done_callback(lambda _: self._tasks.pop(ticket, None))

    async def _pump(self, ticket: int, client: ServerClient, prompt: list[int], fields: Mapping[str, Any]) -> None:
        try:
            await client.patiently(self._read(ticket, client, prompt, fields))
        except ServerError as error:
            self._arrivals.put(Arrival(ticket, error))
        except Exception as error:  # what is no server's fault is the caller's to see
            self._arrivals.put(error)

    async def _read(self, ticket: int, client: ServerClient, prompt: list[int], fields: Mapping[str, Any]) -> None:
        finished = False
        async for chunk in client.stream(prompt, fields):
            self._arrivals.put(Arrival(ticket, chunk))
            finished = chunk.finish_reason is not None
        if not finished:
            raise ServerError(f"The vLLM server at {client.url} ended a completion without a reason.")

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

    def close(self) -> None:
        """Give everything up."""
        for ticket in list(self._tasks):
            self.cancel(ticket)


def _named(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__} {error}".strip()


def _message(response: httpx.Response) -> str:
    return f"{response.status_code} {response.text[:500]}"
