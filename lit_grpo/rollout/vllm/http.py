"""The client of a vLLM server: HTTP requests in the thread of an event loop, and the completions that stream in."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import token_hex
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import httpx

from lit_grpo.process.calls import EventLoop
from lit_grpo.process.terminal import warn
from lit_grpo.rollout.vllm.guard import NAME_HEADER, OWNER_PATH, PROCESS_HEADER, RUN_HEADER, TOKEN_VARIABLE
from lit_grpo.rollout.vllm.images import Shown, other_tokens
from lit_grpo.rollout.vllm.streams import DraftCount, SampledChunk

_LOOK_S = 3.0  # in which a server that is well answers
_EACH_S = 0.5  # between two looks of a watch
_QUIET_S = 1.5  # of silence after which a server is asked whether it is well
_TELL_S = 5.0  # of silence after which the user is told who is waited for
_LEAST_S = 8.0  # of silence before completions move from a server that may only be slow
_SYNC_S = 20.0  # of silence before such a server is left out of a sync, and of the rollout after it, or is given up new
_LONGER = 3  # times the longest silence of a server that was well
_WORKS = 5  # time-outs that work on weights may take
SERVE = "Start it with python -m lit_grpo serve and the policy's model, or correct urls."
_CERTIFICATE = "Name the file of the certificate that has signed the server's in SSL_CERT_FILE, or correct urls."
_AGAIN = "End it, and start it again with python -m lit_grpo serve."
_BY_GUARD = (403, 409, 413)  # refusals of the server's guard, which tell the remedy
_COMPLETIONS, _GENERATE = "/v1/completions", "/inference/v1/generate"
_FRONT, _ENGINE = "/health", "/is_paused"  # the front end answers the first alone, and asks the engine for the second
_SILENT = {_FRONT: "it does not answer", _ENGINE: "it answers, but its engine does not"}
_MAX_ANSWER, _MAX_LINE = 2**28, 2**24  # bytes
_MAX_LINES_AFTER = 16  # after the last token of a completion
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # of answers that are not vLLM's
_T = TypeVar("_T")
_Kind = Literal["other", "hung", "away", "nonsense", "foreign", "refuses"]


class ServerError(RuntimeError):
    """A server does not answer, or answers with an error.

    Its ``kind`` is ``hung`` if its watch has given it up, ``away`` if nobody listens at its address, ``nonsense`` if it
    answered what no vLLM server answers, ``foreign`` if other weights than this run's have sampled the tokens of a
    completion, and ``refuses`` if it takes a prompt for a wrong one. ``remedy`` is a sentence for the user who has
    named the server; it is empty if the error has told the remedy already.
    """

    def __init__(self, sentence: str, kind: _Kind = "other", remedy: str = SERVE) -> None:
        super().__init__(sentence)
        self.kind, self.remedy = kind, remedy

    def with_remedy(self) -> str:
        return f"{self} {self.remedy}".strip()


@dataclass(eq=False)
class _Flight:
    """A request that has not been answered: the task that waits for it, and how long it may be silent."""

    what: str
    asks: Sequence[str]
    limit_s: float
    task: asyncio.Task[Any]
    failure: ServerError | None = None


class Watch:
    """Watches all requests to one server, while there are any, and gives the server up if it is gone or hangs.

    A server is silent as long as no token and no answer comes to any of its requests. After 1.5 s of silence its front
    end and its engine are asked again and again whether they are well. The user is told after 5 s, and at twice that,
    and so on. All requests fail

    - at once, if the server refuses connections or says that it is not well;
    - if it, or its engine alone, does not answer for 8 s (20 s in a sync, and before a new process has sent its first
      token), or for three times its longest silence that ended with an answer: an engine answers between two steps. If
      no other server is well, it is waited for;
    - in any case after ``timeout_s`` of silence. Work on weights, in which the engine is not asked, may take five times
      as long, and if another server is up, three times as long as the same work took before.

    Args:
        url: The address of the server.
        timeout_s: Max seconds of silence.
        ask: Asks a path of the server, and returns the whole answer.

    Attributes:
        is_last: Says whether no other server is well.
        is_silent: Whether the server does not answer, as far as that is known.
    """

    def __init__(self, url: str, timeout_s: float, ask: Callable[[str], Coroutine[Any, Any, httpx.Response]]) -> None:
        self.timeout_s = timeout_s
        self.is_last: Callable[[], bool] = lambda: True
        self.is_silent = False
        self._is_new = False  # whether it is a process that has sent no token yet: a first step may take longest
        self._url, self._ask = url, ask
        self._flights: set[_Flight] = set()
        self._since = time.monotonic()  # the last movement, or the first request after none
        self._lost_since: float | None = None  # the last movement before a failure, until an answer comes
        self._longest_s: dict[str, float] = {}  # without an answer that came, by path or work on weights
        self._answered: dict[str, float] = {}  # when, by path
        self._ended = ""
        self._looks: asyncio.Task[None] | None = None

    @property
    def lost_s(self) -> float:
        """Seconds without an answer of a server that has failed; 0 for others."""
        return 0.0 if self._lost_since is None else time.monotonic() - self._lost_since

    @property
    def patience_s(self) -> float:
        """Seconds in which this server answers if it is well, even from within a long step."""
        return min(max(map(self._short_s, (_FRONT, _ENGINE))), self.timeout_s)

    def forget(self) -> None:
        """Forget how long another process took."""
        self._longest_s.clear()
        self._is_new = True

    def moves(self, has_tokens: bool = False) -> None:
        """Note that something came of a request, as tokens are."""
        self._since = time.monotonic()
        self._is_new = self._is_new and not has_tokens

    def _learn(self, what: str, seconds: float) -> None:
        self._longest_s[what] = max(self._longest_s.get(what, 0.0), seconds)

    def _short_s(self, what: str, least_s: float = _LEAST_S) -> float:
        return max(least_s, _LONGER * self._longest_s.get(what, 0.0))

    async def over(
        self,
        work: Coroutine[Any, Any, _T],
        what: str,
        asks: Sequence[str] = (_FRONT, _ENGINE),
        limit_s: float | None = None,
    ) -> _T:
        """Await a request under the watch.

        Args:
            work: Coroutine that waits for the server.
            what: Name of the request in messages, such as its path.
            asks: Paths that are asked meanwhile; without the engine's, the engine works on weights.
            limit_s: Max seconds of silence, if not ``timeout_s`` (five times that for work on weights).

        Raises:
            ServerError: The server is given up, or what ``work`` raises.
        """
        task = asyncio.current_task()
        assert task is not None
        works = tuple(asks) == (_FRONT,)
        flight = _Flight(what, asks, limit_s or self.timeout_s * (_WORKS if works else 1), task)
        if not self._flights:
            self._since = time.monotonic()
        self._flights.add(flight)
        if self._looks is None or self._looks.done():
            self._looks = asyncio.create_task(self._look())
        try:
            result = await work
            if works:
                self._learn(what, time.monotonic() - self._since)
            self.moves()
            self._lost_since, self.is_silent = None, False
            return result
        except asyncio.CancelledError:
            if flight.failure is None:
                raise
            task.uncancel()
            raise flight.failure from None
        except ServerError:
            self._lost_since = self._lost_since or self._since
            raise
        finally:
            self._flights.discard(flight)

    async def _look(self) -> None:
        """Look at the server again and again, until nothing is asked of it or it is given up."""
        probes: dict[str, asyncio.Task[None]] = {}
        tell_s = _TELL_S
        try:
            while self._flights:
                await asyncio.sleep(min(_EACH_S, self.timeout_s / 4))
                silent_s = time.monotonic() - self._since
                if silent_s < min(_QUIET_S, self.timeout_s / 2) or not self._flights:
                    tell_s, self._ended, self.is_silent = _TELL_S, "", False
                    continue
                for path in {path for flight in self._flights for path in flight.asks}:
                    if path not in probes or probes[path].done():
                        probes[path] = asyncio.create_task(self._probe(path))
                is_last = self.is_last()
                found, left_s = self._judge(silent_s, is_last)
                self.is_silent = left_s == 0.0 or found in _SILENT.values()
                what = f"{self._what} for {silent_s:.0f} s, and {found}."
                if silent_s >= left_s:
                    self._give_up(f"is gone: {found}." if self._ended else f"has hung: {what}")
                    for path in (path for path, text in _SILENT.items() if text == found):
                        self._learn(path, silent_s)  # it may only be slow, and has more time if it comes back
                elif silent_s >= tell_s:
                    then = f"It is left out at {left_s:.0f} s, and the run goes on with the other servers."
                    if is_last:
                        then = f"No other server is well, so the run waits for it until {left_s:.0f} s have passed."
                    warn(f"Waiting for the vLLM server at {self._url}: {what} {then}", stacklevel=2)
                    tell_s = 2 * silent_s
        finally:
            for probe in probes.values():
                probe.cancel()

    async def _probe(self, path: str) -> None:
        """Note whether a path is answered, or whether the server is gone."""
        silent_since = max(self._since, self._answered.get(path, 0.0))
        try:
            response = await self._ask(path)
            self._answered[path] = time.monotonic()
            self._learn(path, self._answered[path] - silent_since)
            if path == _FRONT:
                self._ended = "" if response.is_success else "it says that it is not well"
        except ServerError as error:
            if error.kind == "away":
                self._ended = "it refuses connections"

    def _judge(self, silent_s: float, is_last: bool) -> tuple[str, float]:
        """Return what is known of a silent server, and the seconds of silence at which it is given up."""
        if self._ended:
            return self._ended, 0.0
        limit_s = max(flight.limit_s for flight in self._flights)
        asked = [path for path in (_FRONT, _ENGINE) if all(path in flight.asks for flight in self._flights)]
        samples = any(flight.what == _GENERATE for flight in self._flights)
        least_s = _LEAST_S if samples and not self._is_new else _SYNC_S
        found, left_s = "it says that it is well" if asked else "nothing else is known of it", limit_s
        if asked == [_FRONT] and all(flight.what in self._longest_s for flight in self._flights):
            left_s = max(self._short_s(flight.what, _SYNC_S) for flight in self._flights)
        for path in asked:
            answered_s = max(self._answered.get(path, 0.0) - self._since, 0.0)
            if silent_s - answered_s > _QUIET_S:
                found, left_s = _SILENT[path], answered_s + self._short_s(path, least_s)
                break
        return found, limit_s if is_last else min(left_s, limit_s)

    @property
    def _what(self) -> str:
        names, count = {flight.what for flight in self._flights}, len(self._flights)
        if _GENERATE in names:
            return "its completion has not moved" if count == 1 else f"none of its {count} completions has moved"
        return f"{' and '.join(sorted(names))} has not been answered"

    def _give_up(self, why: str) -> None:
        self._lost_since = self._lost_since or self._since
        flights, self._flights = self._flights, set()
        for flight in flights:
            flight.failure = ServerError(f"The vLLM server at {self._url} {why}", "hung", _AGAIN)
            flight.task.cancel()


class ServerClient:
    """A server with a :class:`~lit_grpo.rollout.vllm.guard.Guard`, taken for one run.

    Each answer names the server's process, and each completion the weights that have sampled it (vLLM's
    ``weight_versions``). So tokens of a server that was restarted, or of weights that this run has not sent, are an
    error and not taken.

    Args:
        run: Name of the run that takes the server.
        timeout_s: Max seconds of silence (:class:`Watch`).

    Attributes:
        model: The server's name for the model to sample with.
        weights: The server's name for the weights that this run has sent.
    """

    def __init__(self, url: str, token: str, run: str, timeout_s: float, loop: EventLoop) -> None:
        self.url = url.rstrip("/")
        self.watch = Watch(self.url, timeout_s, lambda path: self._request("GET", path))
        self.model = self.weights = ""
        self._loop = loop
        self._process = ""
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
        asking = self._request("GET", OWNER_PATH, headers={"Authorization": "none"})
        try:
            response = self._loop.run(self.watch.over(asking, OWNER_PATH, asks=()))
        except ServerError as error:
            raise ValueError(error.with_remedy()) from error
        if PROCESS_HEADER not in response.headers:
            raise ValueError(
                f"The server at {self.url} does not ask for a token, so anybody who reaches it could exchange its "
                "weights; start it with python -m lit_grpo serve, which puts a guard before it."
            )
        if response.status_code != 401:
            raise ValueError(f"The vLLM server at {self.url} does not let us in: {_message(response)}")

    def take(self) -> None:
        """Take the server for this run, until it is released or this process ends.

        It is a ValueError if it belongs to another run, and a ServerError if it does not let this one in.
        """
        self.leave()
        response = self._loop.run(self.watch.over(self._hold(), OWNER_PATH))
        self._check(response, OWNER_PATH)
        if self._process != response.headers[PROCESS_HEADER]:
            self.watch.forget()
        self._process = response.headers[PROCESS_HEADER]

    async def _hold(self) -> httpx.Response:
        """Ask for the server; an answer that grants it goes on as long as it is this run's."""
        try:
            response = await self._http.send(self._http.build_request("POST", OWNER_PATH), stream=True)
            if not (response.is_success and PROCESS_HEADER in response.headers):
                async with aclosing(response):
                    return await self._whole(response, OWNER_PATH)
        except httpx.HTTPError as error:
            raise self._silent(OWNER_PATH, error) from error
        self._holding = response
        return response

    def is_ours(self) -> bool:
        """Return whether it still belongs to this run, and is the process that this run has taken."""
        try:
            response = self._loop.run(self._request("GET", OWNER_PATH, timeout=_LOOK_S))
            owned = self._read(response, OWNER_PATH, lambda answer: answer["owned"] is True)
        except ServerError:
            return False
        return owned and response.headers.get(PROCESS_HEADER) == self._process

    def release(self) -> None:
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

    def answers(self, limit_s: float = _LOOK_S) -> bool:
        """Return whether the front end and the engine both say within ``limit_s`` that they are well."""

        async def ask() -> bool:
            asked = (self._request("GET", path, timeout=limit_s) for path in (_FRONT, _ENGINE))
            return (await asyncio.gather(*asked))[0].is_success

        try:
            return self._loop.run(self.watch.over(ask(), "whether it is well", limit_s=limit_s))
        except ServerError:
            return False

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        read: Callable[[Any], _T] = lambda answer: answer,
        engine_works: bool = False,
        what: str = "",
    ) -> _T:
        """Tell or ask something; return what ``read`` finds in the decoded answer (``None`` where it is not JSON).

        An engine that works on it answers nothing else meanwhile. ``what`` is its name in messages, if not the path. A
        server that does not answer, or whose answer cannot be read, is a ServerError.
        """
        asks = (_FRONT,) if engine_works else (_FRONT, _ENGINE)
        response = self._loop.run(self.watch.over(self._request(method, path, json=body), what or path, asks))
        self._check(response, path)
        return self._read(response, path, read)

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

        return self.ask("POST", _COMPLETIONS, body, read, engine_works=True)  # an engine's first forward may take long

    def ask_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Return what each worker answers; numbers and truth values come as text."""
        path, body = "/collective_rpc", {"method": method, "kwargs": arguments}
        return self.ask("POST", path, body, lambda answer: list(answer["results"]), True, f"{path} {method}")

    def _read(self, response: httpx.Response, path: str, read: Callable[[Any], _T]) -> _T:
        """Return what ``read`` finds in the decoded answer."""
        is_json = "json" in response.headers.get("content-type", "") and response.content
        try:
            return read(response.json() if is_json else None)
        except _UNREADABLE as error:
            raise self._error(f"answers {path} with {_message(response)!r}, in which {error!r}.") from error

    async def _request(self, method: str, path: str, timeout: float | None = None, **options: Any) -> httpx.Response:
        """Return the whole answer, which has to come within ``timeout`` seconds where that is given."""
        try:
            async with asyncio.timeout(timeout), self._http.stream(method, path, **options) as response:
                return await self._whole(response, path)
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._silent(path, error) from error

    async def _whole(self, response: httpx.Response, path: str) -> httpx.Response:
        """Read an answer to its end; a ServerError if it has none, or leads to another address."""
        if response.is_redirect:
            raise self._error(
                f"sends {path} on to {response.headers.get('location', '')[:200]!r}, which is not followed, for the "
                "token would go there; name the address that answers itself.",
                remedy="",
            )
        content = bytearray()
        async for part in response.aiter_bytes():
            content += part
            if len(content) > _MAX_ANSWER:
                raise self._error(f"answers {path} with more than {_MAX_ANSWER} bytes.")
        transfer = {"content-encoding", "content-length", "transfer-encoding"}  # which describe the bytes on the wire
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in transfer]
        return httpx.Response(response.status_code, headers=headers, content=bytes(content), request=response.request)

    # ---- answers that are none --------------------------------------------------------------------

    def _check(self, response: httpx.Response, path: str) -> None:
        """Check that the guarded server, and not another program at its address, has answered, and does as asked.

        It is a ValueError if the server belongs to another run, and otherwise a ServerError.
        """
        process, status = response.headers.get(PROCESS_HEADER, ""), response.status_code
        if not process:
            raise self._error(
                f"answers {path} with {_message(response)!r}, as no server of python -m lit_grpo serve does: another "
                "program, or a proxy, is at its address."
            )
        if path != OWNER_PATH and process != self._process:
            raise self._error("was restarted, and has no weights of this run.", "other", "Run the command again.")
        if response.is_success:
            return
        if path == OWNER_PATH and status == 409:
            raise ValueError(_said(response).replace("The server", f"The vLLM server at {self.url}", 1))
        if path == _GENERATE and status in (400, 404, 413, 422):
            raise self._error(f"refuses a prompt: {_message(response)}", "refuses")
        if status == 401:
            raise self._error(
                f"does not take this run's token; set {TOKEN_VARIABLE} to the one that python -m lit_grpo serve has "
                "named.",
                "other",
                remedy="",
            )
        remedy = "" if status in _BY_GUARD else SERVE
        raise self._error(f"answers {path} with: {_message(response)}", "other", remedy)

    def _silent(self, path: str, error: Exception) -> ServerError:
        said, kind = _named(error), "away" if isinstance(error, httpx.ConnectError) else "other"
        remedy = _CERTIFICATE if "CERTIFICATE_VERIFY_FAILED" in said else SERVE
        return self._error(f"does not answer {path}: {said}.", kind, remedy)

    def _error(self, what: str, kind: _Kind = "nonsense", remedy: str = SERVE) -> ServerError:
        return ServerError(f"The vLLM server at {self.url} {what}", kind, remedy)

    # ---- completions ------------------------------------------------------------------------------

    async def stream(
        self, prompt: list[int], fields: Mapping[str, Any], salt: str, shown: Shown | None = None
    ) -> AsyncIterator[SampledChunk | DraftCount]:
        """Sample a completion of ``prompt``, with the sampling parameters ``fields`` in vLLM's names, chunk by chunk.

        After its end comes what was drafted for it, if the server drafts and counts it by request.

        The engine may share the KV cache of requests with the same ``salt``. A server that fails, refuses the request,
        or samples with other weights than those that this run has sent, is a ServerError. So is one that reads a prompt
        that is ``shown`` as other tokens than ``prompt``.
        """
        weights, name, num_tokens, num_after = self.weights, token_hex(8), 0, -1
        body = {"token_ids": prompt, "sampling_params": fields, "model": self.model, "cache_salt": salt, "stream": True}
        body |= {} if shown is None else shown.in_request()
        body |= {"request_id": name, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        try:
            async with self._http.stream("POST", _GENERATE, json=body) as response:
                if not (response.is_success and PROCESS_HEADER in response.headers):
                    response = await self._whole(response, _GENERATE)
                self._check(response, _GENERATE)
                async for line in self._lines(response):
                    if num_after >= 0:  # the completion has ended, and its answer soon does
                        num_after += 1
                        if (count := _draft_count(line)) is not None:
                            yield count
                        if num_after == _MAX_LINES_AFTER:
                            return
                    elif line.startswith("data: {"):
                        read = prompt if shown is not None and not num_tokens else None
                        chunk = self._chunk(line[6:], name, num_tokens, weights, read)
                        if chunk.token_ids:
                            self.watch.moves(has_tokens=True)
                        num_tokens += len(chunk.token_ids)
                        num_after = -1 if chunk.finish_reason is None else 0
                        yield chunk
                    elif line and line != "data: [DONE]" and line[0] != ":":
                        raise self._error(f"sends {line[:200]!r} as a part of a completion.")
        except httpx.HTTPError as error:
            raise self._error(f"broke off: {_named(error)}.", "other") from error
        if num_after < 0:
            raise self._error("ended a completion without a reason.", "other")

    async def _lines(self, response: httpx.Response) -> AsyncIterator[str]:
        """Yield the lines of an answer; one that does not end is an error."""
        begun = b""
        async for part in response.aiter_bytes():
            *lines, begun = (begun + part).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace").rstrip("\r")
            if len(begun) > _MAX_LINE:
                raise self._error(f"sends a line of more than {_MAX_LINE} bytes in a completion.")
        yield begun.decode(errors="replace")

    def _chunk(
        self, text: str, name: str, num_before: int, weights: str, prompt: list[int] | None = None
    ) -> SampledChunk:
        """Read an event of the completion ``name``, all of it sampled by these ``weights``.

        The first event tells how the server has read a ``prompt`` with images.

        vLLM says with each event how many tokens there are so far. So one that is lost, comes twice or is of another
        completion shows at once.
        """
        try:
            event = json.loads(text)
            if "choices" not in event:
                raise self._error(f"broke off: {json.dumps(event)[:300]}", "other")
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
            raise self._error(f"sends {text[:200]!r} as a part of a completion, in which {error!r}.") from error
        if reason not in (None, "stop", "length"):
            raise self._error(f"broke off a completion: {reason}.", "other")
        if reason is not None and sampled_by != {weights}:
            raise self._error(
                f"has sampled with the weights {sorted(sampled_by)}, where this run has sent {weights!r}: somebody "
                "else has changed its weights.",
                "foreign",
            )
        if prompt is not None and (other := other_tokens(prompt, event.get("prompt_token_ids"))):
            raise self._error(other, "refuses")
        if named != token_ids:
            raise self._error(f"sends the tokens {token_ids} with the log-probs of {named}.")
        if not is_its:
            raise self._error(f"sends {text[:200]!r} as a part of a completion, which is of another.")
        told = ends[-1] if reason is not None and told == counted else told
        if told != counted:
            raise self._error(
                f"has sent {counted} tokens of a completion, where it counts {told!r}: some are missing, or came twice."
            )
        return chunk


@dataclass(frozen=True)
class Arrival:
    """A chunk of the completion with this ticket, what was drafted for it, or the failure of its server."""

    ticket: int
    content: SampledChunk | DraftCount | ServerError


class HttpReceiver:
    """Receives completions from servers; each is a task of the event loop, known by its ticket."""

    def __init__(self, loop: EventLoop) -> None:
        self._arrivals: SimpleQueue[Arrival | BaseException] = SimpleQueue()
        self._tasks: dict[int, Future[None]] = {}
        self._loop = loop

    def begin(
        self,
        ticket: int,
        client: ServerClient,
        prompt: list[int],
        fields: Mapping[str, Any],
        salt: str,
        shown: Shown | None = None,
    ) -> None:
        """Ask a server for a completion."""

        async def read() -> None:
            async for chunk in client.stream(prompt, fields, salt, shown):
                self._arrivals.put(Arrival(ticket, chunk))

        async def pump() -> None:
            try:
                await client.watch.over(read(), _GENERATE)
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
        if (task := self._tasks.pop(ticket, None)) is not None:
            task.cancel()

    def close(self) -> None:
        for ticket in list(self._tasks):
            self.cancel(ticket)
        self._arrivals = SimpleQueue()


def _draft_count(line: str) -> DraftCount | None:
    """Read what was drafted for a completion from an event after its end; None where it says nothing of drafts."""
    try:
        counts = json.loads(line.removeprefix("data: "))["metrics"]["speculative_decoding"]
        count = DraftCount(counts["num_draft_tokens"], counts["num_accepted_draft_tokens"])
    except _UNREADABLE:
        return None
    is_count = all(type(number) is int for number in count) and 0 <= count.num_accepted <= count.num_drafted
    return count if is_count else None


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
