"""The client of a vLLM server: HTTP requests in the thread of an event loop, and the completions that stream in."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import token_hex
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from lit_grpo.process.calls import EventLoop
from lit_grpo.process.terminal import warn
from lit_grpo.rollout.vllm.guard import NAME_HEADER, OWNER_PATH, PROCESS_HEADER, RUN_HEADER, TOKEN_VARIABLE
from lit_grpo.rollout.vllm.streams import NotAsAsked, SampledChunk

_LOOK_S = 5.0  # in which a server that is well answers
_PATIENCE = 5  # time-outs without progress, of a server that says that it is well
_TELL_S = 5.0  # of silence after which the user is told what is waited for
_COMPLETIONS, _GENERATE = "/v1/completions", "/inference/v1/generate"
_ENGINE_PATH = "/is_paused"  # which the engine answers; /health is answered by the front end alone
_MAX_ANSWER, _MAX_LINE = 2**28, 2**24  # bytes
_MAX_LINES_AFTER = 16  # after the last token of a completion
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # of answers that are not vLLM's
_T = TypeVar("_T")


class ServerError(RuntimeError):
    """A server does not answer, or answers with an error.

    ``hung`` says that it did nothing for too long, ``nonsense`` that it answered what no vLLM server answers,
    ``foreign`` that other weights than this run's have sampled the tokens of a completion, and ``refuses`` that it
    takes a prompt for a wrong one.
    """

    def __init__(
        self,
        sentence: str,
        hung: bool = False,
        nonsense: bool = False,
        foreign: bool = False,
        refuses: bool = False,
    ) -> None:
        super().__init__(sentence)
        self.hung, self.nonsense, self.foreign, self.refuses = hung, nonsense, foreign, refuses


class ServerClient:
    """A server with a :class:`~lit_grpo.rollout.vllm.guard.Guard`, taken for one run.

    Each answer names the server's process, and each completion the weights that have sampled it (vLLM's
    ``weight_versions``). So tokens of a server that was restarted, or of weights that this run has not sent, are an
    error and not taken.

    Args:
        url: The address of the server.
        token: Token that requests send.
        run: The run that takes the server.
        timeout_s: Seconds without progress after which the server is asked whether it is well.
        loop: Event loop that runs the requests.

    Attributes:
        model: The server's name for the model to sample with.
        weights: The server's name for the weights that this run has sent.
        vocab_size: A number above the ids of all its tokens.
    """

    def __init__(self, url: str, token: str, run: str, timeout_s: float, loop: EventLoop) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.model = self.weights = ""
        self.vocab_size = 2**31
        self._loop = loop
        self._process = ""
        self._num_heard = 0  # answers and lines
        self._holding: httpx.Response | None = None  # by which the server is this run's
        own_name = quote(f"process {os.getpid()} on {socket.gethostname()}, in {Path.cwd()}", safe=" /,.-_")[:300]
        certificates = ssl.create_default_context(
            cafile=os.environ.get("SSL_CERT_FILE"), capath=os.environ.get("SSL_CERT_DIR")
        )
        # A server closes connections that have been idle for five seconds, which is not an error.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=1.0)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}", RUN_HEADER: run, NAME_HEADER: own_name},
            timeout=httpx.Timeout(None, connect=timeout_s),
            limits=limits,
            trust_env=False,  # a proxy would see the token
            follow_redirects=False,  # another host would get the token
            verify=certificates,
        )
        loop.at_end(self._http.aclose)

    # ---- whose it is ------------------------------------------------------------------------------

    def check_guarded(self) -> None:
        """Raise a ValueError if the server does not answer, or does not ask for a token; it is not told this run's."""
        unnamed = {"Authorization": "none"}
        try:
            response = self._loop.run(self._request("GET", OWNER_PATH, timeout=self.timeout_s, headers=unnamed))
            if response.is_redirect:
                raise self._redirected(response, OWNER_PATH)
        except ServerError as error:
            raise ValueError(f"{error} Start it with python -m lit_grpo serve, or correct urls.") from error
        if PROCESS_HEADER not in response.headers:
            raise ValueError(
                f"The server at {self.url} does not ask for a token, so anybody who reaches it could exchange its "
                "weights; start it with python -m lit_grpo serve, which puts a guard before it."
            )
        if response.status_code != 401:
            raise ValueError(f"The vLLM server at {self.url} does not let us in: {_message(response)}")

    def take(self) -> None:
        """Take the server for this run, until it is released or this process ends.

        Raises:
            ValueError: It belongs to another run.
            ServerError: It does not let this one in.
        """
        self.leave()
        response = self._wait(self.patiently(self._hold()), OWNER_PATH)
        self._check_guard(response, OWNER_PATH)
        if response.status_code == 409:
            raise ValueError(_said(response).replace("The server", f"The vLLM server at {self.url}", 1))
        self._check(response, OWNER_PATH)
        self._process = response.headers[PROCESS_HEADER]

    async def _hold(self) -> httpx.Response:
        """Ask for the server; an answer that grants it goes on as long as it is this run's."""
        try:
            response = await self._http.send(self._http.build_request("POST", OWNER_PATH), stream=True)
            if response.is_success:
                self._holding = response
            else:
                await response.aread()
        except httpx.HTTPError as error:
            raise self._silent(OWNER_PATH, error) from error
        return response

    def is_ours(self) -> bool:
        """Whether it still belongs to this run, and is the process that this run has taken."""
        try:
            response = self._loop.run(self._request("GET", OWNER_PATH, timeout=_LOOK_S))
            if not response.is_success or response.headers.get(PROCESS_HEADER) != self._process:
                return False
            return self._read(response, OWNER_PATH, lambda answer: answer["owned"] is True)
        except ServerError:
            return False

    def release(self) -> None:
        """Let other runs have the server."""
        if self._holding is not None:
            with suppress(ServerError):
                self._loop.run(self._request("DELETE", OWNER_PATH, timeout=_LOOK_S))
        self.leave()

    def leave(self) -> None:
        """Send nothing more to whatever is at its address now."""
        holding, self._holding = self._holding, None
        if holding is not None:
            self._loop.run(holding.aclose())

    # ---- control ----------------------------------------------------------------------------------

    def answers(self, timeout_s: float = _LOOK_S) -> bool:
        """Whether the front end and the engine both say, each within ``timeout_s``, that they are well."""
        return not self._wait(self._ailment(timeout_s), "whether it is well", timeout_s)

    def get(self, path: str, read: Callable[[Any], _T] = lambda answer: answer, **query: Any) -> _T:
        """Ask for something; return what ``read`` finds in the decoded answer (``None`` where it is not JSON).

        Raises:
            ServerError: The server does not answer, or ``read`` cannot read the answer.
        """
        return self._call("GET", path, read, params=query)

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        read: Callable[[Any], _T] = lambda answer: answer,
        engine_works: bool = False,
    ) -> _T:
        """Tell or ask something; as :meth:`get`. An engine that works on it answers nothing else meanwhile."""
        return self._call("POST", path, read, engine_works, json=body)

    def score(self, sequences: Sequence[Sequence[int]], salt: str) -> list[list[float]]:
        """Return the log-probs of all tokens after the first of each sequence."""
        body = {"model": self.model, "prompt": sequences, "max_tokens": 1, "prompt_logprobs": 0, "cache_salt": salt}

        def read(answer: Any) -> list[list[float]]:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            scores = []
            for token_ids, choice in zip(sequences, choices, strict=True):
                told = zip(token_ids[1:], choice["prompt_logprobs"][1:], strict=True)
                scores.append([float(logprobs[str(token)]["logprob"]) for token, logprobs in told])
            return scores

        return self.post(_COMPLETIONS, body, read)

    def ask_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Return what each worker answers; numbers and truth values come as text."""
        body = {"method": method, "kwargs": arguments}
        return self.post("/collective_rpc", body, lambda answer: list(answer["results"]), engine_works=True)

    def _call(
        self, method: str, path: str, read: Callable[[Any], _T], engine_works: bool = False, **options: Any
    ) -> _T:
        response = self._wait(
            self.patiently(self._request(method, path, **options), asks_engine=not engine_works),
            path,
            limit_s=_PATIENCE * self.timeout_s,
            tell_s=max(_TELL_S, self.timeout_s) if engine_works else _TELL_S,
        )
        self._num_heard += 1
        self._check_guard(response, path)
        self._check(response, path)
        return self._read(response, path, read)

    def _read(self, response: httpx.Response, path: str, read: Callable[[Any], _T]) -> _T:
        """Return what ``read`` finds in the decoded answer."""
        is_json = "json" in response.headers.get("content-type", "") and response.content
        try:
            return read(response.json() if is_json else None)
        except _UNREADABLE as error:
            raise self._nonsense(f"answers {path} with {_message(response)!r}, in which {error!r}") from error

    def _wait(
        self, work: Coroutine[Any, Any, _T], path: str, limit_s: float | None = None, tell_s: float | None = None
    ) -> _T:
        """Wait for what the server does, and tell the user where that takes long."""
        future, began, tell_s = self._loop.begin(work), time.monotonic(), tell_s or _TELL_S
        while not wait_for([future], timeout=tell_s).done:
            waited_s = time.monotonic() - began
            left_out = "" if limit_s is None else f"; it is left out at {limit_s:g} s"
            warn(
                f"Waiting for the vLLM server at {self.url}: {path} has not been answered for {waited_s:.0f} s"
                f"{left_out}.",
                stacklevel=2,
            )
            tell_s = 2 * waited_s
        return future.result()

    async def patiently(self, work: Coroutine[Any, Any, _T], asks_engine: bool = True) -> _T:
        """Wait for ``work`` as long as the server makes progress with anything, or says that it is well.

        Args:
            work: Coroutine that waits for the server.
            asks_engine: Whether the engine is checked too, which does not answer while it loads weights.

        Raises:
            ServerError: The server has hung: it does not answer, or has made no progress for several time-outs.
        """
        task = asyncio.ensure_future(work)
        num_silent, num_heard = 0, self._num_heard
        try:
            while not (await asyncio.wait({task}, timeout=self.timeout_s))[0]:
                num_silent = num_silent + 1 if num_heard == self._num_heard else 0
                num_heard = self._num_heard
                if not num_silent:
                    continue
                ailment = await self._ailment(self.timeout_s, asks_engine)
                if task.done():
                    break
                if ailment or num_silent >= _PATIENCE:
                    raise ServerError(
                        f"The vLLM server at {self.url} has hung: {num_silent} time-outs of {self.timeout_s:g} s "
                        f"without progress, and {ailment or 'it says that it is well'}.",
                        hung=True,
                    )
            return task.result()
        finally:
            task.cancel()

    async def _ailment(self, timeout_s: float, asks_engine: bool = True) -> str:
        """Return what is wrong with the server, if anything, as it shows within ``timeout_s``."""
        try:
            if not (await self._request("GET", "/health", timeout=timeout_s)).is_success:
                return "it says that it is not well"
        except ServerError:
            return "it does not answer"
        try:
            if asks_engine:
                await self._request("GET", _ENGINE_PATH, timeout=timeout_s)
        except ServerError:
            return "it answers, but its engine does not"
        return ""

    async def _request(self, method: str, path: str, timeout: float | None = None, **options: Any) -> httpx.Response:
        """Return the whole answer, which has to come within ``timeout`` seconds where that is given."""
        content = bytearray()
        try:
            async with asyncio.timeout(timeout), self._http.stream(method, path, **options) as response:
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > _MAX_ANSWER:
                        raise self._nonsense(f"answers {path} with more than {_MAX_ANSWER} bytes")
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._silent(path, error) from error
        transfer = {"content-encoding", "content-length", "transfer-encoding"}  # which describe the bytes on the wire
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in transfer]
        return httpx.Response(response.status_code, headers=headers, content=bytes(content), request=response.request)

    # ---- answers that are none --------------------------------------------------------------------

    def _check_guard(self, response: httpx.Response, path: str) -> None:
        """Check that the guarded server has answered, and not another program at its address."""
        if response.is_redirect:
            raise self._redirected(response, path)
        process = response.headers.get(PROCESS_HEADER, "")
        if not process:
            raise self._nonsense(
                f"answers {path} with {_message(response)!r}, as no server of python -m lit_grpo serve does: another "
                "program, or a proxy, is at its address"
            )
        if path != OWNER_PATH and process != self._process:
            raise ServerError(f"The vLLM server at {self.url} was restarted, and has no weights of this run.")

    def _check(self, response: httpx.Response, path: str) -> None:
        if response.status_code == 401:
            raise ServerError(
                f"The vLLM server at {self.url} does not take this run's token; set {TOKEN_VARIABLE} to the one that "
                "python -m lit_grpo serve has named."
            )
        if not response.is_success:
            raise ServerError(f"The vLLM server at {self.url} answers {path} with: {_message(response)}")

    def _redirected(self, response: httpx.Response, path: str) -> ServerError:
        return self._nonsense(
            f"sends {path} on to {response.headers.get('location', '')[:200]!r}, which is not followed, for the token "
            "would go there; name the address that answers itself"
        )

    def _silent(self, path: str, error: Exception) -> ServerError:
        return ServerError(f"The vLLM server at {self.url} does not answer {path}: {_named(error)}.")

    def _nonsense(self, what: str) -> ServerError:
        return ServerError(f"The vLLM server at {self.url} {what}.", nonsense=True)

    # ---- completions ------------------------------------------------------------------------------

    async def stream(self, prompt: list[int], fields: Mapping[str, Any], salt: str) -> AsyncIterator[SampledChunk]:
        """Sample a completion of ``prompt``, chunk by chunk.

        Args:
            prompt: Token ids of the prompt.
            fields: vLLM's sampling parameters.
            salt: The engine may share the KV cache of requests with the same salt.

        Raises:
            ServerError: The server fails, refuses the request, or has sampled with other weights than those that this
                run has sent.
        """
        weights, num_left, num_lines_left = self.weights, int(fields.get("max_tokens") or 2**31), math.inf
        name, num_tokens = token_hex(8), 0
        body = {"token_ids": prompt, "sampling_params": fields, "model": self.model, "cache_salt": salt, "stream": True}
        body |= {"request_id": name, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        try:
            async with self._http.stream("POST", _GENERATE, json=body) as response:
                await self._check_stream(response)
                async for line in self._lines(response):
                    if line.startswith("data: {") and num_lines_left == math.inf:
                        chunk = self._chunk(line[6:], name, num_tokens, num_left, weights)
                        self._num_heard += bool(chunk.token_ids)
                        num_tokens += len(chunk.token_ids)
                        num_left -= len(chunk.token_ids)
                        if chunk.finish_reason is not None:
                            num_lines_left = _MAX_LINES_AFTER
                        yield chunk
                    elif num_lines_left == math.inf and line and line != "data: [DONE]" and line[0] != ":":
                        raise self._nonsense(f"sends {line[:200]!r} as a part of a completion")
                    num_lines_left -= 1
                    if num_lines_left <= 0:
                        return
        except httpx.HTTPError as error:
            raise ServerError(f"The vLLM server at {self.url} broke off: {_named(error)}.") from error

    async def _check_stream(self, response: httpx.Response) -> None:
        """Check that a completion follows."""
        if response.is_success and response.headers.get(PROCESS_HEADER, "") == self._process:
            return
        content = b""
        async for part in response.aiter_bytes():
            content += part
            if len(content) > 500:
                break
        answer = httpx.Response(response.status_code, headers=response.headers, text=content.decode(errors="replace"))
        self._check_guard(answer, _GENERATE)
        if answer.status_code in (400, 404, 422):
            raise ServerError(f"The vLLM server at {self.url} refuses a prompt: {_message(answer)}", refuses=True)
        self._check(answer, _GENERATE)

    async def _lines(self, response: httpx.Response) -> AsyncIterator[str]:
        """Yield the lines of an answer; one that does not end is an error."""
        begun = b""
        async for part in response.aiter_bytes():
            *lines, begun = (begun + part).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace").rstrip("\r")
            if len(begun) > _MAX_LINE:
                raise self._nonsense(f"sends a line of more than {_MAX_LINE} bytes in a completion")
        yield begun.decode(errors="replace")

    def _chunk(self, text: str, name: str, num_before: int, num_left: int, weights: str) -> SampledChunk:
        """Read an event of the completion ``name``, all of it sampled by these ``weights``.

        vLLM says with each event how many tokens there are so far. So one that is lost, comes twice or is of another
        completion shows at once.
        """
        try:
            event = json.loads(text)
            if "choices" not in event:
                raise ServerError(f"The vLLM server at {self.url} broke off: {json.dumps(event)[:300]}")
            choice, others = event["choices"][0], event["choices"][1:]
            reason, token_ids = choice["finish_reason"], list(choice["token_ids"] or [])
            content = (choice["logprobs"] or {}).get("content") or []
            chunk = SampledChunk(token_ids, [each["logprob"] for each in content], reason)
            counted = num_before + len(token_ids)
            spans = choice.get("weight_versions") or []
            sampled_by, ends = {str(span["version"]) for span in spans}, [span["end"] for span in spans]
            told = (event.get("usage") or {}).get("completion_tokens", counted)
            is_its = not others and choice.get("index", 0) == 0 and str(event.get("request_id", name)).endswith(name)
            named = [each.get("token_id") for each in content]
        except _UNREADABLE as error:
            raise self._nonsense(f"sends {text[:200]!r} as a part of a completion, in which {error!r}") from error
        if reason not in (None, "stop", "length"):
            raise ServerError(f"The vLLM server at {self.url} broke off a completion: {reason}.")
        try:
            chunk.check(num_left, self.vocab_size)
        except NotAsAsked as error:
            raise self._nonsense(str(error)) from error
        if reason is not None and sampled_by != {weights}:
            raise ServerError(
                f"The vLLM server at {self.url} has sampled with the weights {sorted(sampled_by)}, where this run has "
                f"sent {weights!r}: somebody else has changed its weights.",
                foreign=True,
            )
        if named != token_ids:
            raise self._nonsense(f"sends the tokens {token_ids} with the log-probs of {named}")
        if not is_its:
            raise self._nonsense(f"sends {text[:200]!r} as a part of a completion, which is of another")
        told = ends[-1] if reason is not None and told == counted else told
        if told != counted:
            raise self._nonsense(
                f"has sent {counted} tokens of a completion, where it counts {told!r}: some are missing, or came twice"
            )
        return chunk


@dataclass(frozen=True)
class Arrival:
    """A chunk of the completion with this ticket, or the failure of its server."""

    ticket: int
    content: SampledChunk | ServerError


class HttpReceiver:
    """Receives completions from servers; each is a task of the event loop, known by its ticket."""

    def __init__(self, loop: EventLoop) -> None:
        self._arrivals: SimpleQueue[Arrival | BaseException] = SimpleQueue()
        self._tasks: dict[int, Future[None]] = {}
        self._loop = loop

    def begin(self, ticket: int, client: ServerClient, prompt: list[int], fields: Mapping[str, Any], salt: str) -> None:
        """Ask a server for a completion."""

        async def read() -> None:
            finished = False
            async for chunk in client.stream(prompt, fields, salt):
                self._arrivals.put(Arrival(ticket, chunk))
                finished = chunk.finish_reason is not None
            if not finished:
                raise ServerError(f"The vLLM server at {client.url} ended a completion without a reason.")

        async def pump() -> None:
            try:
                await client.patiently(read())
            except ServerError as error:
                self._arrivals.put(Arrival(ticket, error))
            except Exception as error:  # an error that no server has made is raised by arrivals()
                self._arrivals.put(error)

        task = self._tasks[ticket] = self._loop.begin(pump())
        task.add_done_callback(lambda _: self._tasks.pop(ticket, None))

    def arrivals(self, timeout_s: float) -> list[Arrival]:
        """Return what has come in, after waiting for something at most ``timeout_s``."""
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
        """Give up a completion that has not ended; its server sees the connection close, and stops."""
        task = self._tasks.pop(ticket, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Give up all completions."""
        for ticket in list(self._tasks):
            self.cancel(ticket)


def _named(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()


def _message(response: httpx.Response) -> str:
    return f"{response.status_code} {_said(response)}"


def _said(response: httpx.Response) -> str:
    """Return the sentence of an error's JSON, or the beginning of whatever else was answered."""
    try:
        error = response.json()["error"]
        error = error["message"] if isinstance(error, dict) else error
    except _UNREADABLE:
        return response.text[:500]
    return error[:500] if isinstance(error, str) else response.text[:500]
