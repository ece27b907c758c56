"""Completions of several servers, streaming in a thread of their own into one queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from lit_grpo.rollout.vllm_client import Chunk, ServerClient, ServerError

if TYPE_CHECKING:
    from collections.abc import Mapping

Key = tuple[str, int, int]


@dataclass(frozen=True)
class Arrival:
    """A chunk of a completion, or the failure of its server."""

    key: Key
    attempt: int
    content: Chunk | ServerError


class StreamPump:
    """Runs an event loop in a thread. Each attempt at a completion is a task in it."""

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[Arrival | BaseException] = SimpleQueue()
        self._tasks: dict[Key, Future[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-streams", daemon=True)
        self._thread.start()

    def begin(
        self, key: Key, attempt: int, client: ServerClient, prompt: Sequence[int], fields: Mapping[str, Any]
    ) -> None:
        """Ask a server for a completion."""
        self._tasks[key] = self._run(self._pump(key, attempt, client, list(prompt), fields))

    async def _pump(
        self, key: Key, attempt: int, client: ServerClient, prompt: list[int], fields: Mapping[str, Any]
    ) -> None:
        try:
            finished = False
            async for chunk in client.stream(prompt, fields):
                self._arrivals.put(Arrival(key, attempt, chunk))
                finished = chunk.finish_reason is not None
            if not finished:
                raise ServerError(f"The vLLM server at {client.url} ended a completion without a reason.")
        except ServerError as error:
            self._arrivals.put(Arrival(key, attempt, error))
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

    def cancel(self, key: Key) -> None:
        """Give a completion up; its server sees the connection close, and stops."""
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    def forget(self, key: Key) -> None:
        """Note that a completion has ended."""
        self._tasks.pop(key, None)

    def close(self, clients: Sequence[ServerClient]) -> None:
        """Cancel everything, close the clients' connections and end the thread."""
        for key in list(self._tasks):
            self.cancel(key)
        for client in clients:
            self._run(client.close_streams()).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
