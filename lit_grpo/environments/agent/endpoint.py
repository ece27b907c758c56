"""An endpoint on loopback that speaks as OpenAI's and vLLM's servers do, and is answered by the run's generator."""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lit_grpo.environments.agent.dialogue import FULL, OVER, Dialogue
from lit_grpo.environments.agent.fields import Refused, Route
from lit_grpo.process.terminal import error_text, one_line

if TYPE_CHECKING:
    from lit_grpo.data.chat import Message
    from lit_grpo.environments.agent.dialogue import Reply

logger = logging.getLogger(__name__)
HOST = "127.0.0.1"
MAX_BYTES = 16 * 2**20
"""The largest request that is read."""
MODEL = "policy"
PATHS = "POST /v1/chat/completions, POST /inference/v1/generate and GET /v1/models"


class Endpoint:
    """Serves ``/v1/chat/completions``, ``/v1/models`` and vLLM's ``/inference/v1/generate``.

    Each trajectory has an address of its own, ``http://127.0.0.1:PORT/ID/v1``; at the address without an id, the header
    ``X-Session-ID`` says which it is. It runs on the event loop that :meth:`serve` is called on.

    A run that is resumed has another port and another ``api_key``. So it refuses what an agent of the run before still
    asks, which a kill may have left at work in a process of its own.

    Attributes:
        api_key: Bearer token that clients have to send.
        ends: The tokens that end a turn.
    """

    def __init__(self) -> None:
        self.api_key = secrets.token_urlsafe(32)
        self.ends: tuple[int, ...] = ()
        self._dialogues: dict[str, Dialogue] = {}
        self._started: asyncio.Future[web.AppRunner] | None = None
        self._num_at_work, self._worked_s, self._since = 0, 0.0, 0.0

    @property
    def worked_s(self) -> float:
        """Seconds in which at least one request was worked on so far, without waiting for the policy."""
        return self._worked_s + (time.monotonic() - self._since if self._num_at_work else 0.0)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Count the seconds within in :attr:`worked_s`; called on the event loop."""
        if self._num_at_work == 0:
            self._since = time.monotonic()
        self._num_at_work += 1
        try:
            yield
        finally:
            self._worked_s, self._since = self.worked_s, time.monotonic()
            self._num_at_work -= 1

    async def serve(self, dialogue: Dialogue, at_end: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> str:
        """Take requests of a trajectory; return its address. The server is stopped by what ``at_end`` is given."""
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
            at_end(self.stop)
        runner = await asyncio.shield(self._started)
        self._dialogues[dialogue.id] = dialogue
        return f"http://{HOST}:{runner.addresses[0][1]}/{dialogue.id}/v1"

    def forget(self, dialogue: Dialogue) -> None:
        self._dialogues.pop(dialogue.id, None)
        dialogue.close()

    async def stop(self) -> None:
        started, self._started = self._started, None
        if started is not None and started.done() and not started.cancelled():
            await started.result().cleanup()

    async def _start(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BYTES)
        for place in ("", "/{session}"):
            app.router.add_get(f"{place}/v1/models", self._models)
            app.router.add_post(f"{place}/v1/chat/completions", functools.partial(self._answer, "chat", _as_chat))
            app.router.add_post(f"{place}/inference/v1/generate", functools.partial(self._answer, "tokens", _as_tokens))
        unheard = logging.getLogger(f"{__name__}.http")  # aiohttp prints a traceback where a client sends no HTTP
        unheard.setLevel(logging.CRITICAL)
        runner = web.AppRunner(app, access_log=None, logger=unheard, shutdown_timeout=1.0, auto_decompress=False)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        return runner

    # ---- what every request goes through ---------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(shown, f"Bearer {self.api_key}".encode()):
            return _error("The bearer token is not the api_key that the agent was given.", "unauthorized", 401)
        try:
            return await handler(request)
        except Refused as refused:
            return _error(str(refused), refused.code, refused.status)
        except web.HTTPException as error:
            return _error(f"{error.reason} ({request.method}): the endpoint has {PATHS}.", "http", error.status)
        except ConnectionError:  # the client is gone
            raise
        except Exception as error:  # of a part of ours that nobody foresaw
            logger.warning("The endpoint of agents failed at a request (%s); please report it.", error_text(error))
            return _error(f"The endpoint failed at this request ({error_text(error)}).", "server_error", 500)

    def _dialogue(self, request: web.Request) -> Dialogue:
        session = request.match_info.get("session") or request.headers.get("X-Session-ID", "")
        if session not in self._dialogues:
            raise Refused(f"{OVER} Use the base_url that the agent was given, or its X-Session-ID.", "over", 404)
        return self._dialogues[session]

    async def _answer(
        self, route: Route, written: Callable[[Dialogue, Reply], Sequence[bytes]], request: web.Request
    ) -> web.StreamResponse:
        """Have a request answered by the policy, and send the reply; several parts are sent as an event stream."""
        dialogue = self._dialogue(request)
        try:
            reply = await dialogue.answer(route, await _body(request))
            try:
                parts = await dialogue.apart(written, dialogue, reply)
            except Exception as error:
                raise dialogue.fail(error) from error
        except Refused as refused:
            dialogue.log.counts["refused_requests"] += refused.code not in ("over", FULL)  # which end it
            raise
        if len(parts) == 1:
            return web.Response(body=parts[0], content_type="application/json")
        return await _stream(request, parts)

    # ---- routes -----------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        room = {}
        if "session" in request.match_info:
            asked = self._dialogue(request).request
            room = {"max_model_len": len(asked.prompt.token_ids) + asked.sampling.room}
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "lit_grpo", **room}
        return web.json_response({"object": "list", "data": [model]})


async def _body(request: web.Request) -> bytes:
    """Return the body of a request."""
    if encoding := request.headers.get("Content-Encoding"):
        raise Refused(f"The endpoint reads no Content-Encoding {encoding!r:.60}; send the body as it is.", status=415)
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise Refused(
            f"The request has more than {MAX_BYTES} bytes ({MAX_BYTES // 2**20} MiB); send less.", "too_large", 413
        ) from None
    except web.RequestPayloadError as error:
        why = one_line(str(error)).removeprefix("400, message: ")
        raise Refused(f"The body cannot be read as the headers say ({why:.120}); correct them.") from None


def _as_tokens(dialogue: Dialogue, reply: Reply) -> list[bytes]:
    """Write a reply as vLLM does to token ids."""
    choice = {
        "index": 0,
        "token_ids": reply.token_ids,
        "finish_reason": reply.finish_reason,
        "logprobs": {"content": _logprobs(reply, _numbers(reply))},
    }
    name = reply.asked.get("request_id") or f"{dialogue.id}-{len(reply.before)}"
    return [_json({"request_id": name, "choices": [choice]})]


def _as_chat(dialogue: Dialogue, reply: Reply) -> list[bytes]:
    """Write a reply as OpenAI does to a conversation: as one object, or as the events of a stream."""
    asked, message = reply.asked, _of_wire(reply.message)
    reason = "tool_calls" if "tool_calls" in message else reply.finish_reason
    given: dict[str, Any] = {"logprobs": None, "finish_reason": reason}
    if asked.get("logprobs"):
        decode = dialogue.chat.tokenizer.decode
        by_number = asked.get("return_tokens_as_token_ids")
        names = _numbers(reply) if by_number else [str(decode([token])) for token in reply.token_ids]
        given["logprobs"] = {"content": _logprobs(reply, names)}
    prompt_ids = {}
    if asked.get("return_token_ids"):
        given["token_ids"], prompt_ids = reply.token_ids, {"prompt_token_ids": reply.before}
    counts = {"prompt_tokens": len(reply.before), "completion_tokens": len(reply.token_ids)}
    usage = {"usage": counts | {"total_tokens": sum(counts.values())}}
    whole = {
        "id": f"chatcmpl-{dialogue.id}-{len(reply.before)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": asked.get("model") or MODEL,
        **prompt_ids,
    }
    if not asked.get("stream"):
        return [_json({**whole, "choices": [{"index": 0, "message": message, **given}], **usage})]
    whole["object"] = "chat.completion.chunk"
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{**call, "index": number} for number, call in enumerate(calls)]
    chunks = [{**whole, "choices": [{"index": 0, "delta": message, **given, "finish_reason": None}]}]
    chunks += [{**whole, "choices": [{"index": 0, "delta": {}, "finish_reason": given["finish_reason"]}]}]
    if asked.get("stream_options", {}).get("include_usage"):
        chunks += [{**whole, "choices": [], **usage}]
    return [*map(_json, chunks), b"[DONE]"]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _numbers(reply: Reply) -> list[str]:
    return [f"token_id:{token}" for token in reply.token_ids]


def _logprobs(reply: Reply, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"token": name, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for name, logprob in zip(names, reply.logprobs, strict=True)
    ]


def _of_wire(message: Message) -> dict[str, Any]:
    """Return a turn with arguments of calls as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


async def _stream(request: web.Request, events: Sequence[bytes]) -> web.StreamResponse:
    """Send a turn as server-sent events; all of them at once, because tokens come when the turn is over."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write(b"".join(b"data: %b\n\n" % event for event in events))
    await response.write_eof()
    return response


def _error(sentence: str, code: str, status: int) -> web.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    said = {"message": sentence, "type": kind, "param": None, "code": code}
    return web.json_response({"error": said}, status=status)
