"""Completions that an engine of its own decodes, as their tokens come in, and what they show of lengths."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lit_grpo.rollout.generator import Observation, StepEvents
from lit_grpo.rollout.vllm.http import Chunk, ServerClient, ServerError
from lit_grpo.types import Completion, FinishReason, Key, Prompt, Request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_LAST_TOKENS = 4


class TextFeatures:
    """The policy's input embeddings of a text, averaged over all of it and over its end, and the log-probs so far.

    Args:
        policy: Whose embeddings are used; they are read where they lie.
        points: The numbers of tokens at which a completion is looked at; 0 is its prompt.
    """

    def __init__(self, policy: PreTrainedModel, points: tuple[int, ...]) -> None:
        self._embeddings: Any = policy.get_input_embeddings()
        self._points = tuple(sorted(points))

    def of_prompts(self, prompts: Iterable[Prompt]) -> list[Observation]:
        """Observe prompts; the list is empty where they are not to be looked at."""
        prompts = list(prompts)
        if 0 not in self._points or not prompts:
            return []
        rows = [self._rows(torch.tensor([prompt.token_ids]), np.zeros((1, 1))) for prompt in prompts]
        return [Observation([(prompt.prompt_id, prompt.visit) for prompt in prompts], 0, np.concatenate(rows))]

    def reached(self, num_before: int, num_tokens: int) -> int | None:
        """Return the last point that a completion has come to since it had ``num_before`` tokens."""
        return next((point for point in reversed(self._points) if num_before < point <= num_tokens), None)

    def of_completions(self, streams: Sequence[Stream], point: int) -> Observation:
        """Observe completions as they were at ``point`` tokens."""
        rows = self._rows(
            torch.tensor([stream.token_ids[:point] for stream in streams]),
            np.array([stream.logprobs[:point] for stream in streams]),
        )
        return Observation([stream.request.key for stream in streams], point, rows)

    @torch.no_grad()
    def _rows(self, ids_BT: torch.Tensor, logprobs_BT: np.ndarray) -> np.ndarray:
        weight = self._embeddings.weight
        embedded_BTD = weight[ids_BT.to(weight.device)].float()
        pooled = torch.cat([embedded_BTD.mean(1), embedded_BTD[:, -_LAST_TOKENS:].mean(1)], 1).cpu().numpy()
        scalars = np.stack([logprobs_BT.mean(1), logprobs_BT.std(1)], 1)
        return np.concatenate([pooled, scalars], 1, dtype=np.float32)


@dataclass
class Stream:
    """One completion on its way: its tokens, their log-probs, and the policy version that sampled each."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, reason: FinishReason, text: str = "") -> Completion:
        """Return what there is of it."""
        return Completion(
            self.request,
            torch.tensor(self.token_ids, dtype=torch.int64),
            torch.tensor(self.logprobs, dtype=torch.float32),
            torch.tensor(self.versions, dtype=torch.int64),
            reason,
            text,
        )


class Streams:
    """The completions in flight, and what is told of them.

    Args:
        tokenizer: Makes a finished completion's text.
        features: What is shown of completions for the prediction of their lengths.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, features: TextFeatures) -> None:
        self._tokenizer = tokenizer
        self._features = features
        self._streams: dict[Key, Stream] = {}
        self._reached: dict[int, list[Stream]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, key: Key) -> bool:
        return key in self._streams

    @property
    def requests(self) -> list[Request]:
        """Those in flight, in the order in which they were opened."""
        return [stream.request for stream in self._streams.values()]

    @property
    def num_kv_tokens(self) -> int:
        """Prompt tokens once a group, and the tokens that have been sampled."""
        prompts = {stream.request.key[:2]: stream.request.prompt for stream in self._streams.values()}
        sampled = sum(len(stream.token_ids) for stream in self._streams.values())
        return sampled + sum(len(prompt.token_ids) for prompt in prompts.values())

    def num_tokens(self, key: Key) -> int:
        """The tokens that a completion in flight has."""
        return len(self._streams[key].token_ids)

    def open(self, request: Request) -> None:
        """Begin with a request."""
        self._streams[request.key] = Stream(request)

    def restart(self, key: Key) -> Request:
        """Forget what has come in of a request that is asked for again from its beginning."""
        request = self._streams[key].request
        self._streams[key] = Stream(request)
        return request

    def extend(
        self, key: Key, token_ids: Sequence[int], logprobs: Sequence[float], version: int, events: StepEvents
    ) -> None:
        """Add tokens.

        Raises:
            FloatingPointError: A log-prob is no number.
        """
        if any(math.isnan(logprob) for logprob in logprobs):
            raise FloatingPointError(
                f"The engine's log-probs are NaN at version {version}; look for NaN weights or a learning rate that is "
                "too high."
            )
        stream = self._streams[key]
        before = len(stream.token_ids)
        stream.token_ids += token_ids
        stream.logprobs += logprobs
        stream.versions += [version] * len(token_ids)
        events.num_tokens += len(token_ids)
        point = self._features.reached(before, len(stream.token_ids))
        if point is not None:
            self._reached.setdefault(point, []).append(stream)

    def observe(self, events: StepEvents) -> None:
        """Show the completions that have come to a point since the last time."""
        events.observations += [self._features.of_completions(streams, p) for p, streams in self._reached.items()]
        self._reached.clear()

    def finish(self, key: Key, reason: FinishReason, events: StepEvents) -> None:
        """End a completion."""
        stream = self._streams.pop(key)
        text = str(self._tokenizer.decode(stream.token_ids, skip_special_tokens=True))
        events.finished.append(stream.completion(reason, text))

    def abort(self, keys: Iterable[Key]) -> list[Completion]:
        """End those of ``keys`` that are in flight, and return what they have."""
        return [self._streams.pop(key).completion("abort") for key in set(keys) if key in self._streams]


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
